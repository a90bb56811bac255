"""docs/two_hosts.md: its commands, as they stand there, on two hosts.

The mini engine stands where the page has vLLM. The first host is host-a and store-host, the second
one is host-b and has the router.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.commands import ROOT, lines_of
from tests.support.hosts import needs_hosts, two_hosts
from tests.support.kv import eventually

PAGE = ROOT / "docs" / "two_hosts.md"
DEADLINE_S = 60.0


@pytest.fixture
def steps(checkpoint):
    """The page's commands by what they do; a fixture so that a page without one fails here."""
    engine = f"python -m examples.mini_engine --model {checkpoint} --num-blocks 64"
    lines = [line for line in lines_of(PAGE) if not line.startswith("pip install")]
    found = {"exports": [line for line in lines if line.startswith("export ")]}
    heads = {
        "redis": "redis-server ",
        "doctor": "pdstore doctor",
        "prefill": "PDSTORE_ROLE=prefill vllm serve MODEL ",
        "decode": "PDSTORE_ROLE=decode vllm serve MODEL ",
        "router": "pdstore-router ",
        "peers": "pdstore doctor --peer ",
        "request": "curl ",
    }
    for name, head in heads.items():
        same = [line for line in lines if line.startswith(head)]
        same = [line for line in same if name != "doctor" or line == head]
        assert len(same) == 1, f"{name}: {same}"
        found[name] = same[0].replace("vllm serve MODEL", engine).replace("64gb", "512mb")
    assert len(lines) == len(heads) + len(found["exports"])
    return found


@needs_hosts
@pytest.mark.redis
@pytest.mark.slow
def test_the_commands_of_the_page_hand_over(steps, tmp_path):
    with two_hosts(tmp_path, "host-a store-host", "host-b") as (a, b):
        a.start("redis", steps["redis"])
        for host in (a, b):
            host.exports += steps["exports"]
        eventually(lambda: a.run("redis-cli ping").stdout, DEADLINE_S, lambda: a.log("redis"))
        for host in (a, b):
            done = host.run(steps["doctor"])
            assert "0 wrong" in done.stdout, done.stdout + done.stderr

        a.start("prefill", steps["prefill"])
        b.start("decode", steps["decode"])
        b.start("router", steps["router"])
        # the router is up, and "degraded", also before P is
        ready = 'curl -sf http://127.0.0.1:8000/health | grep \'"status":"ok"\''
        logs = lambda: a.log("prefill") + b.log("decode") + b.log("router")  # noqa: E731
        eventually(lambda: b.run(ready).returncode == 0, DEADLINE_S, logs)

        answer = b.run(steps["request"])
        num_prompt = json.loads(answer.stdout)["usage"]["prompt_tokens"]
        peers = a.run(steps["peers"])
        assert peers.returncode == 0, peers.stdout
        loaded = rf"{num_prompt - 1:,} (tokens )?loaded"
        eventually(lambda: re.search(loaded, b.log("decode")), DEADLINE_S, logs)
        eventually(lambda: f"{num_prompt:,} saved" in a.log("prefill"), DEADLINE_S, logs)
        # of a connection that is closed, only the host that closed it first still tells
        assert a.ports_between() | b.ports_between() == ports_of_the_page() - {8000}


def ports_of_the_page():
    """The ports that the page says to open."""
    rows = re.findall(r"^\| [^|]+ \| (\d+)", PAGE.read_text(), re.MULTILINE)
    return set(map(int, rows))
