"""WeightsWatch notices writes by itself; KnownWeights waits until all ranks have told of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdstore.adapters.vllm.messages import RankWeights
from pdstore.adapters.vllm.weights import KnownWeights, WeightsWatch, digest_of

WRITES = {
    "an operation in place": lambda model: model.first.weight.add_(1),
    "other data": lambda model: setattr(model.first.weight, "data", torch.ones(2_100, 8)),
    "one element, by a method of vLLM": lambda model: model.load_weights([(7, 3)]),
    "a buffer, by a method of vLLM": lambda model: model.load_weights([]),
}


class Model(torch.nn.Module):
    """A parameter of several rows of sums, a small one, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(8, 2_100)
        self.first.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("counter", torch.zeros(1), persistent=False)

    def load_weights(self, places) -> None:
        for row, column in places:
            self.first.weight.data[row, column] = 5.0
        if not places:
            self.scale.data.fill_(2.0)


def check(watch, step=1, asked=0, counts=True):
    return watch.check(step, asked, counts=counts)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_noticed_once_with_a_digest_that_tells_what_is_there_now(write):
    model, other = Model(), Model()
    watch, alike = WeightsWatch([model]), WeightsWatch([other])
    assert check(watch) is None
    write(model)
    told = check(watch, step=4)
    assert (told.generation, told.since, len(told.digest)) == (1, 4, 16)
    assert check(watch, step=5) is None
    write(other)
    assert check(alike).digest == told.digest, "updated alike"
    model.load_state_dict(Model().state_dict())
    assert check(watch, step=6) == RankWeights(2, b"", 6), "the first weights again"


def test_a_step_runs_no_python_code_of_the_weights():
    calls = []

    class Weight(torch.nn.Parameter):
        """It runs Python code for each use, as vLLM's own parameters do."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Model()
    model.first.weight = Weight(model.first.weight.data, requires_grad=False)
    watch = WeightsWatch([model])
    calls.clear()
    assert check(watch) is None
    assert calls == []
    model.first.weight.add_(1)
    assert check(watch).generation == 1


def test_a_write_that_nothing_tells_of_is_noticed_when_the_scheduler_asks():
    model = Model()
    watch = WeightsWatch([model])
    model.counter.add_(1)
    assert check(watch, asked=1) == RankWeights(answered=1), "no weights: they change in any step"
    model.first.weight.data.mul_(2)
    assert check(watch, step=2, asked=1) is None
    told = check(watch, step=3, asked=2)
    assert (told.generation, bool(told.digest), told.answered) == (1, True, 2)


def test_a_write_by_a_worker_is_noticed_in_a_step_that_moves_nothing():
    model = Model()
    runner = SimpleNamespace(reload_weights=lambda: model.load_weights([(0, 0)]))
    watch = WeightsWatch([model], [runner])
    runner.reload_weights()
    assert check(watch, counts=False).generation == 1


def test_weights_that_cannot_be_read_share_their_name_with_none(monkeypatch):
    model = Model()
    watch = WeightsWatch([model])
    monkeypatch.setattr("pdstore.adapters.vllm.weights.digest_of", lambda _: 1 / 0)
    digests = {check(watch, asked=asked).digest for asked in (1, 2)}
    assert len(digests - {b""}) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(3,), (), (0, 4), (33, 129)])
def test_each_byte_counts_whatever_the_type_and_shape(dtype, shape):
    tensor = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    before = digest_of({"w": tensor})
    assert digest_of({"w": tensor.clone()}) == before
    assert digest_of({"v": tensor}) != before
    if tensor.numel():
        tensor.view(-1)[-1] = 1
        assert digest_of({"w": tensor}) != before


def test_views_are_read_where_they_lie():
    whole = torch.arange(4_000).view(40, 100)
    before = digest_of({"t": whole.t(), "part": whole[:, 3:7]})
    assert before == digest_of({"t": whole.clone().t(), "part": whole[:, 3:7].contiguous()})
    whole[39, 5] += 1
    assert digest_of({"part": whole[:, 3:7]}) != digest_of({"part": whole[:, 4:8]})


NEW = RankWeights(1, b"new", since=3)


def test_all_ranks_must_have_told_before_there_is_a_name():
    weights = KnownWeights(2)
    assert not weights.add_reports({0: RankWeights(answered=0)})
    assert weights.add_reports({0: NEW})
    assert not weights.is_known
    assert weights.question == 1, "the other rank may not have noticed"
    assert not weights.add_reports({1: RankWeights(answered=1)})
    assert not weights.is_known
    assert not weights.add_reports({0: NEW._replace(answered=1)})
    assert weights.is_known
    alike = KnownWeights(2)
    assert alike.add_reports({1: RankWeights(), 0: NEW})
    assert alike.is_known
    assert alike.digest == weights.digest != b""
    swapped = KnownWeights(2)
    swapped.add_reports({0: RankWeights(), 1: NEW})
    assert swapped.digest != alike.digest
    alike.add_reports({0: RankWeights(2, b"", 9), 1: RankWeights()})
    assert (alike.digest, alike.is_known, alike.generations) == (b"", True, {0: 2, 1: 0})


@pytest.mark.parametrize(
    ("computed_before", "reset_before", "stale"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["no reset", "reset before", "nothing computed before"],
)
def test_vllms_own_cache_is_stale_unless_it_was_reset(computed_before, reset_before, stale):
    weights = KnownWeights(1)
    weights.number_step(computes=computed_before)
    if reset_before:
        weights.reset(is_cache_empty=True)
    step = weights.number_step(computes=True)
    weights.add_reports({0: RankWeights(1, b"new", since=step)})
    assert weights.is_cache_stale == stale
    weights.reset(is_cache_empty=False)
    assert weights.is_cache_stale == stale, "running requests kept their blocks"
    weights.reset(is_cache_empty=True)
    assert not weights.is_cache_stale
