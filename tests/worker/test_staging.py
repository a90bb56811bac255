"""Staging: slots are lent once, come back, and each direction keeps its share."""

from __future__ import annotations

import mmap
import threading

import pytest

from pdstore.errors import ConfigError
from pdstore.format.block import HEADER_BYTES
from pdstore.outcome import Direction
from pdstore.threads import Deadline
from pdstore.worker.staging import Staging

SLOT = 4096


def staging_of(num_slots: int = 16) -> Staging:
    return Staging(lambda n: memoryview(bytearray(n)), SLOT - HEADER_BYTES, num_slots * SLOT)


def loan(staging, direction, most, least=1, seconds=0.0, is_over=lambda: False):
    return staging.loan(direction, most, least=least, deadline=Deadline(seconds), is_over=is_over)


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(ConfigError, match=r"PDSTORE_STAGING.*set it to 32MiB"):
        Staging(lambda n: memoryview(bytearray(n)), (2 << 20) - HEADER_BYTES, 8 << 20)


@pytest.mark.parametrize("greedy", list(Direction))
def test_a_quarter_is_kept_for_the_other_direction(greedy):
    staging = staging_of()
    other = next(d for d in Direction if d is not greedy)
    with loan(staging, greedy, 16) as numbers:
        assert len(numbers) == 12
        with loan(staging, greedy, 1) as more:
            assert more == []
        with loan(staging, other, 16) as kept:
            assert len(kept) == 4


def test_who_waits_gets_the_slots_that_come_back():
    staging, got = staging_of(), []

    def wait():
        with loan(staging, Direction.LOAD, 12, least=12, seconds=10) as numbers:
            got.append(len(numbers))

    with loan(staging, Direction.LOAD, 1):
        thread = threading.Thread(target=wait)
        thread.start()
    thread.join(10)
    assert got == [12]


def test_many_borrowers_never_share_a_slot():
    staging, owners, wrong = staging_of(), {}, []
    lock = threading.Lock()

    def work(direction):
        for _ in range(200):
            with loan(staging, direction, 3, seconds=10) as numbers:
                with lock:
                    wrong.extend(n for n in numbers if n in owners)
                    owners.update(dict.fromkeys(numbers, direction))
                with lock:
                    for n in numbers:
                        del owners[n]

    threads = [threading.Thread(target=work, args=(d,)) for d in Direction for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert staging.num_lent == 0


def test_more_memory_than_the_host_gives_is_a_setting_to_change():
    with pytest.raises(ConfigError, match=r"PDSTORE_STAGING of \d+ MiB: .* set it to less"):
        Staging(lambda n: memoryview(mmap.mmap(-1, n)), SLOT, 1 << 60)
