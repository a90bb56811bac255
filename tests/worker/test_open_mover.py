"""open_mover: in place where the store's memory is mapped here, else through staging."""

from __future__ import annotations

import contextlib

import pytest

from pdstore import LayerSpec, Layout
from pdstore.errors import ConfigError, LayoutError, StoreUnavailable
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.worker.movers import open_mover
from pdstore.worker.swap import open_swap
from tests.support.arena_kit import SpiedArena
from tests.support.kv import LAYERS, caches_of, settings_of


@pytest.fixture
def undo():
    with contextlib.ExitStack() as undo:
        yield undo


def mover_over(store, undo, layers=LAYERS, metrics=None, **changes):
    settings = settings_of(**changes)
    layout = Layout.of(settings, dtype="float32", layers=layers, engine_block_tokens=16, rope="")
    swap = open_swap(settings, layout, caches_of(layout))
    undo.callback(swap.close)
    return open_mover(settings, layout, swap, store, metrics or Metrics(), 1 << 20, undo)


def test_values_go_through_staging_where_the_store_has_no_memory_here(undo):
    store, metrics = open_store("memory://", settings_of()), Metrics()
    mover_over(store, undo, metrics=metrics)
    assert slots(metrics) > 0


def slots(metrics) -> float:
    return metrics.registry.get_sample_value("pdstore_slots")


def test_values_move_in_place_where_the_store_has_memory_here(undo, arena):
    metrics = Metrics()
    mover = mover_over(arena, undo, metrics=metrics, staging="64KiB")
    assert (slots(metrics), mover.way.memory.num_bytes) == (0, len(arena.memory()))


def test_values_of_an_arena_go_through_staging_where_copies_are_torchs(undo, arena):
    metrics = Metrics()
    mover_over(arena, undo, metrics=metrics, native="off")
    assert slots(metrics) > 0


def test_an_arena_that_is_away_at_the_start_is_served_through_staging(
    undo, library, tmp_path, caplog, monkeypatch
):
    def away():
        raise StoreUnavailable("not yet")

    arena, metrics = (
        undo.enter_context(contextlib.closing(SpiedArena(library, tmp_path))),
        Metrics(),
    )
    monkeypatch.setattr(arena, "memory", away)
    mover_over(arena, undo, metrics=metrics)
    assert slots(metrics) > 0
    assert "through staging" in caplog.text


def test_staging_that_is_too_small_is_refused(undo):
    with pytest.raises(ConfigError, match="PDSTORE_STAGING"):
        mover_over(open_store("memory://", settings_of()), undo, staging="64KiB")


def test_staging_that_cannot_hold_all_parts_of_a_block_is_refused(undo):
    layers = tuple(LayerSpec(2, 8, window=64 + n, kind="sliding") for n in range(12))
    with pytest.raises(LayoutError, match="12 parts on this rank"):
        mover_over(
            open_store("memory://", settings_of()), undo, layers=layers, staging=f"{16 * 12}KiB"
        )


def test_the_number_of_lent_slots_is_shown(undo):
    metrics = Metrics()
    mover_over(open_store("memory://", settings_of()), undo, metrics=metrics)
    assert metrics.registry.get_sample_value("pdstore_slots_lent") == 0
