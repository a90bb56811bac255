"""A prefill process that is killed while it saves: D hears it and does not wait any longer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdstore import Reason
from pdstore.store import open_store
from tests.support.child import child
from tests.support.kv import POISON, Instance, settings_of
from tests.support.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
ALIVE_S = 2.5
"""For so long D waits for a P that only beats; without beats it would not."""
NUM_TOKENS = 200

P = """
import json, sys, time
from pdstore.store import open_store
from tests.support.kv import Instance, settings_of

store = open_store(sys.argv[1], settings_of())
p = Instance(store, layer_ranges=3)
keys = p.cache.keys(range(int(sys.argv[2])))
handoff, params = p.cache.announce(keys)
assert p.pool.save(keys.prefix(64), range(20)).wait(10).reason is None
p.pool.start_handoff(handoff, keys.num_tokens).wait(10)
save = p.pool.begin_save(keys, range(20), handoff=handoff)
print(json.dumps(params), flush=True)
time.sleep(600)
"""


@pytest.fixture(
    params=[
        "file",
        pytest.param("redis", marks=pytest.mark.nightly),
        pytest.param("shm", marks=pytest.mark.nightly),
    ]
)
def url(request, tmp_path):
    urls = {"file": f"file://{tmp_path}", "shm": f"shm://dead?size=8MiB&dir={tmp_path}"}
    if request.param in urls:
        yield urls[request.param]
    else:
        server = RedisServer(tmp_path)
        yield server.url
        server.stop()


@pytest.fixture
def d(url):
    store = open_store(url, settings_of())
    d = Instance(store, POISON, layer_ranges=3, handoff_wait_s=DEADLINE_S)
    yield d
    d.close()
    store.close()


def test_a_killed_p_costs_no_deadline(url, d):
    """D waits for the marker, follows P's answer, and follows a hand-off that a router named."""
    command = [sys.executable, "-c", P, url, str(NUM_TOKENS)]
    keys = d.cache.keys(range(NUM_TOKENS))
    with child(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        params = json.loads(p.stdout.readline())
        named = {"pdstore": {"attempt": params["pdstore"]["attempt"]}}
        waiting = [d.cache.lookup(keys, params)]
        for number, each in enumerate((params, named)):
            found = d.cache.follow(keys, each).wait(10)
            blocks = range(20 * number, 20 * number + 20)
            waiting.append(d.pool.load(found.keys, blocks, follow=found.follow))
        with pytest.raises(TimeoutError):
            waiting[0].wait(ALIVE_S)
        assert not any(job.done for job in waiting[1:])
        p.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        ended = [each.wait(DEADLINE_S / 2) for each in waiting]
        print(f"D stopped waiting {time.monotonic() - killed_at:.2f} s after P's death")
    assert {(each.reason, each.num_tokens) for each in ended} == {(Reason.HANDOFF_DEAD, 64)}
