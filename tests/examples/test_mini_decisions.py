"""Load or compute: the mini engine follows PDSTORE_LOAD, and its answer says what was decided."""

from __future__ import annotations

import pytest

from examples.mini_engine.answer import Answer
from examples.mini_engine.protocol import Body
from tests.support.mini_engine_kit import PULL, ask, prompt_of

SLOW = "bytes_per_s=100KB&error_rate=0&miss_rate=0&corrupt_rate=0"
TOKENS = 200  # 100 KB of KV: a second of that store, and a few hundredths of computing


@pytest.fixture
def open_instance(open_engine):
    def open_one(role, url, load="always"):
        pd = {
            "pd_transfer_via_storage": True,
            "role": role,
            "store": url,
            "staging": "8MiB",
            "deadline_s": 30.0,
            "load": load,
        }
        return open_engine("llama", pd)

    return open_one


def decode(p, d, first):
    """Hands a prompt from P to D and returns both answers' requests."""
    prompt = [first, *prompt_of(TOKENS)[1:]]
    params = ask(p, prompt, max_tokens=1, kv_transfer_params=PULL).wait().request.answer_params
    alone = ask(p, prompt).wait()
    decoded = ask(d, prompt, kv_transfer_params=params).wait()
    assert decoded.request.output_ids == alone.request.output_ids
    return decoded.request


@pytest.mark.parametrize(("load", "way"), [("always", "load"), ("never", "compute")])
def test_always_loads_and_never_computes(open_instance, load, way):
    p = open_instance("prefill", f"memory://decide-{load}")
    d = open_instance("decode", f"memory://decide-{load}", load)
    request = decode(p, d, 1)
    assert request.num_loaded == (TOKENS - 1 if way == "load" else 0)
    if load == "always":
        assert request.decided == {}, "nothing was compared"
    else:
        assert request.decided["decision"] == way


def test_auto_computes_once_it_knows_that_the_store_is_slow(open_instance):
    p = open_instance("prefill", "memory://decide-slow")
    d = open_instance("decode", f"faulty+memory://decide-slow?{SLOW}", "auto")
    requests = [decode(p, d, first) for first in range(1, 7)]
    said = [request.decided for request in requests]
    assert [each["decision"] for each in said][:3] == ["load", "load", "both"]
    last = requests[-1]
    assert (said[-1]["decision"], last.num_loaded) == ("compute", 0)
    answer = Answer(d.model.tokenizer, "m", Body(prompt=last.prompt), last).end("length")[-1]
    told = answer.usage.pdstore
    assert told["decision"] == "compute"
    value = d.counters.registry.get_sample_value
    assert value("pdstore_decisions_total", {"way": "compute"}) >= 1
