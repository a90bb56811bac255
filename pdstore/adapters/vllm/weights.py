"""Weights that are written in place: a worker notices it, and the scheduler names KV anew.

vLLM tells a connector nothing of such writes. `WeightsWatch` observes vLLM's own methods that write
weights, and the version counters and addresses of the weights' tensors. When these tell of a write,
and when the scheduler asks, it makes a digest of all weights and compares it with the first one.
"""

# Decision: docs/decisions/043-weights-in-place.md
from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from pdstore.adapters.vllm.messages import RankWeights
from pdstore.format.keys import HASH_BYTES, length_prefixed
from pdstore.threads import call_or

log = logging.getLogger("vllm.pdstore")

_WRITERS = (
    *("reload_weights", "update_weights", "start_weight_update", "start_draft_weight_update"),
    *("finish_weight_update", "load_weights", "load_model", "apply_model", "wake_up"),
)
"""Methods of vLLM's worker, runner and models that may write weights."""
_SLICES = 512
_BEGUN = RankWeights()


class WeightsWatch:
    """Notices on one rank that weights were written. Only vLLM's worker thread calls it.

    models: the models whose weights decide the KV.
    owners: vLLM's objects whose methods may write weights; they are observed from now on.
    moves_experts: True if vLLM moves experts between ranks as it runs; they are left out then.

    state: what the scheduler has to know of this rank's weights.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        owners: Iterable[object] = (),
        *,
        moves_experts: bool = False,
    ) -> None:
        self.state = _BEGUN
        self._models = models
        self._moves_experts = moves_experts
        self._is_written = False
        self._counted: list[torch.Tensor] = []
        self._first = self._read()
        self._counts = self._count()
        for owner in (*owners, *models):
            self._observe(
                owner, [name for name in _WRITERS if callable(getattr(owner, name, None))]
            )

    @classmethod
    def of_caller(cls, vllm_config: Any) -> WeightsWatch:
        """Returns a watch of the vLLM worker that is among this call's callers.

        vLLM gives a connector neither its worker nor its model, so they are looked for on the call
        stack. If no caller has a model, it logs a warning, and the watch notices nothing.
        """
        owners = list(_owners())
        models: list[torch.nn.Module] = []
        for owner in owners:
            drafts = (getattr(owner, name, None) for name in ("drafter", "speculator"))
            for each in (owner, *drafts):
                model = _model_of(each)
                if model is not None and all(model is not known for known in models):
                    models.append(model)
        if not models:
            log.warning(
                "pdstore cannot watch the weights of this vLLM: after weights are written in place,"
                " restart the instance with another PDSTORE_WEIGHTS"
            )
        watch = cls(
            models,
            owners,
            moves_experts=bool(getattr(vllm_config.parallel_config, "enable_eplb", False)),
        )
        extension = getattr(vllm_config.parallel_config, "worker_extension_cls", "")
        for owner in owners:
            watch._observe(owner, _methods_of_extension(owner, extension))
        return watch

    def check(self, step: int, asked: int, *, counts: bool) -> RankWeights | None:
        """Notices writes since the last call; call it before a step runs.

        step: the step's number. asked: the number of the scheduler's last question.
        counts: True to look at the version counters and addresses too, which takes 0.3 ms for
          1,000 tensors on a slow core.
        Returns the rank's state if it has changed or was asked for, else None.
        """
        is_asked = asked > self.state.answered
        is_written = self._is_written or (counts and self._count() != self._counts)
        if not (is_asked or is_written):
            return None
        self._is_written = False
        digest = self._read()
        digest = b"" if digest == self._first else digest
        self._counts = self._count()
        generation, since = self.state.generation, self.state.since
        if is_written or digest != self.state.digest:
            generation, since = generation + 1, step
        self.state = RankWeights(generation, digest, since, max(asked, self.state.answered))
        return self.state

    def _read(self) -> bytes:
        """Returns a digest of all weights; if they cannot be read, a digest that none shares."""
        return call_or(self._read_all, os.urandom(HASH_BYTES))

    def _read_all(self) -> bytes:
        tensors = dict(_weights(self._models, self._moves_experts))
        self._counted = [each for each in tensors.values() if not each.is_inference()]
        return digest_of(tensors)

    def _count(self) -> list[int]:
        # else vLLM's parameters run Python code at each of these reads, 1 ms for 426 of them
        with DisableTorchFunctionSubclass():
            versions = map(attrgetter("_version"), self._counted)
            return [*versions, *map(torch.Tensor.data_ptr, self._counted)]

    def _observe(self, owner: object, names: Iterable[str]) -> None:
        for name in names:
            setattr(owner, name, self._observed(getattr(owner, name)))

    def _observed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def observed(*args: Any, **kwargs: Any) -> Any:
            self._is_written = True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_written = True  # a step may have run meanwhile

        return observed


def digest_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Returns a digest of tensors and their names; equal bits give equal digests.

    Each byte of each tensor is in one of the sums that are hashed. The tensor's own device adds
    them up, at about the speed of its memory; the caller waits once for each device.
    """
    digest = hashlib.sha256()
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        sums.setdefault(tensor.device, []).append(_sums(tensor.detach()))
    for device in sorted(sums, key=str):
        digest.update(torch.cat(sums[device]).cpu().numpy().tobytes())
    return digest.digest()[:HASH_BYTES]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns, as bytes, the sums of 512 slices of a tensor's 64-bit words, and what is left."""
    is_dense = tensor.numel() == 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if not is_dense:
        tensor = tensor.contiguous()
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    end = data.numel() - data.numel() % (8 * _SLICES)
    whole = data[:end]
    if (whole.storage_offset() | whole.data_ptr()) % 8:
        whole = whole.clone()
    sums = whole.view(torch.int64).view(_SLICES, -1).sum(1)  # modulo 2 ** 64
    return torch.cat([sums.view(torch.uint8), data[end:]])


