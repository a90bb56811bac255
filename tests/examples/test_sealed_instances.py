"""P and D over a redis that wants a password: who loads, who computes, and what they let out.

P and D are processes of the mini engine, with their settings in the environment alone. A second D,
which has another key, is in the test's own process.
"""

from __future__ import annotations

import io
import logging
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from pdstore import Reason, read_settings
from tests.support.listeners import addresses_of
from tests.support.mini_engine_kit import Asked, ask, close, until
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


@dataclass
class Seen:
    """The answers, the addresses that P and D listen at, and every text that came out.

    stranger: the finished request of the D that has another key.
    """

    p: dict
    d: dict
    stranger: Asked
    addresses: list[str]
    texts: list[str]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = redis_with_password(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def seen(server, checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("instances")
    checkpoint = checkpoints["llama"]
    pd = {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": url_with_password(server),
        "PDSTORE_SALT": SALT,
        "PDSTORE_STAGING": "8MiB",
        "PDSTORE_HANDOFF_WAIT_S": "3",
    }
    keys = {"prefill": [KEY], "decode": [OTHER_KEY, KEY]}  # D is in the middle of a rotation
    with ExitStack() as stack:
        for name in keys:
            pd["PDSTORE_SEAL_KEY_FILE"] = str(
                write_seal_key(directory / f"{name}.key", *keys[name])
            )
            keys[name] = MiniProcess(stack, directory, name, checkpoint, **pd)
        p, d = keys.values()
        until(p.is_ready)
        until(d.is_ready)
        addresses = [address for one in (p, d) for address in addresses_of(one.port)]
        alone = p.ask(prompt=PROMPT).json()
        params = p.ask(prompt=PROMPT, max_tokens=1).json()["kv_transfer_params"]
        answer = d.ask(prompt=PROMPT, kv_transfer_params=params)
        ids = alone["choices"][0]["prompt_token_ids"]
        log = stack.enter_context(logged())
        stranger = ask_stranger(pd, directory, checkpoint, ids, params)
        server.stop()
        failed = [one.ask(prompt=PROMPT[::-1]) for one in (p, d)]
        refused = p.ask(prompt=PROMPT, kv_transfer_params={"pdstore": {"attempt": PASSWORD[::-1]}})
        texts = [response.text for response in (answer, *failed, refused)]
        texts += [str(params), log.getvalue(), p.metrics, d.metrics]
        for one in (p, d):
            one.stop()
            texts.append(one.log)
        yield Seen(alone, answer.json(), stranger, addresses, texts)


@contextmanager
def logged():
    """All that pdstore logs in this process, down to what is for its developers."""
    log, text = logging.getLogger("pdstore"), io.StringIO()
    handler, level = logging.StreamHandler(text), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield text
    log.removeHandler(handler)
    log.setLevel(level)


def ask_stranger(pd, directory, checkpoint, ids, params):
    settings = {name.removeprefix("PDSTORE_").lower(): value for name, value in pd.items()}
    settings["seal_key_file"] = write_seal_key(directory / "stranger.key", OTHER_KEY)
    config = Config(
        model=checkpoint, settings=read_settings(**settings, role="decode"), num_blocks=64
    )
    engine = Engine(config)
    try:
        return ask(engine, ids, max_tokens=6, kv_transfer_params=params).wait()
    finally:
        close(engine)


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
