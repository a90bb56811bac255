"""Which values must not be used, and why."""

from __future__ import annotations

from pdstore.format import block
from pdstore.outcome import Reason
from pdstore.store.file.store import FileStore
from pdstore.worker.block_range import BlockRange
from pdstore.worker.verified import wrong_values
from tests.support.kv import POISON, Instance
from tests.support.values_kit import prompt_of


def test_damaged_values_and_those_of_other_keys_are_wrong():
    prompt = prompt_of()
    values = list(prompt.values(BlockRange(0, len(prompt.keys))))
    stored = [memoryview(bytearray(value.size)) for value in values]
    for value, view in zip(values, stored, strict=True):
        block.seal(view, value.header)
    stored[1][block.HEADER_BYTES] ^= 1
    stored[2][:] = stored[0]
    sums = [block.checksum(view) for view in stored]
    found = wrong_values(values, lambda i: stored[i], sums)
    assert found == {1: Reason.CORRUPT, 2: Reason.FOREIGN}


def test_a_flipped_bit_in_a_file_is_a_miss(library, tmp_path):
    store = FileStore(tmp_path / "pool", built=lambda: library)
    p, d = Instance(store, native="require"), Instance(store, fill=POISON, native="require")
    prompt, blocks = range(300), list(range(1, 20))
    p.pool.save(p.cache.keys(prompt), blocks).wait(10)
    third = p.cache.keys(prompt).store_keys(p.namespace.parts)[2]
    (path,) = (tmp_path / "pool").rglob(third)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    result = d.pool.load(d.cache.keys(prompt), blocks).wait(10)
    assert (result.num_tokens, result.reason) == (2 * p.layout.block_tokens, Reason.CORRUPT)
    assert not path.exists(), "what did not verify is removed"
    p.close()
    d.close()
    store.close()
