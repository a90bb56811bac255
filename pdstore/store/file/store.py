"""FileStore: a file for each value, in a directory that P and D share. It is the default store."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from pdstore.environment import cache_directory
from pdstore.errors import ConfigError, StoreFull
from pdstore.format.block import HEADER_BYTES, START_BYTES
from pdstore.format.keys import NEVER_REFUSED, POOL_ID_KEY, BlockKey, kind_of, prefix_of
from pdstore.native.engine import Engine
from pdstore.native.library import FileWay, built_library
from pdstore.settings import Settings
from pdstore.store.base import FRESH_S, Lifecycle, Slots, Store, log_once
from pdstore.store.file.bell import Bell
from pdstore.store.file.direct import DirectFiles
from pdstore.store.file.directory import PoolDirectory
from pdstore.store.file.eviction import MAX_LEASE_S, Evictor
from pdstore.store.file.files import (
    UNREADABLE,
    Built,
    Ended,
    can_read,
    error_of,
    named_error,
    packed,
    read_values,
    renew_leases,
    write_values,
)
from pdstore.store.file.mount import FULL, NameCheck, mount_of
from pdstore.store.optional import ALL_KEYS, Room, ServerDoubt, StoredValue
from pdstore.store.transfer import Split, Transfer, TransferContext
from pdstore.store.url import Place, StoreURL
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

DEFAULT_LEASE_S = 10.0
_WRITABLE = "name a directory that this user may write to"
_MAX_PATHS = 8192
_NEIGHBOURS = 3  # so many of the next values are tried if a value cannot be read
_WARNING_INTERVAL_S = 60.0
_NO_WATCH = (
    "this user may watch no more folders, so puts are only found by searches at intervals:"
    " raise the sysctls fs.inotify.max_user_instances and fs.inotify.max_user_watches, or ulimit -n"
)
_WHY_TWO = ". A directory of one host is another one on the next, and in a container: mount it"

WriteValues = Callable[[str, Sequence[str], range], Ended]
"""A function that writes some of the values of one `put` to their paths, as `write_values` does.

