"""SlotArrays: some slots of many, in the order that was asked for."""

from __future__ import annotations

from pdstore.native.slot_arrays import SlotArrays


def test_chosen_slots_keep_their_numbers_generations_and_offsets_together():
    arrays = SlotArrays(3)
    for i in range(3):
        arrays.slots[i], arrays.generations[i], arrays.offsets[i] = i, 10 + i, 100 + i
    chosen = arrays.of([2, 0])
    assert [list(array) for array in chosen.all] == [[2, 0], [12, 10], [102, 100]]


def test_a_copy_does_not_change_with_its_source():
    arrays = SlotArrays(1)
    arrays.slots[0] = 7
    chosen = arrays.of([0])
    arrays.slots[0] = 8
    assert chosen.slots[0] == 7
