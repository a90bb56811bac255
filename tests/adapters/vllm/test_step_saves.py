"""StepSaves: a layer is released with all layers before it, and every layer by the step's end."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm.step_saves import StepSaves

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

    def layers_done(self, num_layers: int) -> None:
        if self._error is not None:
            raise self._error
        self.released.append(num_layers)


@pytest.fixture
def saves():
    return StepSaves(4, NAMES)


def test_layers_are_released_as_they_are_computed(saves):
    save = Save()
    saves.add(save)
    for name in NAMES:
        saves.layer_done(name)
    assert save.released == [1, 2, 3]
    saves.finish()
    assert save.released == [1, 2, 3, 4]


def test_a_layer_before_its_predecessors_waits_for_them(saves):
    save = Save()
    saves.add(save)
    for name in ("b", "c"):
        saves.layer_done(name)
    assert save.released == []
    saves.layer_done("a")
    assert save.released == [3]


def test_an_unknown_layer_releases_nothing(saves):
    save = Save()
    saves.add(save)
    saves.layer_done("draft")
    assert save.released == []


def test_the_next_step_begins_with_no_layer(saves):
    for _ in range(2):
        save = Save()
        saves.add(save)
        saves.layer_done("a")
        assert save.released == [1]
        saves.finish()


def test_a_save_that_cannot_be_released_is_cancelled_and_so_are_those_behind_it(saves):
    fine, broken = Save(), Save(ValueError("captured"))
    for save in (fine, broken):
        saves.add(save)
    with pytest.raises(ValueError, match="captured"):
        saves.finish()
    assert fine.job.is_cancelled
    assert broken.job.is_cancelled
