"""Mover: carries values between the paged cache and the store, one share of a job at a time."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pdstore.errors import BadValue, StoreError
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.format.layout import Layout
from pdstore.metrics import Metrics
from pdstore.outcome import Reason, reason_of
from pdstore.store.base import Store
from pdstore.store.checked import count_of, num_done_of
from pdstore.store.circuit_breaker import problem_of
from pdstore.worker.block_range import Split
from pdstore.worker.block_tables import tables_of
from pdstore.worker.child_job import ChildJob
from pdstore.worker.swap.base import BlockCopy, ReadyEvent, Swap
from pdstore.worker.value_run import ValueRun
from pdstore.worker.values import PromptBlocks, Value, counted_tokens, whole_blocks
from pdstore.worker.verified import Verified, wrong_values

log = logging.getLogger(__name__)

_REGISTER_S = 30.0
_REGISTER_BYTES_PER_S = 1e9
BAD = frozenset({Reason.CORRUPT, Reason.FOREIGN, Reason.FORGED})
"""Reasons why a value is good for nobody, so that whoever meets it removes it."""

Loaded = Callable[[Sequence[Value], Reason | None], None]
"""Told after a copy: the values of whole blocks that are in place, and why those are not all."""


class Source(NamedTuple):
    """Values to save, and the event that their copies wait on."""

    values: Sequence[Value]
    ready: ReadyEvent | None


class HostMemory(Protocol):
    """Memory that copies use, while and after it is registered with the device."""

    @property
    def num_bytes(self) -> int: ...
    def ready(self, timeout_s: float) -> None: ...


class Ends(NamedTuple):
    """The ends between which values are moved, the paged cache and the store; and the counts."""

    layout: Layout
    swap: Swap
    store: Store
    metrics: Metrics


class Mover(ABC):
    """Moves the values of a child job, on its worker's thread.

    Values come and go whole blocks first to last. Nothing counts as loaded that was not verified.

    split: how jobs are shared out to suit this mover.
    removed: values that cannot be used for one of these reasons are removed.
    """

    def __init__(
        self,
        ends: Ends,
        memory: HostMemory,
        split: Split,
        removed: frozenset[Reason] = BAD,
    ) -> None:
        self.split, self._removed, self._memory = split, removed, memory
        self._num_parts = len(ends.layout.owned_parts)
        self._block_tokens = ends.layout.block_tokens
        self._swap, self._store, self._metrics = ends.swap, ends.store, ends.metrics

    @property
    def problem(self) -> str | None:
        """The trouble of the store now, in a sentence; None while all is well."""
        return problem_of(self._store)

    @property
    def memory_bytes(self) -> int:
        """Size of the host memory that values are copied through."""
        return self._memory.num_bytes

    def to_follow(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if copies can wait on it; else blocks until it fires, returns None."""
        return self._swap.to_follow(ready)

    def checked(self, prompt: PromptBlocks) -> PromptBlocks:
        """Returns the prompt with all its block tables checked. Raises LayoutError."""
        num_tokens, num_blocks = prompt.keys.num_tokens, self._swap.num_blocks
        tables = tables_of(prompt.layout, num_tokens, prompt.tables, num_blocks)
        return PromptBlocks(prompt.layout, prompt.keys, tables)

    def num_matched(self, child: ChildJob, keys: Sequence[BlockKey]) -> int:
        """Returns how many of the first keys are in the store; renews their leases."""
        with child.in_store_call():
            return count_of(self._store.match(keys), keys, self._store)

    def ready(self, timeout_s: float | None) -> None:
        """Waits until the memory of copies is registered; jobs wait too, until their deadline.

        timeout_s: None: 30 s and one more for each GB.
        Raises why it cannot be registered, or TimeoutError.
        """
        if timeout_s is None:
            timeout_s = _REGISTER_S + self._memory.num_bytes / _REGISTER_BYTES_PER_S
        self._memory.ready(timeout_s)

    def save(
        self, child: ChildJob, sources: Sequence[Source], gathered: Callable[[], None]
    ) -> Reason | None:
        """Stores values: gather, seal, put. Returns why not all of them, or None.

        gathered: called for each source when it has been copied out of the paged cache.
        """
        for source in sources:
            reason = self._save(child, source, gathered)
            if reason is not None:
                return reason
        return None

    @abstractmethod
    def _save(
        self, child: ChildJob, source: Source, gathered: Callable[[], None]
    ) -> Reason | None: ...

    @abstractmethod
    def load(
        self,
        child: ChildJob,
        values: Sequence[Value],
        first_token: int,
        ready: ReadyEvent | None,
        loaded: Loaded,
    ) -> Reason | None:
        """Loads values: get, verify, scatter. Returns why not all of them, or None.

        The last copy may be under way still; `child` waits for it.
        first_token: of the prompt; tokens before it are not written.
        ready: the copies wait on it; the store is asked before. loaded: called after each copy.
        """

    def mark_at_once(self, key: BlockKey, marker: block.Header) -> bool:
        """Stores a marker on the calling thread if that needs no wait; returns whether it did."""
        return False

    def removes(self, reason: Reason) -> bool:
        """True if values that cannot be used for this reason are removed."""
        return reason in self._removed

    def remove_wrong(self, child: ChildJob, values: Sequence[Value]) -> None:
        """Reads values and removes the wrong ones; nothing is copied. Raises StoreError."""
        rest = values
        while rest:
            num_asked, read = self._read_some(child, rest)
            if read.error is not None:
                raise read.error
            if not num_asked:
                child.check()
                return
            rest = rest[min(read.num_read + 1, num_asked) :]  # goes on behind what ended it

    @abstractmethod
    def _read_some(self, child: ChildJob, values: Sequence[Value]) -> tuple[int, Verified]:
        """Reads some of the first values; returns how many, 0 for want of room, and the outcome."""

    @abstractmethod
    def mark(self, child: ChildJob, markers: Mapping[BlockKey, block.Header]) -> Reason | None:
        """Stores header-only markers. Returns None if another process can see all of them."""

    def _verify(
        self,
        child: ChildJob,
        values: Sequence[Value],
        view: Callable[[int], memoryview],
        read: Verified,
    ) -> Verified:
        """Verifies the values that a read brought; removes all that are wrong."""
        num_read = read.num_right
        sums = self._swap.checksums([view(i) for i in range(num_read)])
        wrong = {
            i: self._look_again(child, values[i], reason)
            for i, reason in wrong_values(values[:num_read], view, sums).items()
        }
        if read.reason is not None and num_read < len(values):
            wrong[num_read] = read.reason
        self._remove(child, {values[i].key: reason for i, reason in wrong.items()})
        if wrong:
            first, reason = next(iter(wrong.items()))
            read = Verified(first, reason)
        return read._replace(num_read=num_read)

    def _look_again(self, child: ChildJob, value: Value, reason: Reason) -> Reason:
        """Returns why a value that was read wrong, for this reason, must not be used."""
        return reason

    def _seal(self, values: Sequence[Value], views: Sequence[memoryview]) -> None:
        """Writes the headers, with their checksums, of values whose payloads are in place."""
        for value, view in zip(values, views, strict=True):
            block.write_start(view, value.start)
        for view, computed in zip(views, self._swap.checksums(views), strict=True):
            block.write_checksum(view, computed)

    def _failed_read(self, error: StoreError, keys: Sequence[BlockKey]) -> Verified:
        """Returns what an error of the store leaves: the values that came before it are good."""
        num_done = num_done_of(error, keys)
        if isinstance(error, BadValue):
            return Verified(num_done, reason_of(error))
        return Verified(num_done, error=error)

    def _remove(self, child: ChildJob, wrong: Mapping[BlockKey, Reason]) -> None:
        """Forgets values that must not be used, so that the next save heals them."""
        bad = [key for key, reason in wrong.items() if self.removes(reason)]
        if not bad:
            return
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        log.warning(
            "%s: %s is %s and is removed%s", self._store.label, bad[0], wrong[bad[0]].value, more
        )
        with child.in_store_call():
            try:
                self._store.remove(bad)
            except StoreError as error:
                log.warning("it could not be removed: %s", error)

    def _copies_to(
        self, values: Sequence[Value], view: Callable[[int], memoryview], first_token: int
    ) -> list[BlockCopy]:
        """Returns the copies that write `values` to the paged cache from `first_token` on."""
        return [
            value.block_copy(view(i), self._tokens_before(value, first_token))
            for i, value in enumerate(values)
        ]

    def _tokens_before(self, value: Value, first_token: int) -> int:
        """Returns how many tokens of a value's block come before `first_token`, if it is in it."""
        before = first_token - value.number * self._block_tokens
        return before if 0 <= before < self._block_tokens else 0

    def _begins_within(self, run: ValueRun, first_token: int) -> bool:
        """True if tokens of one of these blocks must not be written."""
        block, before = divmod(first_token, self._block_tokens)
        return before > 0 and run.blocks.first <= block < run.blocks.stop

    def _scatter(
        self,
        child: ChildJob,
        start: Callable[[], Callable[[], None]],
        copied: Callable[[], None],
        held: contextlib.ExitStack,
    ) -> None:
        """Starts copies to the paged cache and lets them go on while the child job does more.

        start: starts them, and returns what waits for their end.
        copied: called when they are done. held: given back then, or when anything fails.
        """
        with contextlib.ExitStack() as under_way:
            with held:
                child.begin_copy()
                under_way.callback(child.end_copy)
                under_way.enter_context(held.pop_all())
            wait = start()
            rest = under_way.pop_all()

            def finish() -> None:
                with rest:
                    wait()
                    copied()

            child.follow(finish)

    def _whole(self, values: Sequence[Value], read: Verified) -> Sequence[Value]:
        return values[: whole_blocks(values, read.num_right)]

    def _count(self, verb: str, values: Sequence[Value]) -> None:
        """Counts the tokens of each block once."""
        self._metrics.tokens.labels(verb).inc(counted_tokens(values))
