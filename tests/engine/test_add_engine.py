"""docs/add_engine.md: a small engine around the adapter that the page walks through serves P and D.

The page's code blocks run as they stand, so what an engine built from the page forgets, shows here.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdstore import HandoffId
from pdstore.format.handoff import Handoff
from pdstore.store.arena.store import ArenaStore
from tests.support.kv import eventually, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "add_engine.md"
PROMPT = list(range(1, 151))
OTHER = list(range(500, 650))
CHUNK = 70
LAYERS, BLOCKS, HEADS, HEAD_DIM = 3, 32, 2, 8
MAX_LINES = 130


def source_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))


@pytest.fixture(scope="module")
def page():
    module = SimpleNamespace(__name__="page")
    exec(compile(source_of(PAGE), str(PAGE), "exec"), vars(module))
    return module


class SmallEngine:
    """An engine with a paged cache. A token's KV is a number of its own in each layer.

    It calls the page's adapter where an engine would, and only through `degrading`.
    num_computed: how many tokens it has computed.
    """

    def __init__(self, page, settings, path):
        self.block_tokens = page.BLOCK
        shape = BLOCKS, page.BLOCK, HEADS, 2 * HEAD_DIM
        self.caches = [torch.full(shape, -1.0) for _ in range(LAYERS)]
        self.adapter = page.Adapter(settings, self.caches, HEADS, HEAD_DIM, path)
        self.num_computed = 0
        self._free = list(range(BLOCKS))
        self._call = page.degrading

    def arrive(self, prompt, params=None):
        tracked = self._call(self.adapter.begin, "r", prompt, params)
        num_blocks = -(-len(prompt) // self.block_tokens)
        blocks = [self._free.pop(number % len(self._free)) for number in range(num_blocks)]
        return SimpleNamespace(prompt=prompt, tracked=tracked, blocks=blocks, num_done=0)

    def load(self, request):
        """Looks the prompt up, loads what is found, and waits for it."""
        if request.tracked is not None:
            eventually(lambda: self._call(self.adapter.is_looked_up, request.tracked))
            self._call(self.adapter.load, request.tracked, request.blocks)
            eventually(lambda: not request.tracked.state.is_loading)
            request.num_done = self._call(self.adapter.num_loaded, request.tracked) or 0

    def step(self, request):
        """Computes the next tokens of a prompt, layer by layer."""
        start, stop = request.num_done, min(request.num_done + CHUNK, len(request.prompt))
        save = None
        if request.tracked is not None:
            begin = self.adapter.begin_step
            save = self._call(begin, request.tracked, start, stop, request.blocks)
        for layer, cache in enumerate(self.caches):
            for i in range(start, stop):
                block, row = request.blocks[i // self.block_tokens], i % self.block_tokens
                cache[block, row] = 1000.0 * layer + request.prompt[i]
            if save is not None:
                save.layers_done(layer + 1)
        self.num_computed += stop - start
        request.num_done = stop

    def end(self, request):
        """Returns the answer: a sum of all KV of the prompt, and the `kv_transfer_params`."""
        kv = [cache[request.blocks].flatten(0, 1)[: request.num_done] for cache in self.caches]
        answer, params = sum(float(each.sum()) for each in kv), None
        if request.tracked is not None:
            params = self._call(self.adapter.end, request.tracked)
            eventually(lambda: self.adapter.may_free(request.tracked))
        self._free += request.blocks
        return answer, params

    def serve(self, prompt, params=None):
        request = self.arrive(prompt, params)
        self.load(request)
        while request.num_done < len(prompt):
            self.step(request)
        return self.end(request)

    def close(self):
        self.adapter.close()


@pytest.fixture
def engine_of(page, tmp_path, closed_after):
    """Makes an engine with this role. PDSTORE_STORE is a directory, or shared memory."""

    def make(role, url=f"file://{tmp_path}/pool"):
        settings = settings_of(store=url, role=role, weights="w", layer_ranges=1)
        return closed_after(SmallEngine(page, settings, tmp_path))

    return make


@pytest.fixture
def arena(tmp_path):
    return f"shm://page?size=8MiB&dir={tmp_path}&lease=600"


def test_d_answers_as_p_would_and_computes_one_token(engine_of):
    p, d = engine_of("prefill"), engine_of("decode")
    for prompt in (PROMPT, OTHER, PROMPT[:1]):
        answer, params = p.serve(prompt)
        d.num_computed = 0
        assert d.serve(prompt, params)[0] == answer
        assert d.num_computed == 1
        record = d.adapter.reporting.journal.last()[-1]
        assert (record.num_loaded, record.reason) == (len(prompt) - 1, None)


def test_a_prompts_first_part_comes_from_the_pool_and_is_saved_once(engine_of):
    p, other = engine_of("both"), engine_of("both")
    p.serve(PROMPT)
    p.adapter.pool.flush(10)
    answer = p.serve([*PROMPT[:128], *OTHER])[0]
    p.adapter.pool.flush(10)
    assert other.serve([*PROMPT[:128], *OTHER])[0] == answer
    assert (p.num_computed, other.num_computed) == (len(PROMPT) + len(OTHER), 128 + 150 - 256)


def test_d_that_is_asked_with_p_loads_while_p_computes(engine_of):
    p, d = engine_of("prefill"), engine_of("decode")
    asked = Handoff(HandoffId.new()).params()
    at_p, at_d = p.arrive(PROMPT, asked), d.arrive(PROMPT, asked)
    p.load(at_p)
    p.step(at_p)
    eventually(lambda: d.adapter.is_looked_up(at_d.tracked))
    assert at_d.tracked.state.found.follow is not None, "P has announced the hand-off"
    while at_p.num_done < len(PROMPT):
        p.step(at_p)
    d.load(at_d)
    d.step(at_d)
    assert d.end(at_d)[0] == p.end(at_p)[0]
    assert d.num_computed == 1


def test_each_save_tells_the_store_what_is_new_of_its_prompt(engine_of, arena, monkeypatch):
    """So what D has read since is not leased again, and the admission counts one use a prompt."""
    firsts, renew = [], ArenaStore.renew

    def spy(store, keys, first, since):
        firsts.append((first, since > 0.0))
        return renew(store, keys, first, since)

    monkeypatch.setattr(ArenaStore, "renew", spy)
    p = engine_of("prefill", arena)
    p.serve(PROMPT)
    assert firsts, "the hand-off's blocks were leased as those of no known prompt"
    assert set(firsts) == {(0, True)}


def test_a_prefill_that_was_cut_short_is_no_hand_off(engine_of):
    p = engine_of("prefill")
    request = p.arrive(PROMPT)
    p.load(request)
    p.step(request)
    assert p.end(request)[1] == {}


def test_a_fault_of_pdstore_costs_hits_only(engine_of):
    p, d = engine_of("prefill"), engine_of("decode")
    answer, params = p.serve(PROMPT)
    d.adapter.cache.keys = None
    assert d.serve(PROMPT, params) == (answer, None)
    assert d.num_computed == len(PROMPT)


def test_the_adapter_stays_small_enough_to_read():
    assert len([line for line in source_of(PAGE).splitlines() if line.strip()]) <= MAX_LINES
