"""StepSaves: a layer range is released when it is whole, and every layer by the step's end."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm.step_saves import StepSaves
from tests.support.swap_case import layout_of

NAMES = ["a", "b", "c"]


class Job:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Save:
    """Notes what an OpenSave is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.released: list[int] = []
        self.job, self._error = Job(), error

    def layers_done(self, num_layers: int, *, goes_on: bool = False) -> None:
        if self._error is not None:
            raise self._error
        self.released.append(num_layers)
        self.goes_on = goes_on


@pytest.fixture
def saves():
    """Saves of four layers in two ranges, a and b, and c and d. d is not reported."""
    return StepSaves(layout_of(num_ranges=2), NAMES)


def report(saves, *names):
    """Says that layers are computed, and releases what can be."""
    for name in names:
        if num_layers := saves.layer_done(name):
            saves.release(num_layers)


def test_a_range_is_released_when_its_last_layer_is_computed(saves):
    save = Save()
    saves.add(save)
    report(saves, "a")
    assert save.released == []
    report(saves, "b")
    assert save.released == [2]
    report(saves, "c")
    assert save.goes_on
    saves.finish()
    assert save.released == [2, 4]
    assert not save.goes_on


def test_workers_begin_with_the_last_layer_where_steps_end_late():
    saves, save = StepSaves(layout_of(num_ranges=2), NAMES, ends_late=True), Save()
    saves.add(save)
    report(saves, "a", "b")
    assert not save.goes_on


def test_a_range_with_a_layer_that_is_not_computed_waits_for_the_end(saves):
    save = Save()
    saves.add(save)
    report(saves, "b", "c", "a")
    assert save.released == []
    saves.finish()
    assert save.released == [4]


def test_an_unknown_layer_releases_nothing(saves):
    save = Save()
    saves.add(save)
    report(saves, "a", "draft")
    assert save.released == []


def test_a_save_is_opened_when_a_range_is_whole(saves):
    assert saves.layer_done("a") == 0
    assert saves.layer_done("b") == 2


def test_the_next_step_begins_with_no_layer(saves):
    for _ in range(2):
        save = Save()
        saves.add(save)
        report(saves, "b")
        assert save.released == []
        report(saves, "a", "b")
        assert save.released == [2]
        saves.finish()


def test_a_save_that_cannot_be_released_is_cancelled_and_so_are_those_behind_it(saves):
    fine, broken = Save(), Save(ValueError("captured"))
    for save in (fine, broken):
        saves.add(save)
    with pytest.raises(ValueError, match="captured"):
        saves.finish()
    assert fine.job.is_cancelled
    assert broken.job.is_cancelled
