"""P and D over a redis that wants a password: who loads, who computes, and what they let out.

P and D are processes of the mini engine, with their settings in the environment alone. A second D,
which has another key, is in the test's own process.
"""

from __future__ import annotations

import io
import logging
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from pdstore import Reason
from tests.support.listeners import addresses_of
from tests.support.mini_engine_kit import Asked, ask, opening_engines
from tests.support.mini_process import MiniProcess
from tests.support.seal_key import write_seal_key
from tests.support.secret import (
    KEY,
    OTHER_KEY,
    PASSWORD,
    SALT,
    redis_with_password,
    secrets_in,
    url_with_password,
)

pytestmark = pytest.mark.redis

PROMPT = "A block is stored under its key. " * 6


class Seen(NamedTuple):
    """The answers, the addresses that P and D listen at, and every text that came out.

    stranger: the finished request of the D that has another key.
    """

    p: dict
    d: dict
    stranger: Asked
    addresses: list[str]
    texts: list[str]


@pytest.fixture(scope="module")
def seen(checkpoints, tmp_path_factory):
    """P and D are in the middle of a rotation of keys: D has P's as its second."""
    directory = tmp_path_factory.mktemp("instances")
    server = redis_with_password(directory)
    checkpoint = checkpoints["llama"]
    pd = {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": url_with_password(server),
        "PDSTORE_SALT": SALT,
        "PDSTORE_STAGING": "8MiB",
        "PDSTORE_HANDOFF_WAIT_S": "3",
    }

    def key_file(name, *keys):
        return {"PDSTORE_SEAL_KEY_FILE": str(write_seal_key(directory / f"{name}.key", *keys))}

    with ExitStack() as stack:
        stack.callback(server.stop)
        p, d = (
            MiniProcess(stack, directory, role, checkpoint, **pd, **key_file(role, *keys))
            for role, keys in (("prefill", [KEY]), ("decode", [OTHER_KEY, KEY]))
        )
        p.wait_ready()
        d.wait_ready()
        addresses = [address for one in (p, d) for address in addresses_of(one.port)]
        alone = p.ask(prompt=PROMPT).json()
        params = p.ask(prompt=PROMPT, max_tokens=1).json()["kv_transfer_params"]
        answer = d.ask(prompt=PROMPT, kv_transfer_params=params)
        ids = alone["choices"][0]["prompt_token_ids"]
        log, text = logging.getLogger("pdstore"), io.StringIO()
        log.addHandler(handler := logging.StreamHandler(text))
        stack.callback(log.removeHandler, handler)
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.DEBUG)
        pd |= key_file("stranger", OTHER_KEY)
        stranger = ask_stranger(pd, checkpoint, ids, params)
        server.stop()
        failed = [one.ask(prompt=PROMPT[::-1]) for one in (p, d)]
        refused = p.ask(prompt=PROMPT, kv_transfer_params={"pdstore": {"attempt": PASSWORD[::-1]}})
        texts = [response.text for response in (answer, *failed, refused)]
        texts += [str(params), text.getvalue(), p.metrics, d.metrics]
        for one in (p, d):
            one.stop()
            texts.append(one.log)
        yield Seen(alone, answer.json(), stranger, addresses, texts)


def ask_stranger(pd, checkpoint, ids, params):
    settings = {name.removeprefix("PDSTORE_").lower(): value for name, value in pd.items()}
    with opening_engines({"llama": checkpoint}) as open_engine:
        d = open_engine(pd=settings | {"role": "decode"})
        return ask(d, ids, max_tokens=6, kv_transfer_params=params).wait()


def test_d_with_ps_key_loads_the_prompt(seen):
    assert seen.d["usage"]["pdstore"]["computed_tokens"] == 1
    assert seen.d["choices"][0]["token_ids"] == seen.p["choices"][0]["token_ids"]


def test_d_with_another_key_computes_the_prompt_and_names_the_reason(seen):
    assert seen.stranger.request.num_loaded == 0
    assert seen.stranger.request.miss_reason == Reason.OTHER_SEAL
    assert seen.stranger.ids == seen.p["choices"][0]["token_ids"]


def test_they_are_there_for_this_host_alone(seen):
    assert seen.addresses == ["127.0.0.1"] * 2


def test_no_secret_comes_out_of_any_of_them(seen):
    """In answers, metrics and logs, also after the redis has gone."""
    everything = "\n".join(seen.texts)
    assert "pdstore_store_calls_total" in everything
    assert "redis://pdstore:***@127.0.0.1" in everything, "what is searched has the right lines"
    assert not secrets_in(everything)
