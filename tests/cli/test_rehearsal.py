"""`pdstore up`: a server that can be used until a signal ends it, and is gone afterwards."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from pdstore.cli.rehearsal import up
from pdstore.errors import ConfigError, StoreError
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.testing.values import fresh_keys, put
from tests.support.child import child
from tests.support.redis_server import need_redis_server


def use(kind, end, *options):
    """Starts a pool, puts a value, ends it by a signal; returns its URL and exit status."""
    command = [sys.executable, "-m", "pdstore", "up", kind, "--memory", "64MiB", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command, **pipes) as process:
        [url] = re.findall(r"[a-z]+://[^'\"]+", _announcement(process, is_json=bool(options)))
        store = open_store(url, read_settings())
        assert put(store, fresh_keys(1), [b"x" * 100]) == 1
        store.close()
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert ("is stopped" in out) is not bool(options)
    return url, process.returncode


def _announcement(process, *, is_json):
    """Reads what tells of the pool: a line for a shell, or a document of several lines."""
    lines = [process.stdout.readline()]
    while is_json and lines[-1].strip() != "}":
        lines.append(process.stdout.readline())
    text = "".join(lines)
    if is_json:
        return json.loads(text)["store"]
    assert text.startswith("export PDSTORE_STORE='")
    return text


@pytest.mark.parametrize(
    ("end", "options"), [(signal.SIGHUP, []), (signal.SIGTERM, ["--json", "-"])]
)
def test_a_redis_serves_until_it_is_told_to_end(end, options):
    need_redis_server()
    url, status = use("redis", end, *options)
    assert status == 0
    store = open_store(url, read_settings())
    with pytest.raises(StoreError):
        store.match(fresh_keys(1))
    store.close()


@pytest.mark.mooncake
def test_a_mooncake_pool_serves_until_ctrl_c():
    _, status = use("mooncake", signal.SIGINT)
    assert status == 0


def test_a_port_that_is_taken_and_a_size_that_is_none_are_refused(redis_server):
    with pytest.raises(ConfigError, match="'lots' is no size; write one like 1GiB"):
        up("redis", "lots", None)
    port = redis_server().port
    with pytest.raises(ConfigError, match=f"port {port} is taken"):
        up("redis", "1GiB", port)
