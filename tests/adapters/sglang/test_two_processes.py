"""P and D in processes of their own over a real redis: D loads while P stores, and P may die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.docs.commands import ROOT
from tests.support import sglang_server as kit
from tests.support import sglang_wheel as wheel

PREFILL = """
import json, pathlib, sys
from tests.support import sglang_server as kit, sglang_wheel as wheel
store, model, prompt = sys.argv[1:]
p = kit.Server(wheel.mha_pool(), pathlib.Path(model), store=store, role="prefill")
print("ready", flush=True)
for line in sys.stdin:
    p.backup(kit.page_hashes(5, prompt)[: int(line)], range(int(line)))
    print(json.dumps([p.page(n).hex() for n in range(5)]), flush=True)
"""
LOADED = [8, 4, 0, 5, 6]


class Prefill:
    """A prefill server in a process of its own, which stores pages when it is told to."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREFILL, *arguments],
            **{"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
        )
        assert self.process.stdout.readline() == "ready\n"

    def store(self, count: int) -> list[str]:
        """Stores the first pages of its prompt; returns all of them in hex."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.nightly
@pytest.mark.redis
@pytest.mark.parametrize("dies", [False, True])
def test_d_loads_what_comes_while_p_stores(serve, model, redis_url, dies):
    prompt = f"of two processes, {dies}"
    hashes = kit.page_hashes(5, prompt)
    d = serve(wheel.mha_pool(), store=redis_url, role="decode", handoff_wait_s=60)
    with (
        contextlib.closing(Prefill(redis_url, str(model), prompt)) as p,
        ThreadPoolExecutor() as threads,
    ):
        d.wait_for("a request", hashes)
        for count in (1, 2, 3):
            pages = p.store(count)
        operation = d.hit()
        assert len(operation.hash_value) == 5
        loading = threads.submit(d.transfer, operation, LOADED)
        p.close() if dies else p.store(5)
        come = loading.result(60)
    assert come == (3 if dies else 5)
    assert [d.page(n).hex() for n in LOADED[:come]] == pages[:come]
