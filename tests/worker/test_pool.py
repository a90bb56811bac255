"""KVPool: what comes back, what is refused, and when it is ready."""

from __future__ import annotations

import contextlib
import logging
import threading
from array import array

import pytest
import torch

from pdstore import Layout
from pdstore.errors import LayoutError, Reason, SaveFailed, StoreFull, SwapError
from pdstore.format.keys import Part
from pdstore.format.plan import SavePlan
from pdstore.store import open_store
from pdstore.store.transfer import Split
from pdstore.store.wrappers import WrapperStore
from pdstore.worker.pool import record_caller_event
from pdstore.worker.swap.base import TorchSwap
from tests.support.kv import LAYERS, POISON, Instance, caches_of, settings_of
from tests.support.pool_kit import D_BLOCKS, P_BLOCKS, assert_loaded, load, save


@pytest.mark.parametrize("num_tokens", [1, 5, 15, 16, 17, 63, 64, 65, 128, 200, 320])
def test_d_has_what_p_saved_whatever_the_length(p, d, num_tokens):
    assert save(p, range(num_tokens)).num_tokens == num_tokens
    assert load(d, range(num_tokens)).num_tokens == num_tokens
    assert_loaded(p, d, num_tokens)


@pytest.mark.parametrize("first_token", [16, 48, 64, 80, 192])
def test_a_load_leaves_the_blocks_before_its_first_token_alone(p, d, first_token):
    save(p, range(200))
    assert load(d, range(200), first_token=first_token).num_tokens == 200
    assert_loaded(p, d, 200, first_token)


def test_p_and_d_may_have_other_engine_blocks(instance, p):
    d = instance(fill=POISON, engine_block_tokens=32)
    save(p, range(200))
    found = d.cache.match(d.cache.keys(range(200)))
    assert d.pool.load(found.keys, list(range(7))).wait(10).num_tokens == 200
    assert torch.equal(d.tokens(range(7))[:200], p.tokens(P_BLOCKS)[:200])


@pytest.mark.requirement(
    "R-AR-8, R9, R21", "all ranks use the same number of tokens, the smallest that any rank has"
)
@pytest.mark.parametrize("missing", [0, 1])
def test_ranks_load_the_tokens_that_all_of_them_have_and_none_behind(instance, store, missing):
    p = instance(kv_shards=2)
    save(p, range(200))
    keys = p.cache.keys(range(200))
    store.remove(keys.store_keys([Part(0, missing)])[1:2])
    found = p.cache.match(keys)
    assert (found.num_tokens, found.reason) == (64, Reason.ABSENT)
    for number in range(2):
        d = instance(kv_shards=2, rank=(number, 2), fill=POISON)
        assert d.pool.load(found.keys, D_BLOCKS).wait(10).num_tokens == 64
        got = d.tokens(D_BLOCKS)
        assert torch.equal(got[:64], p.tokens(P_BLOCKS)[:64, number : number + 1])
        assert (got[64:] == POISON).all()


def test_the_callers_lists_may_change_after_the_call(p, d):
    keys, ids = p.cache.keys(range(100)), list(P_BLOCKS)
    job = p.pool.save(keys, ids)
    ids[:] = [0] * len(ids)
    keys.extend(range(100))
    assert job.wait(10).num_tokens == 100
    assert load(d, range(100)).num_tokens == 100
    assert_loaded(p, d, 100)


def test_another_namespace_never_hits(instance, p):
    save(p, range(100))
    for changes in ({"weights": "v"}, {"salt": "s"}, {"block_tokens": 32}):
        other = instance(fill=POISON, **changes)
        found = other.cache.match(other.cache.keys(range(100)))
        assert (found.num_tokens, found.reason) == (0, Reason.ABSENT)


def test_a_request_with_its_own_salt_or_adapter_never_hits_another(p, d):
    save(p, range(100))
    for own in ({"cache_salt": b"a"}, {"lora": b"b"}):
        assert d.cache.match(d.cache.keys(range(100), **own)).num_tokens == 0


