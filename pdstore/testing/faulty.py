"""Faulty: a store that fails on purpose, for tests and rehearsals."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdstore.errors import ConfigError, StoreUnavailable
from pdstore.format.keys import BlockKey
from pdstore.settings import Settings
from pdstore.store.base import Slots, Store
from pdstore.store.connect import check_url, open_store, place_of
from pdstore.store.url import Place, StoreURL
from pdstore.store.wrappers import WrapperStore
from pdstore.threads import Deadline

log = logging.getLogger(__name__)

MOST_HELD_S = 60.0
_HELD_INTERVAL_S = 0.01


class Faulty(WrapperStore):
    """Wraps a store; its calls fail by chance, with given rates, or hang on command.

    The URL `faulty+redis://host?seed=7&error_rate=0.01` wraps `redis://host`, to rehearse what an
    engine does when its store fails. A rate that the URL leaves out is 0.02.

    seed: seeds one random generator; threads draw from it in the order of their calls.
    error_rate: the chance that a call raises StoreUnavailable.
    miss_rate: the chance that a call returns a smaller count than the wrapped store.
    corrupt_rate: the chance, for each value that is read, that one of its bits is flipped.
    bytes_per_s: the maximum rate of all reads together (in the URL: `100MB`); 0: no limit.
    hold_file: while this file exists, all calls hang, as after `hold` (in the URL: `hold=/a/file`):
      so another process can make a store hang.

    The metric `pdstore_store_codes_total` counts the failures on purpose, by kind (`codes`).
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int = 0,
        error_rate: float = 0.0,
        miss_rate: float = 0.0,
        corrupt_rate: float = 0.0,
        bytes_per_s: int = 0,
        hold_file: Path | None = None,
    ) -> None:
        super().__init__(store)
        self._random = random.Random(seed)
        self.error_rate = error_rate
        self.miss_rate = miss_rate
        self.corrupt_rate = corrupt_rate
        self._bytes_per_s = bytes_per_s
        self._hold_file = hold_file
        self._read_until = 0.0
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open = threading.Event()
        self._open.set()

    @classmethod
    def open(cls, url: StoreURL, settings: Settings) -> Faulty:
        """Opens and wraps the store that the URL names behind `faulty+`. Raises ConfigError."""
        options = _options_of(url)
        store = cls(open_store(url.inner("faulty+"), settings), **options)
        store.label = url.label
        log.warning("%s fails on purpose: %s", url.label, options)
        return store

    @classmethod
    def check(cls, url: StoreURL, settings: Settings) -> None:
        _options_of(url)
        check_url(url.inner("faulty+"), settings)

    @classmethod
    def place(cls, url: StoreURL, settings: Settings) -> Place:
        """Returns the place of the wrapped store; a trial fails on purpose, too."""
        faults = url.text.partition("?")[2]
        _options_of(url)
        found = place_of(url.inner("faulty+"), settings)
        trial = found.trial_url
        if trial is not None:
            trial = f"faulty+{trial.partition('?')[0]}?{faults}"
        return found._replace(trial_url=trial)

    def codes(self) -> Mapping[str, int]:
        """Returns the counts of failures on purpose, by kind, and the wrapped store's own codes."""
        return {**super().codes(), **self._counts}

    def hold(self) -> None:
        """Makes all calls hang from now on: until `release`, but at most `MOST_HELD_S` each."""
        self._open.clear()

    def release(self) -> None:
        """Ends what `hold` began: calls that hang continue, and new calls do not hang."""
        self._open.set()

    def match(self, keys: Sequence[BlockKey]) -> int:
        self._fault("match")
        return self._shortened(super().match(keys))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._fault("get")
        n = self._shortened(super().get(keys, slots))
        for i in range(n):
            if self._chance(self.corrupt_rate):
                value = slots.value(i)
                value[self._random.randrange(len(value))] ^= 1 << self._random.randrange(8)
                self._counts["faulty_corrupt"] += 1
        if self._bytes_per_s:  # counts each read as begun when all earlier reads have ended
            with self._lock:
                start = max(time.monotonic(), self._read_until)
                self._read_until = end = start + sum(slots.sizes[:n]) / self._bytes_per_s
            time.sleep(max(0.0, end - time.monotonic()))
        return n

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> int:
        self._fault("put")
        return self._shortened(super().put(keys, slots))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._fault("remove")
        super().remove(keys)

    def clear(self, namespace: str) -> None:
        self._fault("clear")
        super().clear(namespace)

    def _fault(self, verb: str) -> None:
        self._hang()
        if self._chance(self.error_rate):
            self._counts["faulty_error"] += 1
            raise StoreUnavailable(f"{self.label}: {verb} failed on purpose")

    def _hang(self) -> None:
        deadline = Deadline(MOST_HELD_S)
        is_held = False
        self._open.wait(MOST_HELD_S)
        if self._hold_file is not None:
            while self._hold_file.exists() and not deadline.is_over():
                is_held = True
                time.sleep(_HELD_INTERVAL_S)
        if is_held:
            self._counts["faulty_hold"] += 1

    def _shortened(self, n: int) -> int:
        if not n or not self._chance(self.miss_rate):
            return n
        self._counts["faulty_miss"] += 1
        return self._random.randrange(n)

    def _chance(self, rate: float) -> bool:
        return self._random.random() < rate


def _options_of(url: StoreURL) -> dict[str, Any]:
    """Takes seed, rates, bytes_per_s and hold out of a URL's options. Raises ConfigError."""
    seed = url.options.pop("seed", "0")
    if not seed.isdecimal():
        raise ConfigError(f"{url.label}: seed={seed!r} is not a whole number")
    rates = {name: _rate(url, name) for name in ("error_rate", "miss_rate", "corrupt_rate")}
    hold = url.options.pop("hold", "")
    if hold and not Path(hold).is_absolute():
        raise ConfigError(f"{url.label}: hold={hold!r} is no absolute path")
    hold_file = Path(hold) if hold else None
    bytes_per_s = url.size("bytes_per_s", 0)
    return {"seed": int(seed), **rates, "bytes_per_s": bytes_per_s, "hold_file": hold_file}


def _rate(url: StoreURL, name: str) -> float:
    text = url.options.pop(name, "0.02")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ConfigError(f"{url.label}: {name}={text!r} is not a number from 0 to 1")
