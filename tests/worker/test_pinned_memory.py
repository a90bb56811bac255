"""Pinning the ring: whole slots, all or nothing, in order, with errors and deadlines."""

from __future__ import annotations

import logging
import mmap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstore.errors import SwapError
from pdstore.worker import staging as staging_module
from pdstore.worker.staging import PinnedMemory, spans_of

PAGE = 4096


class FakeRegistrar:
    """Remembers calls; `fail_at` is the number of the registration that fails."""

    def __init__(self, fail_at: int | None = None, gate: threading.Event | None = None) -> None:
        self.fail_at, self.gate = fail_at, gate
        self.calls: list[tuple[str, int]] = []
        self.present: set[int] = set()

    def populate(self, address, num_bytes):
        self.present.add(address)

    def register(self, address, num_bytes):
        assert address in self.present
        if self.gate is not None:
            assert self.gate.wait(30)
        registered = [a for verb, a in self.calls if verb == "register"]
        if len(registered) == self.fail_at:
            raise SwapError("no memory to pin (error 2 of cudaHostRegister)")
        self.calls.append(("register", address))

    def unregister(self, address):
        self.calls.append(("unregister", address))

    def verbs(self, verb):
        return [a for v, a in self.calls if v == verb]


def pinned_of(num_pages, registrar, pages_of_a_piece=1, **options) -> PinnedMemory:
    view, size = memoryview(mmap.mmap(-1, num_pages * PAGE)), pages_of_a_piece * PAGE
    return PinnedMemory(view, PAGE, registrar, span_bytes=size, **options)


@given(
    slot_pages=st.integers(1, 40),
    num_slots=st.integers(1, 200),
    span_bytes=st.integers(1, 400 * PAGE),
)
def test_every_slot_is_in_one_span_whole(slot_pages, num_slots, span_bytes):
    slot, base = slot_pages * PAGE, 1 << 20
    spans = spans_of(base, num_slots * slot, slot, span_bytes)
    at = base
    for address, num_bytes in spans:
        assert address == at
        assert num_bytes % slot == 0
        assert num_bytes <= max(slot, span_bytes)
        at += num_bytes
    assert at == base + num_slots * slot


def test_pieces_are_made_present_side_by_side_before_they_are_registered():
    class Together(FakeRegistrar):
        several = threading.Barrier(4)

        def populate(self, address, num_bytes):
            self.several.wait(30)
            super().populate(address, num_bytes)

    pinned = pinned_of(64, Together(), 4)
    pinned.ready(30)
    pinned.close()


@pytest.mark.parametrize("fail_at", [0, 7, 15])
def test_when_a_piece_fails_the_others_are_undone_and_ready_says_why(fail_at):
    registrar = FakeRegistrar(fail_at)
    pinned = pinned_of(64, registrar, 4)
    with pytest.raises(SwapError, match="cudaHostRegister"):
        pinned.ready(30)
    assert registrar.verbs("unregister") == registrar.verbs("register")[::-1]
    assert len(registrar.verbs("register")) == fail_at
    pinned.close()
    assert len(registrar.verbs("unregister")) == fail_at


def test_ready_has_a_deadline_and_says_how_far_it_is():
    gate = threading.Event()
    pinned = pinned_of(8, FakeRegistrar(gate=gate))
    with pytest.raises(TimeoutError, match="0 %"):
        pinned.ready(0.01)
    gate.set()
    pinned.ready(30)
    pinned.close()


def test_who_waits_for_it_is_told_how_far_it_is(monkeypatch):
    gate, lines = threading.Event(), []

    class OpenGate(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            gate.set()

    handler = OpenGate()
    monkeypatch.setattr(staging_module.log, "handlers", [handler])
    monkeypatch.setattr(staging_module.log, "level", logging.INFO)
    pinned = pinned_of(8, FakeRegistrar(gate=gate), report_s=0.001)
    pinned.ready(30)
    pinned.close()
    assert lines[0] == "staging is pinned to 0 % of 0.0 GiB"


def test_closing_in_the_middle_unregisters_what_was_registered():
    gate = threading.Event()
    registrar = FakeRegistrar(gate=gate)
    pinned = pinned_of(8, registrar)
    closer = threading.Thread(target=pinned.close)
    closer.start()
    gate.set()
    closer.join(30)
    assert registrar.verbs("unregister") == registrar.verbs("register")[::-1]
    assert not pinned.progress
