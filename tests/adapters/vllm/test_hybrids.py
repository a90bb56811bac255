"""Models with states hand over exactly: D answers as one instance that computes the same chunks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from tests.adapters.vllm.asking import (
    Answer,
    Since,
    alone,
    ask,
    assert_idle,
    forget,
    new_prompt,
    num_spliced,
    prefill,
)
from tests.adapters.vllm.conftest import SCHEMES, pool_url
from tests.adapters.vllm.replaying import (
    CACHED,
    DELTA_NET,
    FAMILIES,
    STATELESS,
    Instances,
    instances,
)
from tests.adapters.vllm.servers import Server

NUM_LETTERS = 94  # the tokens below are ASCII: each has a text of its own
DIFFERENT = 0.01  # between logprobs; with the same chunks they are equal to the last bit


@dataclass(frozen=True)
class Trio:
    """P, D, and the negative control: a D that loads token rows alone."""

    all: Instances
    p: Server
    d: Server
    stateless: Server

    def assert_exact(self, answer: Answer, prompt: list[int]) -> Answer:
        """It is what D answers if it computes all chunks, also its usage; returns that."""
        assert answer.body["usage"]["prompt_tokens"] == len(prompt)
        return self.all.assert_exact(answer, self.d, prompt)


@contextlib.contextmanager
def serving(launcher, model, directory, store, *options):
    with instances(launcher, model, directory, *options) as all:
        start = [("p", store, "prefill"), ("d", store, "decode"), ("x", store, "decode", STATELESS)]
        p, d, stateless = (all.start(*each) for each in start)
        all.wait_ready()
        yield Trio(all, p, d, stateless)
        for server in (p, d):
            assert_idle(server)


@pytest.fixture(scope="module")
def qwen3_next(launcher, checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_next")
    store = f"file://{directory / 'pool'}"
    with serving(launcher, checkpoints("qwen3_next"), directory, store, *DELTA_NET) as trio:
        yield trio


@pytest.fixture(scope="module", params=["file", "shm", "redis"])
def granite(request, launcher, checkpoints, tmp_path_factory):
    """Without prefix caching: vLLM's CPU backend ends with it, in models with Mamba2."""
    directory = tmp_path_factory.mktemp("granite")
    store = pool_url(request, request.param, directory)
    with serving(launcher, checkpoints("granite"), directory, store) as trio:
        yield trio


def assert_relayed(trio, num_tokens):
    """D computes one token and answers as one instance does; without states it would not."""
    prompt = new_prompt(num_tokens)
    since = Since(trio.d)
    params = prefill(trio.p, prompt)
    answer = ask(trio.d, prompt, kv_transfer_params=params)
    assert since.loaded == num_tokens - 1
    assert since.computed <= 1, num_tokens
    reference = trio.assert_exact(answer, prompt)
    control = ask(trio.stateless, prompt, kv_transfer_params=params)
    gaps = [abs(a - b) for a, b in zip(control.logprobs, reference.logprobs, strict=True)]
    assert control.ids != reference.ids or max(gaps) > DIFFERENT, num_tokens


def assert_concurrent(trio, launcher):
    """The router asks P and D at once."""
    router = launcher.router(trio.p, trio.d, "--mode", "concurrent").wait_ready()
    for num_tokens in (2, 40, 257, 900):
        prompt = new_prompt(num_tokens)
        since = Since(trio.d)
        answer = ask(router, prompt)
        assert since.loaded == num_tokens - 1
        assert since.computed <= 1, num_tokens
        trio.assert_exact(answer, prompt)
    router.stop()


def test_qwen3_next_is_handed_over_and_d_computes_one_token(qwen3_next):
    for num_tokens in (2, 40, 128, 129, 130, 257, 385, 900):
        assert_relayed(qwen3_next, num_tokens)


def test_granite_is_handed_over_without_prefix_caching(granite):
    for num_tokens in (2, 40, 255, 256, 257, 258, 513, 900):
        assert_relayed(granite, num_tokens)


def test_qwen3_next_is_handed_over_by_a_p_and_a_d_that_are_asked_at_once(qwen3_next, launcher):
    assert_concurrent(qwen3_next, launcher)


def test_granite_is_handed_over_by_a_p_and_a_d_that_are_asked_at_once(granite, launcher):
    assert_concurrent(granite, launcher)


