"""Plan: the faults of one round, all from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

INSTANCES = ("prefill", "decode", "router")
LINKS = ("client-router", "router-prefill", "router-decode")
ANSWER_PATH = frozenset({"decode", "router", "client-router", "router-decode"})
"""Targets whose faults may cost a client its answer; faults of all others may not."""

_LINK_KINDS = ("cut", "slow", "trickle", "hold", "half", "refuse")
_BREAKS_ANSWERS = frozenset({"kill", "cut", "refuse", "half", "hold", "trickle"})


class Fault(NamedTuple):
    """Something that goes wrong at a moment of a round, and for how long."""

    at_s: float
    kind: str
    target: str
    for_s: float

    @property
    def may_cost_answers(self) -> bool:
        return self.target in ANSWER_PATH and self.kind in _BREAKS_ANSWERS

    def __str__(self) -> str:
        return f"{self.at_s:5.2f} s  {self.kind} {self.target} {self.for_s:.2f} s"


class Scene(NamedTuple):
    """The things that can be hurt in a round.

    hangs: parts of the pool that hang on command.
    memory_servers: servers whose memory can be filled and emptied.
    is_sheltered: True if no fault touches ANSWER_PATH: then every request must be answered.
    """

    servers: Sequence[str]
    links: Sequence[str]
    has_disk: bool
    can_vanish: bool
    is_slow: bool
    is_sheltered: bool
    hangs: Sequence[str] = ()
    memory_servers: Sequence[str] = ()


def plan_round(seed: str, scene: Scene, seconds: float, per_s: float) -> list[Fault]:
    """Returns the faults of a round in their order in time."""
    draw = random.Random(seed)
    faults = [_draw_fault(draw, scene, seconds) for _ in range(round(seconds * per_s))]
    if scene.is_sheltered:
        faults = [fault for fault in faults if not fault.may_cost_answers]
    return sorted(faults)


def _draw_fault(draw: random.Random, scene: Scene, seconds: float) -> Fault:
    at_s = draw.uniform(0.0, seconds)
    for_s = draw.uniform(0.01, 0.2) if draw.random() < 0.9 else draw.uniform(0.3, 1.5)
    kinds: dict[str, float] = {
        "kill": 1,
        "stop": 12,
        "link": 40,
        "clock": 8,
        "fill": 6 * scene.has_disk,
    }
    kinds |= {"vanish": 3 * scene.can_vanish, "leave": 3}
    if scene.servers:
        kinds |= {"kill-server": 0.2 if scene.is_slow else 3, "stop-server": 6}
    if scene.hangs:
        kinds["hang"] = 8
    if scene.memory_servers:
        kinds |= {"fill-server": 3, "empty-server": 3}
    kind = draw.choices(list(kinds), list(kinds.values()))[0]
    if kind == "link":
        return Fault(at_s, draw.choice(_LINK_KINDS), draw.choice([*LINKS, *scene.links]), for_s)
    if kind.endswith("-server"):
        of_memory = kind in ("fill-server", "empty-server")
        servers = list(scene.memory_servers if of_memory else scene.servers)
        return Fault(at_s, kind.removesuffix("-server"), draw.choice(servers), for_s)
    targets: dict[str, Sequence[str]] = {
        "kill": INSTANCES,
        "stop": INSTANCES,
        "clock": ("prefill", "decode"),
        "leave": ("client",),
        "hang": scene.hangs,
    }
    return Fault(at_s, kind, draw.choice(targets.get(kind, ("pool",))), for_s)
