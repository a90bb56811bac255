"""Chance: vLLM's own scheduler, driven at random through the connector."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from types import SimpleNamespace

import torch
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pdstore.adapters.vllm.messages import StepReport
from pdstore.engine.job_end import JobEnd
from pdstore.errors import Direction, Reason
from pdstore.format.continuation import NO_BLOCK
from pdstore.format.handoff import Handoff, HandoffId

BLOCK, NUM_BLOCKS, MAX_NEW = 16, 24, 40
SHARED = list(range(1, 129))
NUM_DRAFTS = 2
STILL_S = 5.0  # for which a walk may compute nothing


def drafting(config, method):
    """vLLM's configuration of speculation: the scheduler treats MTP's drafts as it does EAGLE's."""
    if method is None:
        return None
    made = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=NUM_DRAFTS,
        prompt_lookup_max=2,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    made.method = method
    return made


def groups_of(mode, num_drafts=0):
    """The KV groups of a model: of its states, if it has some in this mode of vLLM, come first."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["a", "b"], spec)]
    if mode is None:
        return groups
    state = MambaSpec(
        block_size=BLOCK if mode == "align" else 256,
        shapes=((96,),),
        dtypes=(torch.int8,),
        mamba_cache_mode=mode,
        page_size_padded=spec.page_size_bytes,
        num_speculative_blocks=num_drafts,
    )
    return [KVCacheGroupSpec([name], state) for name in "cd"] + groups


class Contents:
    """After which tokens the state in each block is, as a model would write the blocks.

    A state that is overwritten while a save reads it is stored with a checksum that fits.
    """

    def __init__(self) -> None:
        self._states: dict[int, list[int]] = {}  # by block
        self._read: dict[int, dict[int, list[int]]] = {}  # by save: what it must find

    def step(self, request, ids, num_drafts=0, num_accepted=0) -> None:
        """Computes a step of a request, whose block tables of states are `ids`.

        With drafts, the entry that they end in has the state before them, and each of the entries
        behind has the state after one more. Then vLLM copies the one of a block's end to its entry.
        """
        stop = request.num_computed_tokens
        end = stop - num_drafts
        for table, size in ids:
            running = (stop - 1) // size
            for n in range(num_drafts + 1):
                self._states[table[running + n]] = tokens_of(request, end + n)
            boundary = (end + num_accepted) // size * size
            if num_drafts and boundary >= end:
                self._states[table[boundary // size - 1]] = tokens_of(request, boundary)

    def begin(self, spec, tables) -> int:
        """Begins a load or save that has these tables of states; returns how many it names."""
        named = {block: end for table in tables for end, block in table.items()}
        if spec.number is None:
            self._states |= {block: [] for block in named}  # until all of it has come
            return len(named)
        prompt = spec.plan.keys
        self._read[spec.number] = {block: self._states[block] for block in named}
        for block, end in named.items():
            assert len(self._states[block]) == end <= prompt.num_tokens
        return len(named)

    def loaded(self, request, tables) -> None:
        for table in tables:
            for end, block in table.items():
                self._states[block] = tokens_of(request, end)

    def check(self) -> None:
        """Checks that no block was overwritten which a save still reads."""
        for read in self._read.values():
            assert read == {block: self._states[block] for block in read}

    def end(self, number) -> None:
        del self._read[number]


def tokens_of(request, num_tokens):
    """The first tokens of a request; those that no step has answered yet are 7."""
    tokens = list(request.all_token_ids)[:num_tokens]
    return tokens + [7] * (num_tokens - len(tokens))


class Chance:
    """A vLLM instance without a model: jobs end after some turns, well or not, and tokens are 7.

    Where steps overlap, a step's outcome comes after the next step was scheduled.
    """

    def __init__(self, config, url, seed, *, overlaps, mode=None, drafts=None) -> None:
        config.kv_transfer_config.kv_connector_extra_config |= {
            "store": url,
            "role": "both",
            "handoff_wait_s": 0.02,
        }
        config.scheduler_config.async_scheduling = overlaps
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.cache_config.mamba_cache_mode = mode or "none"
        config.cache_config.enable_prefix_caching = mode == "align"  # else all is loaded again
        config.cache_config.prefix_cache_retention_interval = BLOCK  # so answers leave states
        config.speculative_config = drafting(config, drafts)
        groups = groups_of(mode, NUM_DRAFTS if drafts else 0)
        self._sizes = [g.kv_cache_spec.block_size for g in groups[: len(groups) - 1]]
        self._contents = Contents()
        self._prompts: dict[str, int] = {}  # the tokens of each request's prompt
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=max(BLOCK, *self._sizes, 0),
        )
        self.seen: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._overlaps = overlaps
        self._drafts = drafts is not None
        self._names = iter(range(10**6))
        self._jobs: deque = deque()
        self._steps: deque = deque()

    def turn(self, *, is_last=False) -> dict[str, int]:
        """Makes a step, and returns how many tokens of each request it computes."""
        if not is_last:
            self._arrive_or_leave()
        output = self.scheduler.schedule()
        requests = [self.scheduler.requests[name] for name in output.num_scheduled_tokens]
        tokens = [[] if request.is_prefill_chunk else [7] for request in requests]
        for request, answered in zip(requests, tokens, strict=True):
            drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
            num_accepted = self._random.randrange(len(drafts) + 1) if 7 in drafts else 0
            answered += [7] * num_accepted
            ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            tables = [*zip(ids, self._sizes, strict=False)]
            self._contents.step(request, tables, len(drafts), num_accepted)
            self._note_drafts(request, drafts, num_accepted)
        self._begin(output.kv_connector_metadata)
        self._contents.check()
        self._steps.append((output, tokens))
        self.seen["preempted"] += sum(r.status is RequestStatus.PREEMPTED for r in self._alive())
        if len(self._steps) > self._overlaps:
            output, tokens = self._steps.popleft()
            names = list(output.num_scheduled_tokens)
            numbers = {name: number for number, name in enumerate(names)}
            ran = ModelRunnerOutput(names, numbers, tokens, kv_connector_output=self._outcome())
            self.scheduler.update_from_output(output, ran)
            if self._drafts:
                drafted = [[7] * self._random.randrange(NUM_DRAFTS + 1) for _ in names]
                self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))
        return output.num_scheduled_tokens

    def _note_drafts(self, request, drafts, num_accepted) -> None:
        self.seen["accepted draft"] += num_accepted
        self.seen["rejected draft"] += len(drafts) - num_accepted
        is_prompt = not request.num_output_tokens
        self.seen["draft behind a prompt"] += bool(is_prompt and drafts)

    def _alive(self):
        return [r for r in self.scheduler.requests.values() if not r.is_finished()]

    def _arrive_or_leave(self) -> None:
        chance, alive = self._random.random(), self._alive()
        if chance < 0.4 and len(alive) < 8:
            self.scheduler.add_request(self._request())
        elif chance < 0.44 and alive:
            left = self._random.choice(alive)
            self.seen[f"left as {left.status.name}"] += 1
            self.scheduler.finish_requests(left.request_id, RequestStatus.FINISHED_ABORTED)
        elif chance < 0.47:
            with contextlib.suppress(RuntimeError):  # a load or a save holds blocks
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            self.seen["reset"] += 1

    def _request(self) -> Request:
        shared = self._random.choice([0, 40, 128])
        own = [self._random.randrange(200, 250) for _ in range(self._random.randrange(1, 40))]
        asked = Handoff(HandoffId.new()).params()
        prefill = {"do_remote_decode": True}
        params = self._random.choice([None, None, prefill, asked, asked | prefill])
        sampling = SamplingParams(
            max_tokens=self._random.randrange(1, MAX_NEW),
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        return self.request_of([*SHARED[:shared], *own], sampling)

    def request_of(self, prompt, sampling) -> Request:
        """A request under a name of its own."""
        sampling.update_from_generation_config({}, 256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        name = f"r{next(self._names)}"
        self._prompts[name] = len(prompt)
        return Request(name, prompt, sampling, None, block_hasher=hasher)

    def let_jobs_end_at_once(self, reason=None) -> None:
        """Leaves nothing to chance: each job ends in the turn after, for this reason."""
        self._random = SimpleNamespace(choice=lambda reasons: reason, randrange=lambda end: 0)

    def _begin(self, metadata) -> None:
        for spec in metadata.loads:
            self.seen["load"] += 1
            self.seen["load of states"] += self._contents.begin(spec, self._states_in(spec)) > 0
            self._jobs.append([self._random.randrange(4), spec])
        for spec in metadata.saves:
            self.seen["save"] += 1
            is_answer = spec.plan.keys.num_tokens > self._prompts[spec.request_id]
            self.seen["save of an answer"] += is_answer
            self.seen["save of states"] += self._contents.begin(spec, self._states_in(spec)) > 0
            self._jobs.append([self._random.randrange(6), spec])

    def _states_in(self, spec):
        return spec.block_ids[: len(self._sizes)]

    def _is_loaded(self, spec, num_tokens) -> bool:
        """Returns whether a load has brought all its tokens, with their states."""
        if spec.plan is None or num_tokens < spec.plan.num_tokens:
            return False
        if (asked := self.scheduler.requests.get(spec.request_id)) is not None:
            self._contents.loaded(asked, self._states_in(spec))
        return True

    def _outcome(self) -> KVConnectorOutput:
        """What the jobs report that end now."""
        for job in self._jobs:
            job[0] -= 1
        ended = [spec for turns, spec in self._jobs if turns < 0]
        self._jobs = deque(job for job in self._jobs if job[0] >= 0)
        report, loaded, failed, bad = StepReport(), set(), set(), set()
        for spec in ended:
            direction = Direction.LOAD if spec.number is None else Direction.SAVE
            reason = self._random.choice([None, None, Reason.LOST])
            num_tokens = spec.plan.keys.num_tokens if spec.plan is not None else 0
            if reason is not None:
                self.seen[f"short {direction.value}"] += 1
                num_tokens = self._random.randrange(num_tokens + 1)
            if spec.plan is not None:
                end = JobEnd(spec.request_id, spec.number, direction, num_tokens, reason)
                report.ended.append(end)
            if direction is Direction.SAVE:
                report.released[spec.number] = 1
                self._contents.end(spec.number)
                continue
            loaded.add(spec.request_id)
            first = 0 if spec.plan is None else max(spec.plan.first_token, num_tokens)
            if self._is_loaded(spec, first):
                continue
            if self._sizes:  # vLLM takes no blocks of several KV groups
                failed.add(spec.request_id)
            else:
                bad |= {id for id in spec.block_ids[0][first // BLOCK :] if id != NO_BLOCK}
        return KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=report,
            invalid_block_ids=bad,
            **({"failed_recving": failed} if self._sizes else {}),  # not in vLLM before 0.30
        )


def drain(chance) -> None:
    """Makes steps until no request is left, and no save.

    Before vLLM 0.31 a request that has loaded its KV may wait behind one that lacks blocks, and
    nothing runs until a client leaves. From then on that one is first.
    """
    scheduler, moved_at = chance.scheduler, time.monotonic()
    while scheduler.requests or scheduler.connector.has_pending_push_work():
        if chance.turn(is_last=True):
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > STILL_S:
            assert not hasattr(scheduler, "kv_holding_waiting"), f"all wait: {scheduler.requests}"
            oldest = next(iter(scheduler.requests))
            scheduler.finish_requests(oldest, RequestStatus.FINISHED_ABORTED)
            moved_at = time.monotonic()
