"""A roll-out: P and D of two versions, two weights, two salts, two stores; and a P that is stopped.

The other version is a process of another checkout; each of the two is P once and D once.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdstore import Reason
from pdstore.format.namespace import FORMAT_VERSION
from tests.support.mini_engine_kit import (
    ask,
    decode,
    hand_over,
    prompt_of,
    until,
)
from tests.support.mini_process import MiniProcess, other_version

PULL = {"do_remote_decode": True}
PROMPT, OTHER_PROMPT = prompt_of(150, seed=1), prompt_of(150, seed=2)


@pytest.fixture
def pd(tmp_path):
    """Settings of this version; both ways need P's and D's role."""
    return {
        "pd_transfer_via_storage": True,
        "role": "both",
        "store": f"file://{tmp_path}/pool",
        "staging": "8MiB",
        "handoff_wait_s": 5.0,
        "native": "off",  # the other checkout has no sources to build it from
    }


@pytest.fixture
def start_other(checkpoints, pd, tmp_path):
    """Starts an instance of another version on the same pool."""
    with ExitStack() as stack:

        def start(**options):
            other = MiniProcess(
                stack,
                tmp_path,
                "both",
                checkpoints["llama"],
                checkout=other_version(tmp_path, **options),
                PD_TRANSFER_VIA_STORAGE="1",
                PDSTORE_STORE=pd["store"],
                PDSTORE_STAGING="8MiB",
                PDSTORE_NATIVE="off",
            )
            until(other.is_ready)
            return other

        yield start


def test_versions_of_two_formats_compute_and_name_the_field_both_ways(
    start_other, open_engine, pd, caplog
):
    ours, other = open_engine("llama", pd), start_other()
    right = {id(prompt): ask(ours, prompt).wait().ids for prompt in (PROMPT, OTHER_PROMPT)}

    to_other = other.ask(prompt=PROMPT, kv_transfer_params=hand_over(ours, PROMPT), max_tokens=8)
    usage = to_other.json()["usage"]["pdstore"]
    assert (usage["reason"], usage["loaded_tokens"]) == ("namespace", 0)
    assert usage["computed_tokens"] >= len(PROMPT)
    assert to_other.json()["choices"][0]["token_ids"] == right[id(PROMPT)]
    assert f"format: {FORMAT_VERSION} there, 9{FORMAT_VERSION} here" in other.log
    assert 'pdstore_misses_total{reason="namespace"} 1.0' in other.metrics

    asked = {"prompt": OTHER_PROMPT, "max_tokens": 1, "kv_transfer_params": PULL}
    params = other.ask(**asked).json()["kv_transfer_params"]
    from_other = decode(ours, OTHER_PROMPT, params)
    assert (from_other.request.miss_reason, from_other.request.num_loaded) == ("namespace", 0)
    assert from_other.ids == right[id(OTHER_PROMPT)]
    assert f"format: 9{FORMAT_VERSION} there, {FORMAT_VERSION} here" in caplog.text


@pytest.mark.nightly
def test_versions_of_one_format_share_blocks_both_ways(start_other, open_engine, pd):
    ours, other = open_engine("llama", pd), start_other(is_format_equal=True)
    answer = other.ask(prompt=PROMPT, kv_transfer_params=hand_over(ours, PROMPT)).json()
    assert answer["usage"]["pdstore"]["loaded_tokens"] == len(PROMPT) - 1
    asked = {"prompt": OTHER_PROMPT, "max_tokens": 1, "kv_transfer_params": PULL}
    params = other.ask(**asked).json()["kv_transfer_params"]
    assert decode(ours, OTHER_PROMPT, params).request.num_loaded == len(PROMPT) - 1


CHANGES = {
    "weights": ({"weights": "model@2"}, Reason.NAMESPACE, "weights"),
    "salt": ({"salt": "another"}, Reason.NAMESPACE, "salt"),
    "store": ({"store": "memory://elsewhere"}, Reason.OTHER_POOL, "PDSTORE_STORE"),
}


@pytest.mark.parametrize("is_p_new", [True, False], ids=["P is new", "D is new"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_on_one_side_is_a_miss_that_is_named(open_engine, pd, caplog, change, is_p_new):
    changed, reason, word = CHANGES[change]
    old = pd | {"weights": "model@1"}
    p = open_engine("llama", old | changed if is_p_new else old)
    d = open_engine("llama", old if is_p_new else old | changed)
    right = ask(d, PROMPT).wait()
    answer = decode(d, OTHER_PROMPT, hand_over(p, OTHER_PROMPT))
    assert (answer.request.miss_reason, answer.request.num_loaded) == (reason, 0)
    assert word in caplog.text
    assert right.ids == ask(p, PROMPT).wait().ids


@pytest.mark.nightly
def test_a_p_that_is_told_to_stop_ends_its_save_first(start_other, open_engine, pd):
    """D, which is asked after P has gone, loads what P answered a moment before."""
    ours, other = open_engine("llama", pd), start_other(is_format_equal=True)
    asked = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": PULL}
    params = other.ask(**asked).json()["kv_transfer_params"]
    other.stop()
    assert decode(ours, PROMPT, params).request.num_loaded == len(PROMPT) - 1
