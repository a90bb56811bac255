"""docs/add_engine.md: the adapter that the page walks through serves P and D."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.kv import eventually, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "add_engine.md"
PROMPT = list(range(1, 151))
IDS = list(range(3, 13))
MOST_LINES = 130


def source_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))


@pytest.fixture(scope="module")
def page():
    module = SimpleNamespace(__name__="page")
    exec(compile(source_of(PAGE), str(PAGE), "exec"), vars(module))
    return module


@pytest.fixture
def adapter_of(page, tmp_path, closed_after):
    """Makes an adapter of an engine with this role, whose KV cache is random."""

    def make(role):
        url = f"file://{tmp_path}/pool"
        settings = settings_of(store=url, role=role, weights="w", layer_ranges=1)
        caches = [torch.randn(32, 16, 2, 16) for _ in range(3)]
        adapter = page.Adapter(settings, caches, 2, 8, tmp_path)
        adapter.caches = caches
        return closed_after(adapter)

    return make


def looked_up(adapter, params=None):
    tracked = adapter.begin("r", PROMPT, params)
    eventually(lambda: adapter.is_looked_up(tracked))
    return tracked


def prefill(adapter, *stops):
    """Computes the prompt in parts; returns the kv_transfer_params of the answer."""
    tracked, start = looked_up(adapter, {"do_remote_decode": True}), 0
    for stop in stops:
        save = adapter.begin_step(tracked, start, stop, IDS)
        if save is not None:
            save.layers_done(3)
        start = stop
    answer = adapter.end(tracked)
    eventually(lambda: adapter.may_free(tracked))
    return answer


def test_d_has_all_of_what_p_computed_but_the_last_token(adapter_of):
    p, d = adapter_of("prefill"), adapter_of("decode")
    params = prefill(p, 100, 150)
    tracked = looked_up(d, params)
    new_ids = list(range(20, 30))
    d.load(tracked, new_ids)
    assert eventually(lambda: d.num_loaded(tracked)) == len(PROMPT) - 1
    for ours, theirs in zip(d.caches, p.caches, strict=True):
        same = ours[new_ids].flatten(0, 1) == theirs[IDS].flatten(0, 1)
        assert same[: len(PROMPT)].all()
    d.end(tracked)
    [record] = d.reporting.journal.last()
    assert (record.num_loaded, record.reason) == (len(PROMPT) - 1, None)


def test_a_prefill_that_was_cut_short_is_no_hand_off(adapter_of):
    assert prefill(adapter_of("prefill"), 100) == {}


def test_a_fault_of_pdstore_costs_hits_only(page, adapter_of):
    d = adapter_of("decode")
    d.cache.keys = None
    assert page.degrading(d.begin, "r", PROMPT) is None


def test_the_adapter_stays_small_enough_to_read():
    assert len([line for line in source_of(PAGE).splitlines() if line.strip()]) <= MOST_LINES
