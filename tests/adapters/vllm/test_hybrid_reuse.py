"""States that other prompts find: shared prefixes over the pool, and a pool that fails."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import (
    Since,
    answers_after_losses,
    ask,
    assert_idle,
    forget,
    new_prompt,
    prefill,
)
from tests.adapters.vllm.replaying import DELTA_NET, FAMILIES, instances
from tests.support.file_pool import Losses

BLOCK = 128
SHARED = 3 * BLOCK + 116  # where two prompts part: inside a block, and inside a step of a prefill


@pytest.fixture(scope="module")
def qwen3_next(launcher, checkpoints, tmp_path_factory):
    """Starts instances of Qwen3-Next."""
    directory = tmp_path_factory.mktemp("reuse")
    with instances(launcher, checkpoints("qwen3_next"), directory, *DELTA_NET) as made:
        yield made


@pytest.fixture(scope="module")
def servers(qwen3_next, started_pair, tmp_path_factory):
    """Three instances over redis; a P and a D over files of which every twentieth call fails.

    One of twenty others tells of fewer values than there are, and one value of twenty is wrong.
    """
    redis = [qwen3_next.start(name, started_pair.redis.url, "both") for name in "abc"]
    faults = "error_rate=0.05&corrupt_rate=0.05&miss_rate=0.05"
    files = f"faulty+file://{tmp_path_factory.mktemp('faulty')}/pool?{faults}&seed="
    p, d = (
        qwen3_next.start("p", files + "1", "prefill"),
        qwen3_next.start("d", files + "2", "decode"),
    )
    qwen3_next.wait_ready()
    return redis, p, d


def test_three_instances_share_a_prefix_as_one_instance_s_own_cache_does(servers, qwen3_next):
    """The second prompt leaves a state where it parts from the first; the third begins there.

    Beyond that the pool has the state at the end of the first prompt's first step.
    """
    instances, _, _ = servers
    shared = new_prompt(SHARED)
    prompts = [shared + new_prompt(300) for _ in instances]
    alone = [ask(instances[0], prompt, cache_salt="one").num_cached for prompt in prompts]
    assert alone == [0, 0, 3 * BLOCK]
    loaded = []
    for server, prompt in zip(instances, prompts, strict=True):
        since = Since(server)
        answer = ask(server, prompt)
        loaded.append(since.loaded)
        assert_idle(server)  # the next one finds what this one has saved
        qwen3_next.assert_exact(answer, server, prompt)
    assert loaded == [0, 2 * BLOCK, 3 * BLOCK]


def corrupt(redis, key):
    redis.setrange(key, 1000, b"not what P saved")


def lose(redis, key):
    redis.delete(key)


@pytest.mark.parametrize(
    ("harm", "group", "is_tail", "num_loaded"),
    [(corrupt, 0, True, 0), (lose, 0, True, 256), (lose, 3, True, 256), (lose, 3, False, 0)],
    ids=["wrong state", "no state", "no KV of the tail", "no KV of a full block"],
)
def test_what_is_wrong_or_absent_is_computed_and_the_next_save_heals_it(
    servers, qwen3_next, started_pair, harm, group, is_tail, num_loaded
):
    """The model's first three layers have states, in groups 0 to 2; the last has KV, in group 3.

    Nothing of a load that fails is used. Without a value D loads up to an earlier state, which P's
    first step has left.
    """
    (p, d, other), _, _ = servers
    prompt = new_prompt(300)
    with started_pair.redis.client() as redis:
        pattern = f"pds1:*:{group}:0:*"
        before = redis.keys(pattern)
        params = prefill(p, prompt)
        assert_idle(p)
        saved = set(redis.keys(pattern)).difference(before)
        harm(redis, min(key for key in saved if (b":partial:" in key) is is_tail))
    since = Since(d)
    answer = ask(d, prompt, kv_transfer_params=params)
    assert since["pdstore_jobs_total:load:corrupt"] == (harm is corrupt)
    assert (since.loaded, since.computed) == (num_loaded, len(prompt) - num_loaded)
    qwen3_next.assert_exact(answer, d, prompt)
    forget(p)
    params = prefill(p, prompt)
    since = Since(other)
    answer = ask(other, prompt, kv_transfer_params=params)
    assert since.loaded == len(prompt) - 1
    qwen3_next.assert_exact(answer, other, prompt)


def test_answers_of_a_pool_that_fails_are_those_of_what_was_computed(servers, qwen3_next):
    _, p, d = servers
    since = Since(d)
    for number in range(24):
        prompt = new_prompt(100 + 33 * number)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        qwen3_next.assert_exact(answer, d, prompt)
    counts = since.all()
    assert counts["pdstore_tokens_total:loaded"] > 0
    assert counts["pdstore_tokens_total:lost"] > 0, counts
    assert_idle(p)
    assert_idle(d)


LOSSES, MISSES = 0.1, 0.05  # the chance of a value to be lost, and of a call to miss


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAMILIES)
def test_d_computes_what_a_pool_has_lost_before_it_looks(launcher, checkpoints, tmp_path, kind):
    losses = Losses(tmp_path / "pool", LOSSES)
    with instances(launcher, checkpoints(kind), tmp_path, *FAMILIES[kind]) as made:
        store = f"file://{tmp_path}/pool"
        p, d = (made.start(role[0], store, role) for role in ("prefill", "decode"))
        made.wait_ready()
        for prompt, answer in answers_after_losses(p, d, losses, range(60, 900, 21)):
            made.assert_exact(answer, d, prompt)
        *of_states, of_kv = (losses.by_group[group] for group in sorted(losses.by_group))
        assert any(of_states)
        assert of_kv
        assert_idle(d)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", FAMILIES)
def test_calls_that_miss_leave_the_answers_of_a_p_and_a_d_that_are_asked_at_once(
    launcher, checkpoints, tmp_path, kind
):
    store = f"faulty+file://{tmp_path}/pool?error_rate=0&corrupt_rate=0&miss_rate={MISSES}"
    with instances(launcher, checkpoints(kind), tmp_path, *FAMILIES[kind]) as made:
        p, d = (made.start(role[0], store, role) for role in ("prefill", "decode"))
        made.wait_ready()
        router = launcher.router(p, d, "--mode", "concurrent").wait_ready()
        since = Since(d)
        for number in range(24):
            prompt = new_prompt(100 + 33 * number)
            made.assert_exact(ask(router, prompt), d, prompt)
        counts = since.all()
        assert counts["pdstore_tokens_total:loaded"] > 0
        assert counts["pdstore_store_codes_total:faulty_miss"] > 0, counts
        router.stop()
        assert_idle(p)
        assert_idle(d)