def test_a_read_only_instance_saves_nothing(store, instance):
    p = instance(publish=False)
    result = save(p, range(100))
    assert (result.num_tokens, result.reason) == (0, Reason.READ_ONLY)
    assert store.match(p.cache.keys(range(100)).store_keys(p.layout.parts)) == 0


@pytest.mark.requirement("R-AW-18, R27", "block ids are copied and checked before anything moves")
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"block_ids": [0, 1]}, "need 7 engine blocks"),
        ({"block_ids": [0, 1, 2, 3, 4, 5, 64]}, "not all in the cache"),
        ({"block_ids": [-1, 1, 2, 3, 4, 5, 6]}, "not all in the cache"),
        ({"first_token": 101}, "outside 100 tokens"),
        ({"first_token": -1}, "outside"),
    ],
)
@pytest.mark.parametrize("verb", ["save", "load"])
def test_arguments_that_do_not_fit_are_refused_before_anything_moves(p, verb, arguments, word):
    keys = p.cache.keys(range(100))
    with pytest.raises(LayoutError, match=word):
        getattr(p.pool, verb)(keys, **{"block_ids": P_BLOCKS, **arguments})
    assert p.pool.num_jobs == 0


def test_a_load_from_inside_an_engine_block_is_refused(d):
    with pytest.raises(LayoutError, match="multiple of 16"):
        d.pool.load(d.cache.keys(range(100)), D_BLOCKS, first_token=17)


def test_keys_of_another_namespace_are_refused(p, instance):
    other = instance(weights="v")
    with pytest.raises(LayoutError, match="another namespace"):
        p.pool.save(other.cache.keys(range(10)), P_BLOCKS)


ID_FORMS = {
    "iterator": iter,
    "array": lambda ids: array("q", ids),
    "tensor": torch.tensor,
    "iterator of tensors": lambda ids: (torch.tensor(id) for id in ids),
    "table of an iterator": lambda ids: iter([iter(ids)]),
}


@pytest.mark.parametrize("form", ID_FORMS)
@pytest.mark.parametrize("verb", ["save", "load"])
def test_block_ids_may_come_in_any_form_that_holds_ints(p, d, verb, form):
    """The first id of an iterator was once eaten: other blocks went under the right keys."""
    keys, ids = p.cache.keys(range(200)), {"save": P_BLOCKS, "load": D_BLOCKS}
    given = {**ids, verb: ID_FORMS[form](ids[verb])}
    assert p.pool.save(keys, given["save"]).wait(10).num_tokens == 200
    assert d.pool.load(keys, given["load"]).wait(10).num_tokens == 200
    assert_loaded(p, d, 200)


@pytest.mark.parametrize(
    ("empty", "more"),
    [
        ([], ""),
        (
            ["PDSTORE_SALT", "PDSTORE_ROLE", "PDSTORE_WEIGHTS"],
            "; empty, so as if not set: PDSTORE_WEIGHTS, PDSTORE_SALT",  # the role is an argument
        ),
    ],
)
def test_a_pool_says_with_what_it_starts_and_what_is_empty(caplog, monkeypatch, empty, more):
    for name in empty:
        monkeypatch.setenv(name, "")
    caplog.set_level(logging.INFO)
    store = open_store("memory://", settings_of())
    instance = Instance(store, role="prefill", staging="8MiB", native="off")
    instance.close()
    store.close()
    line = next(r.getMessage() for r in caplog.records if "block copies by" in r.getMessage())
    assert line == (
        f"pool memory://, namespace {instance.cache.namespace.hex}, role prefill,"
        f" block copies by TORCH, 7 MiB of host memory, {Split().num_workers} workers{more}"
    )