def test_a_prompt_whose_state_p_has_already_is_handed_over_again(qwen3_next):
    """P has all but the last token: were they all to count, no token would be left to compute."""
    trio = qwen3_next
    for prompt in (new_prompt(257), new_prompt(385)):
        for _ in range(2):
            params = prefill(trio.p, prompt)
        since = Since(trio.d)
        answer = ask(trio.d, prompt, kv_transfer_params=params)
        assert since.computed <= 1
        trio.assert_exact(answer, prompt)


def test_a_second_turn_loads_the_state_of_a_block_s_end_and_computes_from_there(qwen3_next):
    trio = qwen3_next
    prompt = new_prompt(600)
    answer = ask(trio.d, prompt, kv_transfer_params=prefill(trio.p, prompt))
    turn = prompt + answer.ids + new_prompt(40)
    forget(trio.p)
    since = Since(trio.p)
    params = prefill(trio.p, turn)
    assert since.loaded == 512  # the last end of a block where a step of the first turn ended
    assert since.computed == len(turn) - 1 - 512
    since = Since(trio.d)
    answer = ask(trio.d, turn, kv_transfer_params=params)
    assert since.computed <= 1
    trio.assert_exact(answer, turn)


def test_a_prompt_whose_logprobs_are_asked_for_keeps_its_last_token(qwen3_next):
    prompt = new_prompt(200)
    params = {"do_remote_decode": True}
    answer = ask(qwen3_next.p, prompt, 1, kv_transfer_params=params, prompt_logprobs=1)
    assert len(answer.body["choices"][0]["prompt_logprobs"]) == len(prompt)
    assert answer.ids == alone(qwen3_next.p, prompt, 1, prompt_logprobs=1).ids


def test_p_s_token_is_the_first_and_d_computes_it_alone(qwen3_next, launcher):
    """P is asked to keep its last token: D's prompt is longer by P's answer.

    A token of half a character is left to D, and P is asked again, without the last token.
    """
    trio = qwen3_next
    router = launcher.router(trio.p, trio.d, "--first-token", "prefill").wait_ready()
    for num_tokens in (2, 40, 128, 129, 150, 200, 257, 385, 900):
        prompt = [token % NUM_LETTERS for token in new_prompt(num_tokens)]
        since, before = Since(trio.d), num_spliced(router)
        answer = ask(router, prompt)
        assert since.computed <= 1, num_tokens
        if num_spliced(router) == before:
            trio.assert_exact(answer, prompt)
            assert since.loaded == num_tokens - 1
            continue
        assert since.loaded == num_tokens
        behind = trio.all.replayed(trio.d, [*prompt, answer.ids[0]], 7)
        assert (answer.ids[1:], answer.logprobs[1:]) == (behind.ids, behind.logprobs)
        first = trio.all.replayed(trio.d, prompt, 1)
        assert (answer.ids[:1], answer.logprobs[:1]) == (first.ids, first.logprobs)
    assert num_spliced(router) >= 2, "nearly every first token was half a character"
    router.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_is_handed_over_by_each_store_in_each_mode(
    request, launcher, checkpoints, tmp_path, kind, scheme
):
    store = pool_url(request, scheme, tmp_path)
    with serving(launcher, checkpoints(kind), tmp_path, store, *FAMILIES[kind]) as trio:
        for num_tokens in (2, 40, 63, 64, 65, 66, 128, 129, 130, 255, 256, 257, 258, 513, 900):
            assert_relayed(trio, num_tokens)
        assert_concurrent(trio, launcher)


@pytest.mark.nightly
def test_two_tensor_parallel_ranks_hand_over_their_parts_of_the_states(
    launcher, checkpoints, tmp_path
):
    ranks = (*CACHED, "--tensor-parallel-size=2")
    # ranks wait for each other awake: with more of them than cores everything takes seconds
    patient = {"PDSTORE_HANDOFF_WAIT_S": "40", "PDSTORE_DEADLINE_S": "40"}
    with instances(launcher, checkpoints("lfm2"), tmp_path, *ranks) as all:
        store = f"file://{tmp_path / 'pool'}"
        p, d = (all.start(role[0], store, role, **patient) for role in ("prefill", "decode"))
        all.wait_ready()
        trio = Trio(all, p, d, d)
        for num_tokens in (2, 64, 65, 300):
            prompt = new_prompt(num_tokens)
            since = Since(d)
            answer = ask(d, prompt, kv_transfer_params=prefill(p, prompt))
            assert since.loaded == num_tokens - 1, "of both ranks"
            assert since.computed <= 1, num_tokens
            trio.assert_exact(answer, prompt)
        assert_idle(p)
        assert_idle(d)
