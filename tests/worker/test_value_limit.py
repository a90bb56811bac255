"""open_mover: in place or through staging; no pool starts where no whole block can be stored."""

from __future__ import annotations

import contextlib

import pytest

from pdstore import LayerSpec, Layout
from pdstore.errors import ConfigError, LayoutError
from pdstore.format.block import HEADER_BYTES
from pdstore.format.envelope import ENVELOPE_BYTES
from pdstore.metrics import Metrics
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.seal import seal_store
from pdstore.worker.mover import check_values_fit, open_mover
from pdstore.worker.swap import open_swap
from tests.support.kv import BLOCK_BYTES, LAYERS, Instance, caches_of, settings_of
from tests.support.seal_key import write_seal_key


class Limited(MemoryStore):
    def __init__(self, most_bytes):
        super().__init__()
        self.most_bytes = most_bytes

    def why_too_long(self, num_bytes):
        return None if num_bytes <= self.most_bytes else "it is too long"


def layout_of(settings):
    return Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")


@pytest.mark.misconfiguration("`shm://` with slabs smaller than a block's value")
def test_a_pool_refuses_an_arena_whose_slabs_hold_no_block_and_says_what_to_set(tmp_path):
    url = f"shm://small?size=1MiB&dir={tmp_path}"
    with contextlib.closing(open_store(url + "&slab=16KiB", settings_of())) as store:
        with pytest.raises(ConfigError, match=r"\?slab=32.0KiB with \?size=512.0KiB") as caught:
            Instance(store)
        assert "PDSTORE_BLOCK_TOKENS" in str(caught.value)
        Instance(store, block_tokens=32).close()
        store.path.unlink()
    with contextlib.closing(open_store(url + "&slab=32.0KiB", settings_of())) as store:
        Instance(store).close()


def test_a_value_that_just_fits_is_taken_and_its_envelope_counts(tmp_path):
    settings = settings_of(seal_key_file=write_seal_key(tmp_path / "seal.key"))
    layout, plain = layout_of(settings), HEADER_BYTES + BLOCK_BYTES
    check_values_fit(Limited(plain), layout.geometry)
    check_values_fit(seal_store(Limited(plain + ENVELOPE_BYTES), settings), layout.geometry)
    for store in (Limited(plain - 1), seal_store(Limited(plain + ENVELOPE_BYTES - 1), settings)):
        with pytest.raises(ConfigError, match="it is too long; or store blocks of less than 64"):
            check_values_fit(store, layout.geometry)


def test_a_state_that_is_too_long_is_no_reason_for_shorter_blocks():
    layers = (LayerSpec.state(2 * BLOCK_BYTES, "f", table=1), *LAYERS) * 2
    layout = Layout.of(
        settings_of(), dtype="float32", layers=layers, engine_block_tokens=16, rope=""
    )
    check_values_fit(Limited(HEADER_BYTES + 4 * BLOCK_BYTES), layout.geometry)
    with pytest.raises(ConfigError, match="the states of less than 2 layers together") as caught:
        check_values_fit(Limited(HEADER_BYTES + 4 * BLOCK_BYTES - 1), layout.geometry)
    assert "a larger PDSTORE_LAYER_RANGES, the same for P and D" in str(caught.value)
    assert "PDSTORE_BLOCK_TOKENS" not in str(caught.value)
    two = Layout.of(
        settings_of(layer_ranges=2),
        dtype="float32",
        layers=layers,
        engine_block_tokens=16,
        rope="",
    )
    check_values_fit(Limited(HEADER_BYTES + 4 * BLOCK_BYTES - 1), two.geometry)


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


def test_staging_that_cannot_hold_all_parts_of_a_block_is_refused(undo):
    layers = tuple(LayerSpec(2, 8, window=64 + n) for n in range(12))
    with pytest.raises(LayoutError, match="12 parts on this rank"):
        mover_over(
            open_store("memory://", settings_of()), undo, layers=layers, staging=f"{16 * 12}KiB"
        )
