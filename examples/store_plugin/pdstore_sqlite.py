"""SQLiteStore: blocks as rows of an SQLite file, an example of a store outside pdstore."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdstore import Settings
from pdstore.errors import (
    ConfigError,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.keys import prefix_of
from pdstore.store import BlockKey, Lifecycle, Slots, Store, StoreURL, check_call
from pdstore.store.transfer import Split, Transfer, TransferContext
from pdstore.store.url import Place, Reach

_PAUSE_S = 0.005
_ERRORS: dict[str, type[StoreError]] = {
    "SQLITE_FULL": StoreFull,
    "SQLITE_BUSY": StoreTimeout,
    "SQLITE_CANTOPEN": StoreUnavailable,
    "SQLITE_IOERR": StoreUnavailable,
}


class SQLiteStore(Store):
    """`sqlite:///path/pool.db?timeout=5`: rows of one file, for processes of one host.

    The file is made at the first call. Each call is one transaction, so that a batch is stored
    whole or not at all. Threads take turns. Nothing is ever evicted, and nothing is leased.
    """

    def __init__(self, label: str, path: str, timeout_s: float) -> None:
        self.label = label
        self._path, self._timeout_s = path, timeout_s
        self._lifecycle = Lifecycle(label)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> SQLiteStore:
        if url.host or url.path in ("", "/"):
            raise ConfigError(f"{url.label}: write sqlite:///an/absolute/path.db")
        timeout_s = url.seconds("timeout", 5.0)
        url.finish("timeout")
        return cls(url.label, url.path, timeout_s)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        return Place(Reach.HOST, path=Path(url.path))

    def transfer(self, context: TransferContext) -> Transfer:
        """Opens the way through staging with a single worker, because threads take turns here."""
        return context.staged(context, Split(context.range_bytes, many=1, num_workers=1), None)

    def match(self, keys: Sequence[BlockKey]) -> int:
        check_call(keys)
        with self._transaction() as rows:
            for n, key in enumerate(keys):
                if not rows.execute("SELECT 1 FROM blocks WHERE key = ?", [key]).fetchone():
                    return n
        return len(keys)

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        with self._transaction() as rows:
            for n, key in enumerate(keys):
                row = rows.execute("SELECT value FROM blocks WHERE key = ?", [key]).fetchone()
                if row is None:
                    return n
                if len(row[0]) != slots.sizes[n]:
                    raise WrongLength(
                        f"{self.label}: {key} has {len(row[0])} bytes, not {slots.sizes[n]}",
                        num_done=n,
                    )
                slots.value(n)[:] = row[0]
        return len(keys)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        check_call(keys, slots)
        values = [(key, slots.value(n)) for n, key in enumerate(keys)]
        with self._transaction() as rows:
            rows.executemany("INSERT OR IGNORE INTO blocks VALUES (?, ?)", values)
        return len(keys)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        check_call(keys)
        with self._transaction() as rows:
            rows.executemany("DELETE FROM blocks WHERE key = ?", [[key] for key in keys])

    def clear(self, namespace: str) -> None:
        with self._transaction() as rows:
            rows.execute("DELETE FROM blocks WHERE key GLOB ?", [f"{prefix_of(namespace)}*"])

    def close(self) -> None:
        if self._lifecycle.end():  # never in the child of a fork: the connection is its parent's
            with self._lock:
                if self._connection is not None:
                    self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits at the end, rolls back at an exception. Raises StoreError."""
        self._lifecycle.check()
        with self._lock:
            self._lifecycle.check()  # again: another thread may have closed it meanwhile
            try:
                if self._connection is None:
                    self._connection = self._connect()
                with self._connection:
                    yield self._connection
            except sqlite3.Error as error:
                name = getattr(error, "sqlite_errorname", "")  # Python 3.11 has it
                kind = _ERRORS.get("_".join(name.split("_")[:2]), StoreError)
                raise kind(f"{self.label}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = OFF")  # a cache need not outlive a power cut
            self._share(connection)
            connection.execute(
                "CREATE TABLE IF NOT EXISTS blocks (key TEXT PRIMARY KEY, value BLOB)"
            )
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _share(self, connection: sqlite3.Connection) -> None:
        """Lets readers go on beside a writer. SQLite waits for no other that does the same now."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)
