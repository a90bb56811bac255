"""KVPool: saves and loads blocks in an engine's worker process, which holds the KV tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial

import torch

from pdstore.async_runner import DevicePin
from pdstore.errors import Direction, LayoutError, ReadOnly, SwapError
from pdstore.format.block import Header
from pdstore.format.continuation import BlockTables
from pdstore.format.handoff import HandoffId
from pdstore.format.keys import BlockKey, Namespace, PromptKeys
from pdstore.format.layout import Layout
from pdstore.format.plan import Announcement, LoadPlan, SavePlan
from pdstore.metrics import Metrics
from pdstore.settings import Settings, empty_settings
from pdstore.store.base import Store
from pdstore.store.connect import connect_store
from pdstore.store.guard import problem_of
from pdstore.store.optional import meeting_store_of
from pdstore.store.transfer import RANGE_BYTES, ReadyEvent
from pdstore.store.watch import KeyWatch
from pdstore.threads import Deadline
from pdstore.worker.follow import Follow
from pdstore.worker.heartbeat import Heartbeat
from pdstore.worker.job import Job, Urgency
from pdstore.worker.job_queue import MAX_JOBS, STOP_TIMEOUT_S, JobQueue
from pdstore.worker.load import LoadWork
from pdstore.worker.mover import open_mover
from pdstore.worker.open_save import OpenSave, RunningSaves
from pdstore.worker.save import MarkWork, SaveWork
from pdstore.worker.swap import open_swap
from pdstore.worker.swap.base import LayerCache, Swap
from pdstore.worker.values import PromptBlocks, Tables, bytes_of, tables_of

log = logging.getLogger(__name__)

_BYTES_PER_S = 1e9  # a job's timeout is one second longer for every so many bytes
_PIN_TIMEOUT_S = 30.0


class KVPool:
    """Saves prompts' KV blocks to the pool and loads them from it.

    Any thread may call it, but no signal handler: the thread that it interrupts may hold a lock.

    layout, kv_caches: as `TorchSwap` takes them. Threads pin host memory while the engine goes on
      starting. Before graphs are captured, call `ready`, which waits until all of it is pinned.
    namespace: `layout.namespace(...)`; keys of another namespace are refused.
    store: a store that the caller closes; None opens PDSTORE_STORE.
    swap: copies the blocks of `kv_caches`; the pool closes it. None: `open_swap`.
    range_bytes: the approximate bytes of a block range; `Split` says how a job is split.
    max_jobs: how many saves may wait for a worker, and how many loads. Further jobs are refused.
    Raises ConfigError or LayoutError for settings or tensors that do not fit, DeviceError, and
    StoreError when the store is required and does not answer.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        kv_caches: Sequence[LayerCache],
        namespace: Namespace,
        *,
        metrics: Metrics | None = None,
        store: Store | None = None,
        swap: Swap | None = None,
        range_bytes: int = RANGE_BYTES,
        max_jobs: int = MAX_JOBS,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.metrics = metrics or Metrics()
        self._settings = settings
        self._saves = RunningSaves()
        owns_store = store is None
        with contextlib.ExitStack() as undo:
            self._swap = swap = swap or open_swap(settings, layout, kv_caches)
            undo.callback(swap.close)
            self._store = store = store or connect_store(settings, self.metrics)
            if owns_store:
                undo.callback(store.close)
            self._mover = open_mover(settings, layout, swap, store, self.metrics, range_bytes, undo)
            undo.callback(swap.close)  # it must be closed before its memory is unpinned
            pin = DevicePin(swap.device, swap.device_api)
            split = self._mover.transfer.split
            num_workers = settings.workers or split.num_workers
            self._queue = JobQueue(num_workers, pin, self.metrics, split.most_woken, max_jobs)
            undo.callback(self._queue.close, 0.0)
            if owns_store:  # closed before the queue: this ends calls that wait for an arena's lock
                undo.callback(store.close)
            self._watch = KeyWatch(meeting_store_of(store), name="pdstore-follower")
            undo.callback(self._watch.close, 0.0)
            self._heartbeat = Heartbeat(settings, layout, namespace, store)
            undo.callback(self._heartbeat.close, 0.0)
            self._resources = undo.pop_all()
        self._log_start(num_workers)

    @property
    def problem(self) -> str | None:
        """A sentence on the store's last failure or on its hung calls; None while all is well."""
        return self._queue.problem or problem_of(self._mover.context.store)

    def ready(self, timeout_s: float | None = None) -> None:
        """Waits until host memory is pinned; then graphs may be captured. Jobs wait for it as well.

        timeout_s: None means 30 s plus 1 s for each GB. Raises SwapError or TimeoutError.
        """
        memory = self._mover.transfer.memory
        if timeout_s is None:
            timeout_s = _PIN_TIMEOUT_S + memory.num_bytes / _BYTES_PER_S
        memory.ready(timeout_s)

    def caller_event(self) -> ReadyEvent | None:
        """Returns an event after the work queued on the caller's stream, for `begin_load`.

        None if the paged cache is on no GPU. Raises SwapError as `record_caller_event` does.
        """
        return record_caller_event(self._swap)

    def flush(self, timeout_s: float) -> None:
        """Waits until all saves that were begun so far have ended.

        After that, raises SaveFailed for the first save that has failed since the last flush. A
        save that was cancelled or not admitted has not failed. Raises TimeoutError if a save still
        runs after `timeout_s`; PoolClosed in the child of a fork.
        """
        self._queue.check_process()
        self._saves.flush(timeout_s)

    def save(
        self,
        keys: PromptKeys,
        block_ids: Sequence[int] | BlockTables,
        *,
        first_token: int = 0,
        ready: ReadyEvent | None = None,
        handoff: HandoffId | None = None,
        after: Sequence[Job] = (),
    ) -> Job:
        """Starts to store the blocks that `keys` names; returns immediately.

        The source blocks must stay as they are until `job.captured`; with a hand-off until
        `job.done`, because the job saves blocks again that the store has lost before its end.

        Args:
          keys, first_token, handoff: as in `SavePlan`.
          block_ids: the engine blocks of the prompt from its first token on, in order,
            `NO_BLOCK` where a window has moved on; a list for each block table if the layout has
            several. The ids are copied before the call returns. But if there are several tables,
            an `array` of int64 is not copied: do not change it before the job has ended.
            Of a table of states: a mapping from numbers of tokens to the entries that hold the
            states after them, each the end of a block or of `keys`. Name only entries that no
            later step overwrites: no checksum tells a state from a later one. All tables need the
            state at the end of `keys`, or nothing is saved.
          ready: an event after which the paged cache holds these tokens; None: the cache holds them
            after the work that is queued on the calling thread's current stream.
          after: saves that must end before this one begins.
        """
        save = self.begin_save(SavePlan(keys, first_token, handoff), block_ids, after=after)
        save.layers_done(len(self.layout.held_layers), ready)
        return save.job

    def begin_save(
        self,
        plan: SavePlan,
        block_ids: Sequence[int] | BlockTables,
        *,
        after: Sequence[Job] = (),
    ) -> OpenSave:
        """Starts a save that reads layers while the model still computes later layers.

        The caller says with `layers_done` which layers may be read; this moves the job's
        deadline. To give up the save, cancel the job. The source blocks must stay as `save` says.

        plan: from `EngineRequest.plan_save` or `plan_answer_save`, as it is.
        block_ids, after: as in `save`.
        """
        keys, handoff, announce = plan.keys, plan.handoff, plan.announce
        first_block = self._first_block(keys, plan.first_token)
        first = first_block if handoff is None else 0  # a hand-off may save any block again
        tables = self._tables(keys, block_ids, first)
        if handoff is not None or not plan.is_handed_off:
            # else tokens go before the state at their end, which the hand-off's last save brings
            self.layout.continuation.check_states(tables, keys.num_tokens)
        is_awaited = self._mover.is_awaited(plan)
        asked = 0 if is_awaited else max(0, first_block - 1)  # SaveWork looks one block back
        prompt = PromptBlocks(self.layout, keys.prefix(keys.num_tokens), tables, asked)
        if announce is None and handoff is not None and handoff.last_save_failed:
            announce = Announcement(handoff, keys.num_tokens)
        if announce is not None:  # now, because the end of the save ends the beats
            self._heartbeat.begin_beats(announce.handoff)
        work = SaveWork(self._mover, prompt, plan)
        job = Job(
            Direction.SAVE,
            work,
            num_bytes=bytes_of(self.layout, keys, first_block),
            timeout_s=self._settings.deadline_s + bytes_of(self.layout, keys, first) / _BYTES_PER_S,
            urgency=Urgency.HANDOFF if plan.is_handed_off else Urgency.ORDINARY,
        )
        if not self._queue.is_in_child:
            self._saves.add(job)
        self._submit_save(job, after)
        if handoff is not None and self._settings.publish:
            self._heartbeat.begin_beats(handoff)
            job.on_end(partial(self._note_end, handoff))
        order, wake = self.caller_event, partial(self._queue.wake, job)
        at_begin = [] if announce is None else [partial(self._put_started, announce)]
        return OpenSave(job, work, order, wake, at_begin)

    def load(
        self,
        keys: PromptKeys,
        block_ids: Sequence[int] | BlockTables,
        *,
        first_token: int = 0,
        ready: ReadyEvent | None = None,
        follow: HandoffId | None = None,
    ) -> Job:
        """Starts to load the blocks that `keys` names (`Match.keys`); returns immediately.

        keys, first_token, follow: as in `LoadPlan`.
        block_ids, ready: as in `begin_load`.
        """
        plan = LoadPlan(keys, first_token, keys.num_tokens, follow)
        return self.begin_load(plan, block_ids, ready=ready)

    def begin_load(
        self,
        plan: LoadPlan,
        block_ids: Sequence[int] | BlockTables,
        *,
        ready: ReadyEvent | None = None,
    ) -> Job:
        """Starts to load what an engine has planned; returns immediately.

        The destination blocks must not be given to any other request until `job.done`. After that,
        the paged cache holds the prompt's first `job.result.num_tokens` tokens, and the engine can
        go on computing after them. Each other token was no longer stored, or did not verify, or a
        sliding window before it has NO_BLOCK. A load that falls short, where windows have moved on
        or no earlier state is asked for, counts only `plan.first_token` tokens.

        Args:
          plan: from `EngineRequest.plan_load`, as it is.
          block_ids: as in `save`; nothing is loaded for NO_BLOCK, and of the states only those that
            have an entry. All tables of states need one for the state at the end of `plan.keys`.
          ready: an event after which the blocks may be written; None: they may be written after the
            work queued on the calling thread's current stream; READY_NOW: now.
        """
        keys, first_token, follow = plan.keys, plan.first_token, plan.follow
        first_block = self._first_block(keys, first_token)
        engine_block = self.layout.geometry.common_tokens
        if first_token % engine_block:
            raise LayoutError(f"first_token {first_token} must be a multiple of {engine_block}")
        tables = self._tables(keys, block_ids, first_block)
        self.layout.continuation.check_gaps(tables)
        self.layout.continuation.check_states(tables, keys.num_tokens)
        prompt = PromptBlocks(self.layout, keys.prefix(keys.num_tokens), tables, first_block)
        work = LoadWork(self._mover, prompt, first_token, ready or self.caller_event())
        num_bytes = bytes_of(self.layout, keys, first_block)
        marker_timeout_s = 0.0 if follow is None else self._settings.handoff_wait_s
        job = Job(
            Direction.LOAD,
            work,
            num_bytes=num_bytes,
            timeout_s=marker_timeout_s + self._settings.deadline_s + num_bytes / _BYTES_PER_S,
            urgency=Urgency.ORDINARY if follow is None else Urgency.HANDOFF,
        )
        if follow is None:
            split = self._mover.transfer.split  # so a share of a load is as large as one of a save
            work.release(split.ranges(first_block, len(keys), num_bytes // split.at_once))
            work.close()
        self._queue.submit(job)
        if self._mover.admission is not None:
            self._mover.admission.found(prompt.keys.hashes(), plan.waited_s)
        if follow is not None and not job.done:  # a refused job is done
            wake = partial(self._queue.wake, job)
            block_timeout_s = self._settings.handoff_wait_s
            self._watch.add(
                Follow(self._store, job, work, follow, block_timeout_s=block_timeout_s, wake=wake)
            )
        return job

    def abort_handoff(self, handoff: HandoffId) -> Job:
        """Tells D not to wait for this hand-off, because P's request was aborted.

        `save` does this itself for a hand-off that it cannot complete.
        """
        self._heartbeat.end_beats(handoff)
        marker = handoff.marker(self.namespace, 0, self.namespace.num_shards, 0)
        return self._put_marker(handoff.failed(self.namespace), marker)

    @property
    def num_jobs(self) -> int:
        """The number of jobs that have not ended."""
        return self._queue.num_alive

    def close(self) -> None:
        """Lets jobs run for up to PDSTORE_DRAIN_S, ends the other jobs, and closes the store.

        It takes at most PDSTORE_DRAIN_S plus 2 s (Mooncake: 3), even if the store hangs. A second
        caller waits until the first call has ended. In the child of a fork it does nothing, because
        the threads, the device and the store are the parent's.
        """
        deadline = Deadline(self._settings.drain_s + STOP_TIMEOUT_S)
        if self._queue.close(self._settings.drain_s):
            for thread in (self._heartbeat, self._watch):
                thread.close(deadline.remaining_s())
            self._resources.close()

    def _put_started(self, announced: Announcement) -> Job:
        handoff, num_tokens = announced
        marker = handoff.started_marker(self.namespace, self.namespace.num_shards, num_tokens)
        return self._put_marker(handoff.started(self.namespace), marker)

    def _put_marker(self, key: BlockKey, marker: Header) -> Job:
        """Starts a job that puts a marker."""
        work, timeout_s = MarkWork(self._mover, {key: marker}), self._settings.deadline_s
        return self._submit_save(
            Job(Direction.SAVE, work, timeout_s=timeout_s, urgency=Urgency.MARKER)
        )

    def _submit_save(self, job: Job, after: Sequence[Job] = ()) -> Job:
        if not self._settings.publish:
            return self._queue.reject(job, ReadOnly("PDSTORE_PUBLISH=0"))
        return self._queue.submit(job, after)

    def _note_end(self, handoff: HandoffId, job: Job) -> None:
        self._heartbeat.end_beats(handoff)
        if not job.durable:
            self.abort_handoff(handoff)

    def _first_block(self, keys: PromptKeys, first_token: int) -> int:
        """Returns the block that `first_token` is in. Raises LayoutError for bad arguments."""
        if keys.namespace.digest != self.namespace.digest:
            raise LayoutError("these keys are of another namespace than the pool's")
        if not 0 <= first_token <= keys.num_tokens:
            raise LayoutError(f"first_token {first_token} is outside {keys.num_tokens} tokens")
        return first_token // self.layout.block_tokens

    def _tables(
        self, keys: PromptKeys, block_ids: Sequence[int] | BlockTables, first_block: int
    ) -> Tables:
        num_blocks = self._swap.num_blocks
        return tables_of(self.layout, keys.num_tokens, block_ids, num_blocks, first_block)

    def _log_start(self, num_workers: int) -> None:
        """Logs in one line what an operator compares between instances, and then the copy paths."""
        out, back = self._swap.plan(Direction.SAVE), self._swap.plan(Direction.LOAD)
        log.info(
            "pool %s, namespace %s, role %s, block copies by %s, %d MiB of host memory,"
            " %d workers%s",
            self._store.label,
            self.namespace.hex,
            self._settings.role,
            ", ".join(sorted({plan.path for plan in out + back})),
            self._mover.transfer.memory.num_bytes >> 20,
            num_workers,
            empty_settings(self._settings),
        )
        for one, other in zip(out, back, strict=True):
            paths = one.path if one.path == other.path else f"{one.path}; back: {other.path}"
            log.info("%s, %d tokens: %s, %s", one.part, one.num_tokens, paths, one.why)


def record_caller_event(swap: Swap) -> ReadyEvent | None:
    """Returns an event after the work queued on the caller's stream; None if there is no stream.

    Raises SwapError while that stream is being captured into a graph.
    """
    device = swap.device
    if device.type != "cuda":
        return None
    with swap.relaxed(), torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise SwapError("KVPool cannot be called while its stream is being captured")
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        return event
