"""Plans of the chaos campaign: a seed repeats its faults, and a sheltered round spares answers."""

from __future__ import annotations

import pytest

from benchmarks.chaos.plan import ANSWER_PATH, INSTANCES, LINKS, Scene, plan_round

SCENE = Scene(
    servers=["redis"],
    links=["prefill-store", "decode-store"],
    has_disk=True,
    can_vanish=True,
    is_slow=False,
    is_sheltered=False,
)


def test_a_seed_repeats_its_plan_and_another_has_another():
    first = plan_round("7 round 1", SCENE, 4.0, 20.0)
    assert len(first) == 80
    assert first == plan_round("7 round 1", SCENE, 4.0, 20.0)
    assert first != plan_round("7 round 2", SCENE, 4.0, 20.0)


def test_every_kind_of_fault_and_every_target_has_its_turn():
    faults = [fault for n in range(40) for fault in plan_round(str(n), SCENE, 4.0, 20.0)]
    assert {fault.kind for fault in faults} == {
        *("kill", "stop", "cut", "slow", "trickle", "hold", "half", "refuse"),
        *("clock", "fill", "vanish", "leave"),
    }
    targets = {*INSTANCES, *LINKS, *SCENE.servers, *SCENE.links, "pool", "client"}
    assert {fault.target for fault in faults} == targets
    assert all(0 <= fault.at_s <= 4 and 0 < fault.for_s <= 1.5 for fault in faults)


def test_a_sheltered_round_stops_but_never_breaks_what_answers_pass():
    scene = SCENE._replace(is_sheltered=True)
    faults = [fault for n in range(40) for fault in plan_round(str(n), scene, 4.0, 20.0)]
    on_the_way = {fault.kind for fault in faults if fault.target in ANSWER_PATH}
    assert on_the_way == {"stop", "slow", "clock"}
    assert {"kill", "cut", "refuse"} <= {fault.kind for fault in faults}


@pytest.mark.parametrize("missing", ["has_disk", "can_vanish"])
def test_what_a_pool_has_not_is_not_hurt(missing):
    scene = SCENE._replace(**{missing: False})
    kinds = {fault.kind for n in range(40) for fault in plan_round(str(n), scene, 4.0, 20.0)}
    assert {"has_disk": "fill", "can_vanish": "vanish"}[missing] not in kinds
