"""FileSystemClock: the time of a pool's file system, which is one clock for all of its hosts.

The leases of a pool of files are modification times, so they can be compared only with a clock that
all hosts share. The clocks of two hosts may be hours apart. But each file system stamps files by
one clock: a local one by that of its host, one that is shared over the network by its server's.
"""

# Decision: docs/decisions/042-files-of-several-hosts.md
from __future__ import annotations

import time
from collections.abc import Callable

_S = 1_000_000_000
_SLOW_NS = _S // 2  # a stamp that took longer says less than one of some seconds ago


def boot_ns() -> int:
    """Returns nanoseconds since the boot: of a clock that nobody sets, and that sleep moves on."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class FileSystemClock:
    """Tells a file system's time; like `time.time_ns`, by another clock. Any thread may call it.

    stamp: has the file system stamp a file with its present time, and returns that time in ns.
      Raises OSError. It is called at most once in `interval_s`; in between, the time since
      the last stamp is measured on this host.
    local_ns: returns this host's nanoseconds; only differences count.
    """

    def __init__(
        self,
        stamp: Callable[[], int],
        interval_s: float = 10.0,
        local_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._stamp = stamp
        self._interval_ns = int(interval_s * _S)
        self._local_ns = local_ns
        self._last: tuple[int, int] | None = None  # when it was measured here, and the difference

    def now_ns(self) -> int:
        """Returns the file system's time. Raises OSError if it was never told."""
        last = self._last
        here = self._local_ns()
        if last is not None and here - last[0] < self._interval_ns:
            return here + last[1]
        return self.measured_ns()

    def measured_ns(self) -> int:
        """Returns the file system's time, for which it stamps a file now. Raises as `now_ns`."""
        last = self._last
        began = self._local_ns()
        try:
            stamped = self._stamp()
        except OSError:
            if last is None:
                raise
            return self._local_ns() + last[1]
        here = self._local_ns()
        if last is None or here - began < _SLOW_NS:
            self._last = last = here, stamped - here
        return here + last[1]
