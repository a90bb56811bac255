"""A roll-out: P and D of two versions; and a P that is stopped.

The other version is a process of another checkout; each of the two is P once and D once.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdstore.format.keys import FORMAT_VERSION
from tests.support.mini_engine_kit import PULL, ask, decode, hand_over, pd_of, prompt_of
from tests.support.mini_process import MiniProcess, other_version

PROMPT, OTHER_PROMPT = prompt_of(150, seed=1), prompt_of(150, seed=2)


@pytest.fixture
def pd(tmp_path):
    """Settings of this version; both ways need P's and D's role."""
    own = {"handoff_wait_s": 5.0, "native": "off"}  # the other checkout has no sources of it
    return pd_of("both", f"file://{tmp_path}/pool", **own)


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
            other.wait_ready()
            return other

        yield start


def handed_over_by(other, prompt):
    answer = other.ask(prompt=prompt, max_tokens=1, kv_transfer_params=PULL)
    return answer.json()["kv_transfer_params"]


@pytest.mark.misconfiguration("P and D have two versions of pdstore, whose formats differ")
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

    params = handed_over_by(other, OTHER_PROMPT)
    from_other = decode(ours, OTHER_PROMPT, params)
    assert (from_other.request.miss_reason, from_other.request.num_loaded) == ("namespace", 0)
    assert from_other.ids == right[id(OTHER_PROMPT)]
    assert f"format: 9{FORMAT_VERSION} there, {FORMAT_VERSION} here" in caplog.text


@pytest.mark.nightly
def test_versions_of_one_format_share_blocks_both_ways(start_other, open_engine, pd):
    ours, other = open_engine("llama", pd), start_other(is_format_equal=True)
    answer = other.ask(prompt=PROMPT, kv_transfer_params=hand_over(ours, PROMPT)).json()
    assert answer["usage"]["pdstore"]["loaded_tokens"] == len(PROMPT) - 1
    params = handed_over_by(other, OTHER_PROMPT)
    assert decode(ours, OTHER_PROMPT, params).request.num_loaded == len(PROMPT) - 1


@pytest.mark.nightly
def test_a_p_that_is_told_to_stop_ends_its_save_first(start_other, open_engine, pd):
    """D, which is asked after P has gone, loads what P answered a moment before."""
    ours, other = open_engine("llama", pd), start_other(is_format_equal=True)
    params = handed_over_by(other, PROMPT)
    other.stop()
    assert decode(ours, PROMPT, params).request.num_loaded == len(PROMPT) - 1
