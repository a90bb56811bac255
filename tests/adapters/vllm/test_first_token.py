"""The router passes P's first token on, and D goes on behind it, as one instance would."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.adapters.vllm.asking import Since, alone, ask, new_prompt, post

BLOCK, NUM_LETTERS = 64, 94
"""The tokens below NUM_LETTERS are ASCII; behind half a character no token's text is clear."""


@pytest.fixture(scope="module")
def router(started_pair, launcher):
    router = launcher.router(started_pair.p, started_pair.d, "--first-token", "prefill")
    yield router.wait_ready()
    router.stop()


def num_spliced(router) -> float:
    text = httpx.get(router.url + "/metrics", trust_env=False).text
    return float(re.search(r"^router_spliced_total (\S+)", text, re.MULTILINE)[1])


def test_the_answer_is_that_of_one_instance_and_d_computes_p_s_token_alone(pair, router):
    for num_tokens in (1, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK, 150, 200, 250, 300, 350, 900):
        prompt = [token % NUM_LETTERS for token in new_prompt(num_tokens)]
        expected = alone(pair.d, prompt)
        since = Since(pair.d)
        answer = ask(router, prompt)
        answer.assert_same(expected)
        [choice], [theirs] = answer.body["choices"], expected.body["choices"]
        for name in ("text", "finish_reason", "prompt_token_ids"):
            assert choice[name] == theirs[name]
        assert choice["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = [[body["usage"][n] for n in counts] for body in (answer.body, expected.body)]
        assert usage[0] == usage[1]
        assert since.computed <= 1
        assert since.loaded in ({num_tokens} if num_tokens > 1 else {0, 1})
    assert num_spliced(router) > 0, "every first token was half a character"


def test_an_answer_of_one_token_never_reaches_d(pair, router):
    for stream in (False, True):
        since = Since(pair.d)
        response = post(router, new_prompt(100), 1, stream=stream)
        assert response.status_code == 200
        assert since.computed == since.loaded == 0
