"""A `vllm serve` that is told to end under load ends, with all its processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import httpx
import pytest

from tests.adapters.vllm.asking import new_prompt, post
from tests.adapters.vllm.conftest import CACHING, switched_on
from tests.support.kv import eventually

TIMES = 50
PATIENCE_S, STOP_S = 6.0, 20.0
"""Of a client, and of who stops the server. vLLM's API server waits for clients without end."""


def keep_asking(server, prompts, stopped) -> None:
    """Sends prompts that are in the pool in part, until the server goes."""
    while not stopped.is_set():
        with contextlib.suppress(httpx.TimeoutException):
            prompt = [*random.choice(prompts), *new_prompt(200)]
            try:
                post(server, prompt, 20, timeout_s=PATIENCE_S)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                return


def group_is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_server_ends_at_whatever_moment_it_is_told_to(launcher, checkpoints, tmp_path):
    draw = random.Random(11)
    prompts = [new_prompt(length) for length in (300, 700, 1200)]
    for turn in range(TIMES):
        own_engine_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(turn // 2 % 2)}
        env = switched_on(f"file://{tmp_path}/pool") | own_engine_process
        server = launcher.vllm("server", checkpoints("llama"), *CACHING, env=env).wait_ready()
        stopped = threading.Event()
        asked = (server, prompts, stopped)
        clients = [threading.Thread(target=keep_asking, args=asked) for _ in range(4)]
        for client in clients:
            client.start()
        time.sleep(draw.uniform(0.05, 2.5))
        os.kill(server.pid, (signal.SIGTERM, signal.SIGINT)[turn % 2])
        stopped.set()
        eventually(lambda pid=server.pid: not group_is_alive(pid), STOP_S)
        for client in clients:
            client.join()