def a_swap(device="cpu"):
    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=16, rope="")
    return TorchSwap(layout, [cache.to(device) for cache in caches_of(layout)])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_stream_under_capture_is_refused():
    swap, x = a_swap("cuda:0"), torch.zeros(8, device="cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        with pytest.raises(SwapError, match="captured"):
            record_caller_event(swap)


class GatedRegistrar:
    """Registers nothing until the gate opens; then all of it, or it fails."""

    def __init__(self, error=None):
        self.gate, self._error = threading.Event(), error

    def populate(self, address, num_bytes):
        pass

    def register(self, address, num_bytes):
        assert self.gate.wait(30)
        if self._error is not None:
            raise self._error

    def unregister(self, address):
        pass


@pytest.fixture(params=["store", "arena"])
def gated(request, monkeypatch):
    """Opens an instance whose memory a registrar pins; returns both."""
    over = request.getfixturevalue(request.param)  # closed after the instance
    instance = request.getfixturevalue("instance")

    def open_gated(error=None):
        registrar = GatedRegistrar(error)
        monkeypatch.setattr(TorchSwap, "registrar", registrar)
        return instance(over=over, native="off"), registrar

    return open_gated


@pytest.mark.requirement(
    "R-AW-19",
    "a request that comes before the start is over takes the documented path",
    note="the request waits within its deadline",
)
def test_a_pool_opens_at_once_and_its_jobs_wait_for_pinned_memory(gated):
    p, registrar = gated()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    with pytest.raises(TimeoutError, match="pinned to 0 %"):
        p.pool.ready(0.1)
    assert not job.captured
    registrar.gate.set()
    p.pool.ready()
    assert job.wait(30).num_tokens == 200
    assert load(p, range(200)).num_tokens == 200


def test_memory_that_cannot_be_pinned_fails_ready_and_the_jobs(gated):
    p, registrar = gated(SwapError("no memory to pin"))
    registrar.gate.set()
    with pytest.raises(SwapError, match="to pin"):
        p.pool.ready()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    assert isinstance(job.wait(30).error, SwapError)


def test_a_job_that_waits_for_pinned_memory_can_be_cancelled(gated):
    p, registrar = gated()
    job = p.pool.save(p.cache.keys(range(200)), P_BLOCKS)
    job.cancel()
    assert job.wait(30).num_tokens == 0
    registrar.gate.set()


def test_after_a_flush_every_save_is_durable(p):
    jobs = [p.pool.save(p.cache.keys(range(n, n + 100)), P_BLOCKS) for n in range(8)]
    p.pool.flush(30)
    assert all(job.durable for job in jobs)


def test_a_flush_raises_the_first_error_once(instance, store):
    class Full(WrapperStore):
        def put(self, keys, slots):
            raise StoreFull("no room")

    p = instance(over=Full(store))
    save(p, range(100))
    with pytest.raises(SaveFailed, match="store_full") as caught:
        p.pool.flush(30)
    assert isinstance(caught.value.__cause__, StoreFull)
    p.pool.flush(30)


@pytest.mark.parametrize(
    ("reason", "is_failure"),
    [("cancelled", False), ("not_admitted", False), ("closed", True), ("read_only", True)],
)
def test_a_flush_fails_unless_a_save_was_not_wanted_or_not_worth_it(p, reason, is_failure):
    begun = p.pool.begin_save(SavePlan(p.cache.keys(range(100))), P_BLOCKS)
    begun.job.end_with(Reason(reason))
    with pytest.raises(SaveFailed, match=reason) if is_failure else contextlib.nullcontext():
        p.pool.flush(30)


def test_a_flush_waits_for_a_save_whose_layers_are_not_released(p):
    opened = p.pool.begin_save(SavePlan(p.cache.keys(range(100))), D_BLOCKS)
    with pytest.raises(TimeoutError):
        p.pool.flush(0.05)
    opened.layers_done(len(p.layout.held_layers))
    p.pool.flush(30)
    assert opened.job.durable
