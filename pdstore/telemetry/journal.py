"""Journal: the last requests of an instance, each a line of the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pdstore.telemetry.request_record import RequestRecord

log = logging.getLogger(__name__)


class Journal:
    """Keeps the last `most` records, logs each, and calls listeners. Any thread may add one."""

    def __init__(self, most: int = 100) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=most)
        self._listeners: list[Callable[[RequestRecord], None]] = []

    def add(self, record: RequestRecord) -> None:
        """Takes the record of a request that is over."""
        self._records.append(record)
        log.info("%s", record.line())
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[RequestRecord], None]) -> None:
        """Calls `listener` with every record to come. It must not raise."""
        self._listeners.append(listener)

    def last(self) -> list[RequestRecord]:
        """Returns the records that are kept, the oldest first."""
        return list(self._records)