Its arguments: a temporary name, the paths, and the indices of these values in the `put`.
"""


class FileStore(Store):
    """`file:///dir?budget=20GiB&lease=10&direct=1`, or `file://` for a directory of this user.

    Any number of processes and hosts may share the directory; all must give the same lease. A value
    is written under a temporary name and linked to its key's name when it is whole, so that nobody
    finds the unfinished value of a writer that crashed. There is no fsync, because a cache need not
    survive a crash of the host. A file's modification time is the end of the value's lease, and its
    access time is the value's last use: so one utime looks a value up, leases it and counts the
    use. Tails and markers are deleted after `PDSTORE_HANDOFF_TTL_S`, blocks for want of room.

    built: returns the native library if it is built, else None: no lookup waits for a compiler.

    direct: moves values past the page cache; None: through it.

    doubts: what may not work as the user expects; also logged.

    The constructor makes the directory. Raises ConfigError or StoreDenied if it cannot be used.
    """

    def __init__(
        self,
        root: Path,
        *,
        budget: int | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        handoff_ttl_s: float = 600.0,
        built: Built = lambda: None,
        direct: DirectFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = f"file://{root}".replace(" ", "%20")
        self.root = root
        self._lifecycle = Lifecycle(self.label)
        self._lease_s = lease_s
        self._built = built
        self._silent_until = Deadline(0.0)
        self._way = direct.way if direct else FileWay.CACHED
        self._read_values = direct.read_values if direct else partial(read_values, built)
        self._write_values = direct.write_values if direct else partial(write_values, built)
        with named_error(self.label, "the pool cannot be opened", other_place=_WRITABLE):
            self._directory = PoolDirectory(root, built)
            self._mount = mount_of(root)  # after its first use, which may have mounted it
            if direct is not None:
                direct.check(root, self._mount, self._directory.temporary())
            self._bell = Bell(root)
            self._path_of = lru_cache(_MAX_PATHS)(self._directory.path)
            self._directory.sweep()
            self._evictor = Evictor(self._directory, budget, lease_s, handoff_ttl_s, clock)
        readable = ByteSize(self._evictor.budget.num_bytes).human_readable()
        log_once(log, f"pool in {root}, budget {readable}: P and D must use the same directory")
        self.doubts = [*self._evictor.doubts(), *self._mount.doubts()]
        self.doubts.extend(direct.doubts() if direct else ())
        for _, message, remedy in self.doubts:
            log_once(log, f"{self.label}: {message}: {remedy}", logging.WARNING)

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> FileStore:
        built = partial(built_library, settings)
        options = _options_of(url)
        direct = DirectFiles(built) if options.pop("direct") else None
        ttl_s = settings.handoff_ttl_s
        return cls(handoff_ttl_s=ttl_s, built=built, direct=direct, **options)

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        _options_of(url)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        return Place(path=_options_of(url)["root"], why_two=_WHY_TWO)

    @property
    def lease_s(self) -> float:
        return self._lease_s

    def match(self, keys: Sequence[BlockKey]) -> int:
        paths = self._enter(keys)
        library = self._built() if len(keys) > 1 else None
        with named_error(self.label, "cannot stamp its files"):
            now = self._directory.clock.now_ns()
        end = now + int(self._lease_s * 1e9)

        def renew(start: int) -> Ended:
            return renew_leases(paths[start:], now, end - start, library)

        return self._serve(
            keys, paths, renew, lambda path: not renew_leases([path], now, end, None).why
        )

    def which_stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        paths = self._enter(keys)
        library = self._built() if len(keys) > 1 else None
        if library is not None:
            found = library.find_files(paths)
        else:
            found = [os.access(path, os.F_OK) for path in paths]
        if self._mount.remembers_misses and not all(found):
            check = NameCheck(self.root, self._mount)
            return [
                is_there or check.is_there(path)
                for is_there, path in zip(found, paths, strict=True)
            ]
        return found

    def which_removed(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [not is_there for is_there in self.which_stored(keys)]

    def wait_for_change(self, seen: int | None, timeout_s: float) -> int:
        """Waits for puts of processes on this host; puts of other hosts do not end the wait."""
        self._lifecycle.check()
        with named_error(self.label, "cannot hear of changes"):
            try:
                return self._bell.wait_for_wake(seen, timeout_s)
            except OSError as error:
                if error.errno == errno.EMFILE:  # searches go on: nothing else tells
                    log_once(log, f"{self.label}: {_NO_WATCH}", logging.WARNING)
                raise

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        paths = self._enter(keys, slots)

        def read(start: int) -> Ended:
            return self._read_values(paths[start:], slots.part(start, len(keys)))

        return self._serve(keys, paths, read, can_read)

    def get_right(
        self, keys: Sequence[BlockKey], slots: Slots, header_prefixes: bytes, engine: Engine
    ) -> int:
        paths = self._enter(keys, slots)
        _check_sizes(slots)
        is_right = engine.read_values(paths, *packed(slots), header_prefixes, self._way)
        return len(keys) if is_right else 0

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        paths = self._enter(keys, slots)

        def write(temporary: str, of_part: Sequence[str], part: range) -> Ended:
            return self._write_values(temporary, of_part, slots.part(part.start, part.stop))

        return self._put(keys, paths, slots.sizes, write)

    def put_sealed(
        self, keys: Sequence[BlockKey], slots: Slots, header_prefixes: bytes, engine: Engine
    ) -> int:
        paths = self._enter(keys, slots)
        _check_sizes(slots)

        def write(temporary: str, of_part: Sequence[str], part: range) -> Ended:
            of = slots.part(part.start, part.stop)
            begin = part.start * START_BYTES
            end = part.stop * START_BYTES
            prefixes = header_prefixes[begin:end]
            packed_of = packed(of)
            return Ended(*engine.write_values(temporary, of_part, *packed_of, prefixes, self._way))

        return self._put(keys, paths, slots.sizes, write)

    def transfer(self, context: TransferContext) -> Transfer | None:
        """Opens the way through staging in which the library seals, writes, reads and verifies.

        Its threads share large ranges, so few workers are needed.
        """
        if context.copies.native is None:
            return None
        range_bytes = 4 * context.range_bytes
        split = Split(range_bytes, 4, num_workers=4, most_woken=2, early_ranges=1)
        return context.staged(context, split, self)

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._enter(keys)
        for n, key in enumerate(keys):
            with named_error(self.label, key, n):
                self._directory.delete(key)
        self._evictor.expect_room()

    def clear(self, namespace: str) -> None:
        self._lifecycle.check()
        prefix = prefix_of(namespace)
        with named_error(self.label, f"clear of {prefix}"):
            self._directory.delete_all(prefix)
        self._evictor.expect_room()

    def stored_values(self, prefix: str = ALL_KEYS) -> Iterator[StoredValue]:
        self._lifecycle.check()
        with named_error(self.label, "cannot be listed"):
            now = self._directory.clock.now_ns()
            for file in self._directory.files():
                if file.name.startswith(prefix):
                    age_s = max(0, now - file.atime_ns) / 1e9
                    yield StoredValue(BlockKey(file.name), file.size, age_s)

    def length_of(self, key: BlockKey) -> int | None:
        [path] = self._enter([key])
        with named_error(self.label, key):
            try:
                return os.lstat(path).st_size
            except FileNotFoundError:
                return None

    def why_too_long(self, num_bytes: int) -> str | None:
        why = self._evictor.budget.why_too_long(num_bytes)
        return why and f"{self.label}: {why}"

    def room(self) -> Room:
        used_bytes = sum(value.num_bytes for value in self.stored_values())
        capacity = self._evictor.budget.attainable
        return Room("a directory", used_bytes, capacity, None, "the least recently used goes first")

    def oldest_age_s(self, sizes: Sequence[int]) -> float | None:
        self._lifecycle.check()
        with named_error(self.label, "cannot be looked at"):
            return self._evictor.age_of_oldest(sizes)

    def make_room(self, keys: Sequence[BlockKey], sizes: Sequence[int]) -> bool:
        paths = self._enter(keys)
        missing = [n for path, n in zip(paths, sizes, strict=True) if not os.access(path, os.F_OK)]
        with named_error(self.label, "cannot make room"):
            return self._evictor.clear_room(missing, frozenset(keys))

    def use(self, keys: Sequence[BlockKey]) -> None:
        """Leases again what is leased, since one time stamp tells of a use and of a lease's end.

        What is not leased counts as put now. If another process leases it at this moment, that
        lease may end after FRESH_S.
        """
        paths = self._enter(keys)
        library = self._built() if len(keys) > 1 else None
        with named_error(self.label, "cannot stamp its files"):
            now = self._directory.clock.now_ns()
        ends = self._directory.lease_ends(paths)
        fresh_until = now + int(FRESH_S * 1e9)
        leased = [path for path, end in zip(paths, ends, strict=True) if end > fresh_until]
        others = [path for path, end in zip(paths, ends, strict=True) if 0 < end <= fresh_until]
        lease_end = now + int(self._lease_s * 1e9)
        for part, end in ((leased, lease_end), (others, now - len(leased))):
            num_done, why = renew_leases(part, now, end, library)
            if why not in (0, errno.ENOENT):
                raise error_of(self.label, why, os.path.basename(part[num_done]))

    def server_doubts(self) -> Iterator[ServerDoubt]:
        """Yields `doubts`: they need no server."""
        yield from (ServerDoubt(*doubt) for doubt in self.doubts)

    def close(self) -> None:
        if self._lifecycle.end():
            self._bell.close()
            self._evictor.close()

    def _put(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        sizes: Sequence[int],
        write: WriteValues,
    ) -> int:
        """Stores values by `write`, for which the evictor makes room; retries after `_repair`."""
        n = next((i for i, path in enumerate(paths) if not os.access(path, os.F_OK)), len(keys))
        while n < len(keys):
            with named_error(self.label, keys[n], n):
                if kind_of(keys[n]) in NEVER_REFUSED:
                    stop = n + 1
                    self._evictor.admit_anyway(sizes[n:stop])
                else:
                    stop = n + self._evictor.admit(sizes[n:])
            if stop == n:
                why, remedy = self._evictor.budget.why_full(sizes[n])
                raise StoreFull(f"{self.label}: {why}: {keys[n]}", num_done=n, remedy=remedy)
            try:
                self._write(keys, paths, sizes, range(n, stop), write)
            finally:
                self._evictor.settle(sizes[n:stop])
                self._bell.wake_all()
            n = stop
        return n

    def _write(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        sizes: Sequence[int],
        part: range,
        write: WriteValues,
    ) -> None:
        n = part.start
        num_repairs = 0
        while n < part.stop:
            rest = range(n, part.stop)
            done, why = write(self._directory.temporary(), paths[n : part.stop], rest)
            n, num_repairs = n + done, 0 if done else num_repairs
            if why:
                with named_error(self.label, keys[n], n):
                    self._repair(why, keys[n], sizes[n], num_repairs)
                num_repairs += 1

    def _repair(self, why: int, key: BlockKey, num_bytes: int, num_repairs: int) -> None:
        """Removes the cause of a failed write. Raises OSError if nothing is left to try."""
        if why == errno.ENOENT and num_repairs == 0:
            self._directory.repair()
        elif why in FULL and num_repairs == 0:
            self._evictor.make_room(num_bytes)
        elif why in FULL and num_repairs == 1 and kind_of(key) in NEVER_REFUSED:
            self._evictor.evict_newest()
        else:
            raise OSError(why, os.strerror(why))

    def _enter(self, keys: Sequence[BlockKey], slots: Slots | None = None) -> list[str]:
        """Checks the arguments of a call, and that the store is open; returns the values' paths."""
        self._lifecycle.enter(keys, slots)
        return list(map(self._path_of, keys))  # cached, because the same keys come again

    def _serve(
        self,
        keys: Sequence[BlockKey],
        paths: Sequence[str],
        serve: Callable[[int], Ended],
        can_serve: Callable[[str], bool],
    ) -> int:
        """Returns how many leading values a call serves; a missing file is no error.

        A value that fails alone counts as missing and is moved away, so that a put stores it again.

        serve: serves the values from an index on. can_serve: tries the same for one path.
        Raises StoreError.
        """
        n, why = serve(0)
        if why == errno.ENOENT and self._mount.remembers_misses:
            n, why = self._search_again(paths, n, serve)
        if why in (0, errno.ENOENT):
            return n
        if why in UNREADABLE and self._is_alone(paths, n, can_serve):
            self._give_up(paths[n], why)
            return n
        raise error_of(self.label, why, keys[n], n)

    def _search_again(self, paths: Sequence[str], n: int, serve: Callable[[int], Ended]) -> Ended:
        """Goes on behind each value that this host's kernel wrongly believed missing."""
        check = NameCheck(self.root, self._mount)
        why = errno.ENOENT
        while why == errno.ENOENT and check.is_there(paths[n]):
            more, why = serve(n)
            n += more
            if not more:  # it is gone again
                break
        return Ended(n, why)

    def _is_alone(self, paths: Sequence[str], n: int, can_serve: Callable[[str], bool]) -> bool:
        """Returns whether another value can be served now, so that the store works."""
        pool_id = self._path_of(POOL_ID_KEY)
        others = [*paths[max(0, n - 1) : n], pool_id, *paths[n + 1 : n + 1 + _NEIGHBOURS]]
        return any(can_serve(path) for path in others if path != paths[n])

    def _give_up(self, path: str, why: int) -> None:
        is_moved = self._directory.move_away(path)
        if self._silent_until.is_over():
            self._silent_until = Deadline(_WARNING_INTERVAL_S)
            what = "it is moved away, to be stored again" if is_moved else "delete it"
            log.warning("%s cannot be read (%s), and others can: %s", path, os.strerror(why), what)


def _options_of(url: StoreURL) -> dict[str, Any]:
    """Returns a URL's directory, budget, lease and whether it is direct. Raises ConfigError."""
    if url.host or url.path == "/":
        raise ConfigError(
            f"{url.label}: write file:///an/absolute/directory,"
            f" or file:// for {cache_directory('pool')}"
        )
    budget = url.size("budget", 0) or None
    lease_s = url.seconds("lease", DEFAULT_LEASE_S)
    direct = url.switch("direct")
    url.finish("budget, lease, direct")
    if lease_s > MAX_LEASE_S:
        raise ConfigError(f"{url.label}: lease must be at most {MAX_LEASE_S:g} seconds")
    root = Path(url.path) if url.path else cache_directory("pool")
    return {"root": root, "budget": budget, "lease_s": lease_s, "direct": direct}


def _check_sizes(slots: Slots) -> None:
    """Raises ValueError for a value that is too short to hold a checksum."""
    if min(slots.sizes, default=HEADER_BYTES) < HEADER_BYTES:
        raise ValueError(f"a value of fewer than {HEADER_BYTES} bytes has no checksum")
