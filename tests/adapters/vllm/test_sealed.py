"""vLLM over a redis with a password and a seal: D loads, and no secret comes out."""

from __future__ import annotations

import httpx
import pytest
import redis

from pdstore.format.keys import POOL_ID_KEY
from tests.adapters.vllm.asking import ask, new_prompt, post, prefill
from tests.support.seal_key import write_seal_key
from tests.support.secret import KEY, PASSWORD, redis_with_password, secrets_in, url_with_password

pytestmark = pytest.mark.nightly  # two vLLM of its own

LONG = 300


@pytest.fixture
def server(tmp_path):
    server = redis_with_password(tmp_path)
    yield server
    server.stop()


def values_of(server) -> dict[bytes, bytes]:
    client = redis.Redis.from_url(url_with_password(server))
    return {key: client.get(key) for key in client.scan_iter() if key != POOL_ID_KEY.encode()}


def test_every_value_is_encrypted_and_no_secret_comes_out(server, launcher, checkpoints, tmp_path):
    """Searches answers, errors, metrics and logs, with and without the redis."""
    env = {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": url_with_password(server),
        "PDSTORE_SEAL_KEY_FILE": str(write_seal_key(tmp_path / "seal.key", KEY)),
    }
    model = checkpoints("llama")
    options = ("--enable-prompt-tokens-details",)
    p, d = (
        launcher.vllm(f"sealed-{role}", model, *options, env={**env, "PDSTORE_ROLE": role})
        for role in ("prefill", "decode")
    )
    router = launcher.router(p, d)
    every = [p.wait_ready(), d.wait_ready(), router.wait_ready()]

    prompt = new_prompt(LONG)
    params = prefill(p, prompt)
    answer = ask(d, prompt, kv_transfer_params=params)
    assert answer.num_cached == LONG
    values = values_of(server)
    assert len(values) > LONG // 64
    assert all(value.startswith(b"PDSE") for value in values.values())

    texts = [str(params), str(answer.body), post(router, new_prompt(LONG)).text]
    wrong = {"pdstore": {"attempt": PASSWORD[::-1]}}
    texts += [post(one, prompt, kv_transfer_params=wrong).text for one in every]
    server.stop()
    texts += [post(one, new_prompt(LONG)).text for one in every]
    texts += [httpx.get(one.url + "/metrics", trust_env=False).text for one in every]
    for one in every:
        one.stop()
        texts.append(one.log.read_text())
    everything = "\n".join(texts)
    assert "pdstore_store_calls_total" in everything
    assert "redis://pdstore:***@127.0.0.1" in everything, "what is searched has the right lines"
    assert not secrets_in(everything)
