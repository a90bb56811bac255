"""Every `pdstore` command on a page runs as it is written; docs/cli.md has all of them."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import typer
from prometheus_client import start_http_server

from pdstore.cli.app import app
from pdstore.cli.main import main
from pdstore.format.keys import Json
from pdstore.metrics import Metrics
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.connect import read_pool_id
from tests.docs.commands import ROOT, commands
from tests.support.published_models import MODELS

PAGE = (ROOT / "docs" / "cli.md").read_text()
LINES = [command.line for command in commands()]
COMMANDS = [line for line in LINES if line.startswith("pdstore ")]


@pytest.fixture
def place(tmp_path):
    """A directory with what the page speaks of."""
    small: dict[str, Json] = MODELS["Llama-3.1-8B"] | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(small))
    store = open_store(f"file://{tmp_path}/pool", read_settings())
    read_pool_id(store)
    store.close()
    handoff = "request cmpl-7: hand-off none, 9 tokens (0 matched, 0 loaded, 9 computed, 9 saved)"
    for name in ("p.log", "d.log"):
        (tmp_path / name).write_text(f"INFO {handoff}\n")
    (tmp_path / "trace.jsonl").write_text('{"hash_ids": [0, 1]}\n' * 3)
    return tmp_path


@pytest.fixture
def instance():
    server, thread = start_http_server(0, "127.0.0.1", Metrics().registry)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_page_has_every_command():
    shown = set(re.findall(r"^pdstore (\w+)", PAGE, re.MULTILINE))
    assert shown == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_a_page_runs(line, place, instance, monkeypatch, capsys):
    line = re.sub(r":8[12]0[01]\b", f":{instance}", line)
    program, *arguments = shlex.split(line)
    assert program == "pdstore"
    monkeypatch.chdir(place)
    monkeypatch.setenv("PDSTORE_STORE", f"file://{place}/pool?budget=1GiB")
    status = main(arguments)
    out, err = capsys.readouterr()
    assert status in (0, 1), err
    assert out
