"""Clients that ask P and D one request after the other while their store hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from pdstore.telemetry.request_record import RequestRecord
from pdstore.testing.values import start_background
from tests.support.kv import eventually
from tests.support.mini_engine_kit import DEADLINE_S, decode, hand_over, pd_of, prompt_of

NUM_TOKENS = 150
MAX_WAIT_S = 1.3
"""A plain lookup waits for a second, and a busy machine adds to it; most waits are far shorter."""
_NUM_REQUESTS = 6  # of each client, while the store hangs


@dataclass(frozen=True)
class _Asked:
    handoff: str
    begin_at: float
    end_at: float


class Traffic:
    """P and D, two mini engines over one store, and the records of all their requests.

    open_engine: the fixture; url: the store's.
    """

    def __init__(self, open_engine: Callable, url: str, **changes: object) -> None:
        # saves that hang keep their blocks until their deadline; nobody is to wait for free blocks
        self.p = open_engine(pd=pd_of("prefill", url, **changes), num_blocks=4096)
        self.d = open_engine(pd=pd_of("decode", url, **changes), num_blocks=4096)
        self.records: list[RequestRecord] = []
        for engine in (self.p, self.d):
            engine.adapter.journal.listen(self.records.append)
        self._num_asked = 0
        self._lock = threading.Lock()

    def ask(self) -> _Asked:
        """Sends a new prompt to P and then to D, as a router does."""
        with self._lock:
            self._num_asked += 1
            prompt = prompt_of(NUM_TOKENS, seed=self._num_asked)
        begin_at = time.monotonic()
        params = hand_over(self.p, prompt)
        assert decode(self.d, prompt, params).finish is not None
        return _Asked(params["pdstore"]["attempt"], begin_at, time.monotonic())

    def loads(self) -> bool:
        """Asks; returns whether D loaded all of the prompt but its last token."""
        record = self.record_of(self.ask(), "decode")
        return record.num_loaded == NUM_TOKENS - 1

    def record_of(self, asked: _Asked, role: str) -> RequestRecord:
        """Returns one instance's record of a request; it comes when the request's jobs have ended.

        Fails after a time that is enough for a save to reach its deadline.
        """
        key = (asked.handoff, role)

        def found():
            return next((r for r in list(self.records) if (r.handoff, r.role) == key), None)

        return eventually(found, DEADLINE_S)

    @contextmanager
    def clients(self, num_clients: int) -> Iterator[list[list[_Asked]]]:
        """Runs clients; yields what each has asked so far. Ends them at the end."""
        asked: list[list[_Asked]] = [[] for _ in range(num_clients)]
        is_over = threading.Event()

        def run(mine: list[_Asked]) -> None:
            while not is_over.is_set():
                mine.append(self.ask())

        ends = [start_background(lambda mine=mine: run(mine)) for mine in asked]
        try:
            yield asked
        finally:
            is_over.set()
            for end in ends:
                end(DEADLINE_S)

    def assert_each_client_waits_once(
        self, num_clients: int, hanging: AbstractContextManager[object]
    ) -> None:
        """Lets the store hang under clients, and go on; checks waits, and that D loads after it.

        The one that waits is the first that needs the store: it tells the others.

        hanging: the store hangs within it.
        """
        eventually(self.loads, DEADLINE_S)
        with self.clients(num_clients) as asked:
            eventually(lambda: all(asked), DEADLINE_S)
            with hanging:
                hung_at = time.monotonic()

                def late(mine: list[_Asked]) -> list[_Asked]:
                    return [one for one in list(mine) if one.end_at > hung_at]

                eventually(lambda: min(len(late(m)) for m in asked) > _NUM_REQUESTS, 60.0)
                in_the_hang = [late(mine) for mine in asked]
        threading.Event().wait(2.0)  # idle: within this time both must notice that it is back
        assert self.loads()
        for mine in in_the_hang:
            waited = [one for one in mine if self._waited_s(one) > MAX_WAIT_S]
            assert len(waited) <= 1, self._lines_of(waited)

    def _lines_of(self, asked: list[_Asked]) -> list[str]:
        return [self.record_of(one, role).line() for one in asked for role in ("prefill", "decode")]

    def _waited_s(self, asked: _Asked) -> float:
        """Returns for how long P or D waited for the store, by its record; the longer time."""
        records = [self.record_of(asked, role) for role in ("prefill", "decode")]
        return max(
            sum(p.end_s - p.begin_s for p in record.phases if p.name in ("wait", "load"))
            for record in records
        )
