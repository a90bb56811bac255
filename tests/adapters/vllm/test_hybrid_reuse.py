"""States that other prompts find: shared prefixes over the pool, and a pool that fails."""

from __future__ import annotations

import pytest

from tests.adapters.vllm.asking import Since, ask, assert_idle, forget, new_prompt, prefill
from tests.adapters.vllm.replaying import CACHED, instances
from tests.support.kv import eventually

BLOCK = 128
SHARED = 3 * BLOCK + 116  # where two prompts part: inside a block, and inside a step of a prefill


@pytest.fixture(scope="module")
def qwen3_next(launcher, checkpoints, tmp_path_factory):
    """Starts instances of Qwen3-Next."""
    directory = tmp_path_factory.mktemp("reuse")
    with instances(launcher, checkpoints("qwen3_next"), directory, *CACHED) as made:
        yield made


@pytest.fixture(scope="module")
def servers(qwen3_next, started_pair, tmp_path_factory):
    """Three instances over redis; a P and a D over files of which every twentieth call fails."""
    redis = [qwen3_next.start(name, started_pair.redis.url, "both") for name in "abc"]
    faults = "error_rate=0.05&corrupt_rate=0.05"
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
        reference = qwen3_next.replayed(server, prompt)
        assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs)
    assert loaded == [0, 2 * BLOCK, 3 * BLOCK]


def test_without_a_right_state_d_computes_all_and_the_next_save_heals_it(
    servers, qwen3_next, started_pair
):
    """The first layer of the model has a state, so group 0 is one of states."""
    (p, d, other), _, _ = servers
    prompt = new_prompt(300)
    params = prefill(p, prompt)
    tail = (len(prompt) - 1) % BLOCK
    with started_pair.redis.client() as redis:
        pattern = f"pds1:{params['pdstore']['namespace']}:0:0:*:partial:{tail}"
        [state] = eventually(lambda: redis.keys(pattern), 30)
        assert_idle(p)
        redis.setrange(state, 1000, b"not a state")
    since = Since(d)
    answer = ask(d, prompt, kv_transfer_params=params)
    assert since["pdstore_jobs_total:load:corrupt"] == 1
    assert (since.loaded, since.computed) == (0, len(prompt))
    reference = qwen3_next.replayed(d, prompt)
    assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs)
    forget(p)
    params = prefill(p, prompt)
    since = Since(other)
    answer = ask(other, prompt, kv_transfer_params=params)
    assert since.loaded == len(prompt) - 1
    reference = qwen3_next.replayed(other, prompt)
    assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs)


def test_answers_of_a_pool_that_fails_are_those_of_what_was_computed(servers, qwen3_next):
    _, p, d = servers
    since = Since(d)
    for number in range(24):
        prompt = new_prompt(100 + 33 * number)
        answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
        reference = qwen3_next.replayed(d, prompt)
        assert (answer.ids, answer.logprobs) == (reference.ids, reference.logprobs), number
    counts = since.all()
    assert counts["pdstore_tokens_total:loaded"] > 0
    assert counts["pdstore_tokens_total:lost"] > 0, counts
    assert_idle(p)
    assert_idle(d)
