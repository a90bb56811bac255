"""P and D that differ: D says at once which field, and what to do, relayed or not."""

from __future__ import annotations

import re
import time

import pytest

from pdstore import LayerSpec, PrefixCacheManager
from pdstore.errors import Reason
from tests.support.kv import LAYERS, eventually

BLOCKS, PROMPT = list(range(20)), range(100)
AT_ONCE_S = 5.0  # on a busy machine; D would wait 30 s for a marker
DIFFERENT = {
    "salt": {"salt": "another tenant"},
    "weights": {"weights": "v2"},
    "block_tokens": {"block_tokens": 32},
    "shards": {"kv_shards": 2},
    "ranges": {"layer_ranges": 3},
    "layers": {"layers": [LayerSpec(4, 8)] * len(LAYERS)},
}
"""The field of the namespace that differs, and how."""


def handed_over(p):
    """Lets P save a prompt; returns what its answer would carry to D."""
    keys = p.cache.keys(PROMPT)
    handoff, params = p.cache.announce(keys)
    assert p.pool.save(keys, BLOCKS, handoff=handoff).wait(20).reason is None
    return params


@pytest.mark.misconfiguration(
    "salt, weights, block tokens, order, shards, layer ranges or KV heads differ"
)
@pytest.mark.parametrize("field", DIFFERENT)
def test_a_field_that_differs_is_named_at_once_with_both_values(instance, caplog, field):
    p, d = instance(), instance(handoff_wait_s=30.0, role="decode", **DIFFERENT[field])
    params, begin = handed_over(p), time.monotonic()
    found = d.cache.lookup(d.cache.keys(PROMPT), params).wait(AT_ONCE_S)
    assert found.reason is Reason.NAMESPACE
    assert time.monotonic() - begin < AT_ONCE_S
    [line] = [r.getMessage() for r in caplog.records if "does not fit" in r.getMessage()]
    assert f"{field}: " in line
    assert " there, " in line
    assert line.endswith("start P and D with the same")


@pytest.mark.misconfiguration("a field differs, and the router relays no `kv_transfer_params`")
@pytest.mark.parametrize("field", DIFFERENT)
def test_without_the_relayed_parameters_d_says_where_to_look(instance, caplog, field):
    p, d = instance(), instance(role="decode", **DIFFERENT[field])
    handed_over(p)
    found = d.cache.lookup(d.cache.keys(PROMPT)).wait(AT_ONCE_S)
    assert (found.num_tokens, found.reason) == (0, Reason.ABSENT)
    eventually(lambda: "removes kv_transfer_params: it has to relay them" in caplog.text)


@pytest.mark.misconfiguration(
    "a gateway between router and D removes `kv_transfer_params` from the requests"
)
def test_a_gateway_that_strips_the_hand_off_is_told_once_by_a_d_that_finds_the_kv(instance, caplog):
    p, d = instance(), instance(role="decode")
    handed_over(p)
    for _ in range(3):
        assert d.cache.lookup(d.cache.keys(PROMPT)).wait(AT_ONCE_S).num_tokens == 100
    eventually(lambda: "requests come here without kv_transfer_params" in caplog.text)
    [line] = [record.getMessage() for record in caplog.records]
    assert "a gateway between the router and this instance removes the field" in line


@pytest.mark.parametrize("kind", ["role both", "SGLang", "some with hand-offs"])
def test_a_request_that_needs_no_hand_off_is_not_told(instance, closed_after, caplog, kind):
    p, d = instance(), instance(role="both" if kind == "role both" else "decode")
    params, cache = handed_over(p), d.cache
    if kind == "SGLang":  # its requests have no such field
        more = {"store": d.store, "router_duty": "ask P first"}
        cache = closed_after(PrefixCacheManager(d.settings, d.namespace, **more))
    elif kind != "role both":
        assert cache.lookup(cache.keys(PROMPT), params).wait(AT_ONCE_S).num_tokens == 100
    ended = cache.lookup(cache.keys(PROMPT))
    assert ended.wait(AT_ONCE_S).num_tokens == 100
    cache.close()  # after it, nothing more is said
    assert "without kv_transfer_params" not in caplog.text


@pytest.mark.misconfiguration("the dtype differs")
def test_a_dtype_that_differs_is_named(instance, caplog):
    p, d = instance(), instance(handoff_wait_s=30.0)
    params = handed_over(p)
    fields = {**params["pdstore"]["fields"], "dtype": '"bfloat16"'}
    params["pdstore"] |= {"namespace": "ab" * 16, "fields": fields}
    assert d.cache.lookup(d.cache.keys(PROMPT), params).wait(AT_ONCE_S).reason is Reason.NAMESPACE
    assert 'dtype: "bfloat16" there, "float32" here' in caplog.text


@pytest.mark.misconfiguration("the layers differ")
def test_the_layers_are_shown_and_not_a_digest_of_them(instance, caplog):
    p, d = instance(), instance(handoff_wait_s=30.0, **DIFFERENT["layers"])
    d.cache.lookup(d.cache.keys(PROMPT), handed_over(p)).wait(AT_ONCE_S)
    [line] = [r.getMessage() for r in caplog.records if "does not fit" in r.getMessage()]
    assert "layers: 3 x [" in line


@pytest.mark.misconfiguration("`PDSTORE_BLOCK_TOKENS=24` with engine blocks of 16")
def test_a_value_that_is_no_multiple_of_the_engines_block_ends_the_start(instance):
    with pytest.raises(ValueError, match=r"BLOCK_TOKENS=24 must be a multiple .* of 16"):
        instance(block_tokens=24)


@pytest.mark.misconfiguration("D has another tokenizer or chat template")
@pytest.mark.parametrize("num_tokens", [122, 94, 70, 300])
def test_another_tokenizer_is_told_and_not_taken_for_eviction(instance, caplog, num_tokens):
    p, d = instance(role="prefill"), instance(role="decode")
    keys = p.cache.keys(range(94))
    handoff, params = p.cache.announce(keys)
    assert p.pool.save(keys, BLOCKS, handoff=handoff).wait(20).reason is None
    ours = d.cache.keys(range(1000, 1000 + num_tokens))
    for start in (d.cache.follow, d.cache.lookup, d.cache.lookup):
        found = start(ours, params).wait(AT_ONCE_S)
        assert (found.num_tokens, found.reason) == (0, Reason.ABSENT)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"P had 94 tokens, this instance {num_tokens}, not the same ones" in line
    assert "tokenizer or chat template differ" in line
    assert "give both instances the same --tokenizer and --chat-template" in line


@pytest.mark.parametrize("num_more", [0, 1])
def test_the_prompt_that_p_had_is_no_warning(instance, caplog, num_more):
    p, d = instance(role="prefill"), instance(role="decode")
    params = handed_over(p)
    found = d.cache.lookup(d.cache.keys(range(100 + num_more)), params).wait(AT_ONCE_S)
    assert found.num_tokens == 100
    assert not caplog.records


@pytest.mark.misconfiguration("salts that differ only by white space at an end")
def test_salts_that_differ_by_white_space_alone_are_called_that(instance, caplog):
    p, d = instance(salt="team-a\n"), instance(salt="team-a")
    d.cache.lookup(d.cache.keys(PROMPT), handed_over(p)).wait(AT_ONCE_S)
    [line] = [r.getMessage() for r in caplog.records if "does not fit" in r.getMessage()]
    assert re.search(
        r"salt: #\w{4} \((#\w{4}) and white space\) there, \1 here: start P and D with the same",
        line,
    )
