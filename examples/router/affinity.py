"""Affinity: sends a prompt to the instance that had most of it last."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from examples.router.bodies import Json, encode

if TYPE_CHECKING:
    from examples.router.upstreams import Upstream

_CHUNK_BYTES = 1024
_MOST_CHUNKS = 1 << 20
_MOST_LOAD = 1.25  # of the mean number of open requests


class Affinity:
    """Remembers for each prefix of a prompt the instance that had it last.

    An instance that had over half of a prompt has it in its own cache; any other one loads it from
    the pool. So the prompt goes there, unless that instance has a quarter more open requests than
    the mean: then, and for a prompt that is new, the one with the fewest open requests is chosen.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, Upstream] = OrderedDict()

    def choose(self, body: Json, upstreams: Sequence[Upstream]) -> Upstream:
        """Returns the instance for a request; `upstreams` are those that can be asked."""
        names = list(_prefixes(body))
        chosen = min(upstreams, key=lambda each: each.num_open)
        most = _MOST_LOAD * (1 + sum(each.num_open for each in upstreams)) / len(upstreams)
        for name in reversed(names[len(names) // 2 :]):
            known = self._seen.get(name)
            if known is not None and known in upstreams and known.num_open < most:
                chosen = known
                break
        for name in names:
            self._seen[name] = chosen
            self._seen.move_to_end(name)
        while len(self._seen) > _MOST_CHUNKS:
            self._seen.popitem(last=False)
        return chosen


def _prefixes(body: Json) -> Iterator[bytes]:
    """Yields a name for each whole chunk of a prompt; it stands for all before it as well."""
    prompt = encode({"": body.get("prompt", body.get("messages"))})
    state = hashlib.blake2b(digest_size=16)
    for end in range(_CHUNK_BYTES, len(prompt) + 1, _CHUNK_BYTES):
        state.update(prompt[end - _CHUNK_BYTES : end])
        yield state.digest()
