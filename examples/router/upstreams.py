"""The engine instances of one role, in round robin or by what they had before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from examples.router.affinity import Affinity
from examples.router.bodies import Json

Role = Literal["prefill", "decode"]

_REST_S = 2.0


@dataclass
class Upstream:
    """One engine instance.

    down_until: until then the others are asked first.
    silent_until: until then nobody waits for it; None unless it let a request wait in vain.
    num_open: requests that it has and has not answered.
    """

    url: str
    role: Role
    down_until: float = 0.0
    silent_until: float | None = None
    num_open: int = 0

    def went_down(self) -> None:
        """Notes that it could not be reached: for a while the others are asked first."""
        self.down_until = time.monotonic() + _REST_S

    def came_back(self) -> None:
        """Notes that it can be reached."""
        self.down_until = 0.0

    def fell_silent(self, rest_s: float) -> None:
        """Notes that it let a request wait in vain: it is spared for so long."""
        self.silent_until = time.monotonic() + rest_s

    def answered(self) -> None:
        """Notes that it answered a request."""
        self.came_back()
        self.silent_until = None

    def is_spared(self, rest_s: float) -> bool:
        """True while nobody shall wait for it.

        When its time is over one request tries it, and the others go without for `rest_s` more.
        """
        if self.silent_until is None:
            return False
        now = time.monotonic()
        if now < self.silent_until:
            return True
        self.silent_until = now + rest_s
        return False


class Rotation:
    """The instances of one role: each call starts with the next one, or by affinity.

    An instance that was down a moment ago comes last and is never left out: a request fails only
    after every instance was asked.
    """

    def __init__(self, role: Role, urls: Sequence[str], *, by_prefix: bool = False) -> None:
        self.upstreams = [Upstream(url.rstrip("/"), role) for url in urls]
        self._affinity = Affinity() if by_prefix else None
        self._first = 0

    def in_turn(self, body: Json | None = None) -> list[Upstream]:
        """Returns every instance, in the order to try them for one request with this body."""
        if not self.upstreams:
            return []
        first, now = self._first, time.monotonic()
        self._first = (first + 1) % len(self.upstreams)
        turned = self.upstreams[first:] + self.upstreams[:first]
        if self._affinity is not None and body is not None:
            up = [each for each in turned if max(each.down_until, each.silent_until or 0.0) <= now]
            chosen = self._affinity.choose(body, up or turned)
            turned.sort(key=lambda upstream: upstream is not chosen)
        return sorted(turned, key=lambda upstream: upstream.down_until > now)