def _weights(
    models: Sequence[torch.nn.Module], moves_experts: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the models' parameters and persistent buffers: others may change as a model runs."""
    for number, model in enumerate(models):
        for name, value in model.state_dict(keep_vars=True).items():
            is_moved = moves_experts and "experts" in name
            if isinstance(value, torch.Tensor) and not (value.is_meta or is_moved):
                yield f"{number}.{name}".replace(".base_layer.", "."), value


def _owners() -> Iterator[Any]:
    """Yields vLLM's runner and worker: the objects among the callers that have a model."""
    frame = inspect.currentframe()
    seen: set[int] = set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if id(owner) not in seen and (hasattr(owner, "model_runner") or _model_of(owner)):
            seen.add(id(owner))
            yield owner
        frame = frame.f_back


def _model_of(owner: Any) -> torch.nn.Module | None:
    """Returns the model of a runner or of a proposer of drafts; None if it has none."""
    if isinstance(owner, torch.nn.Module):
        return None
    get_model = getattr(owner, "get_model", None)
    model = get_model() if callable(get_model) else getattr(owner, "model", None)
    return model if isinstance(model, torch.nn.Module) else None


def _methods_of_extension(owner: object, extension: str) -> list[str]:
    """Returns the names of the methods that an operator's own class has added to the worker."""
    return [
        name
        for base in type(owner).__mro__
        if extension and f"{base.__module__}.{base.__qualname__}" == extension
        for name, value in vars(base).items()
        if callable(value) and not name.startswith("__")
    ]


@dataclass(eq=False)
class KnownWeights:
    """Knowledge of the scheduler about all ranks' weights. Only the scheduler's thread calls it.

    digest: of all ranks' weights; empty while they are those with which the instance began.
    generations: by rank, how often its weights were written, as far as it has told.
    is_known: False while a rank must still tell its digest; then no request may use the pool.
    is_cache_stale: True if vLLM's own cache may hold KV of earlier weights.
    question: the number of the last question to the ranks.
    """

    num_ranks: int
    digest: bytes = b""
    generations: Mapping[int, int] = field(default_factory=dict)
    is_known: bool = True
    is_cache_stale: bool = False
    question: int = 0

    def __post_init__(self) -> None:
        self._reports: dict[int, RankWeights] = {}
        self._num_steps = 0
        self._first_step: int | None = None  # the first that computed KV since the last reset

    def number_step(self, *, computes: bool) -> int:
        """Returns the number of a new step. computes: whether it computes KV."""
        self._num_steps += 1
        if computes and self._first_step is None:
            self._first_step = self._num_steps
        return self._num_steps

    def reset(self, *, is_cache_empty: bool) -> None:
        """Asks all ranks for their digests, because vLLM was told to reset its caches."""
        self.question += 1
        if is_cache_empty:
            self.is_cache_stale = False
            self._first_step = None

    def add_reports(self, reports: Mapping[int, RankWeights]) -> bool:
        """Takes the states that ranks have told; returns whether weights were written."""
        before = {rank: self._reports.get(rank, _BEGUN).generation for rank in reports}
        since = [new.since for rank, new in reports.items() if new.generation != before[rank]]
        self._reports.update(reports)
        has_all = len(reports) >= self.num_ranks
        if since:
            self.is_cache_stale |= self._first_step is not None and self._first_step < max(since)
            self.generations = {rank: each.generation for rank, each in self._reports.items()}
            self.question += not has_all
        answers = [each.answered >= self.question for each in self._reports.values()]
        if since or not self.is_known:
            self.is_known = has_all or (len(answers) == self.num_ranks and all(answers))
            self.digest = self._combined()
        return bool(since)

    def _combined(self) -> bytes:
        digests = [self._reports[rank].digest for rank in sorted(self._reports)]
        if not any(digests):
            return b""
        return hashlib.sha256(b"".join(map(length_prefixed, digests))).digest()[:HASH_BYTES]
