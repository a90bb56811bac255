"""Whatever comes as a body: the router and the mini engine answer it or refuse it, without 500."""

from __future__ import annotations

import json

import anyio
import httpx
import pytest
from hypothesis import strategies as st

from examples.mini_engine.config import Config
from examples.mini_engine.engine import Engine
from examples.mini_engine.server import app_of
from pdstore import read_settings
from pdstore.router.app import Options, make_app
from tests.fuzz.search import num_examples, search
from tests.fuzz.test_requests import JSON
from tests.support.mini_engine_kit import close
from tests.support.router_kit import nobody

NAMES = st.sampled_from(
    [
        *("model", "prompt", "max_tokens", "stream", "logprobs", "n", "stream_options", "stop"),
        *("temperature", "kv_transfer_params", "min_tokens", "max_completion_tokens", "messages"),
    ]
)
GOOD = st.fixed_dictionaries(
    {"prompt": st.text(max_size=9) | st.lists(st.integers(-1, 400), max_size=5)},
    optional={
        "max_tokens": st.integers(-1, 3),
        "stream": st.booleans(),
        "logprobs": st.integers(-1, 30),
        "kv_transfer_params": st.dictionaries(st.sampled_from(["pdstore", "x"]), JSON, max_size=2),
    },
)
OBJECTS = st.builds(lambda good, more: {**good, **more}, GOOD, st.dictionaries(NAMES, JSON))
BODIES = st.binary(max_size=60) | (OBJECTS | JSON).map(lambda body: json.dumps(body).encode())


async def ask(app: object, body: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(app)  # what the app raises is raised here
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        with anyio.fail_after(10):
            return await client.post("/v1/completions", content=body)


def check_answers(num_examples: int, app: object, allowed: set[int]) -> None:
    """Posts bodies to an app in this thread's event loop; each must be answered as it should."""

    with anyio.from_thread.start_blocking_portal() as portal:

        def check(body: bytes) -> None:
            answer = portal.call(ask, app, body)
            assert answer.status_code in allowed
            if answer.status_code >= 400:
                assert set(answer.json()) == {"error"}
                assert len(answer.content) < 4096

        search(num_examples, check, body=BODIES)


@pytest.mark.parametrize("mode", ["relay", "concurrent"])
@num_examples
def test_the_router_refuses_or_passes_on(num_examples: int, mode: str) -> None:
    """Nobody listens behind it: what it passes on is a 503."""
    with nobody() as gone:
        two = (gone, gone)  # the router connects once more to a D that is alone, after 0.5 s
        app = make_app(Options((gone,), two, mode=mode))
        check_answers(num_examples // 2, app, {400, 503})


@num_examples
def test_the_mini_engine_refuses_or_answers(num_examples: int, checkpoints) -> None:
    settings = read_settings(
        pd_transfer_via_storage=True, store="memory://fuzz", staging="8MiB", handoff_wait_s=0.05
    )
    config = Config(model=checkpoints["llama"], settings=settings, num_blocks=64)
    engine = Engine(config)
    try:
        app = app_of(engine)
        check_answers(num_examples // 2, app, {200, 400, 404})
        assert anyio.run(ask, app, bytes(65 << 20)).status_code == 413
    finally:
        close(engine)
