"""`pdstore purge`: it asks first, and forgets a namespace or what was not used for long."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest

from pdstore.cli import progress
from pdstore.cli.purging import clear
from pdstore.errors import ConfigError
from tests.cli.conftest import fill
from tests.support.command import namespaces, run, run_json


class Terminal(io.StringIO):
    """Standard input of somebody who types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def old(filled_file, prompts):
    """A pool, and its namespace that nothing has used for 8 days."""
    name = prompts[0].namespace.hex
    age_files(filled_file, name, 8 * 86_400)
    return filled_file, name


def age_files(url: str, namespace: str, seconds: float) -> None:
    then = time.time() - seconds
    for path in Path(url.removeprefix("file://")).rglob(f"*{namespace}*"):
        os.utime(path, (then, then))


def test_where_nobody_can_be_asked_it_says_so_and_forgets_nothing(filled_file, prompts):
    name = prompts[0].namespace.hex
    before = namespaces(filled_file)
    ran = run("purge", "--namespace", name[:6], "--store", filled_file)
    assert (ran.status, ran.out) == (2, "")
    assert "standard input is no terminal; give --yes, or --dry-run to count" in ran.err
    assert f"forget 3 values, 3.1KiB, of {name} in {filled_file}" in ran.err
    assert namespaces(filled_file) == before


@pytest.mark.parametrize(("answer", "is_gone"), [("y\n", True), ("YES\n", True), ("\n", False)])
def test_on_a_terminal_it_asks(filled_file, prompts, monkeypatch, capsys, answer, is_gone):
    name = prompts[0].namespace.hex
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with progress.working():
        told = clear(filled_file, name, is_rehearsal=False, is_agreed=False)
    assert told.status == int(not is_gone)
    assert told.document["cleared"] is is_gone
    assert (name not in namespaces(filled_file)) is is_gone
    out, err = capsys.readouterr()
    assert (out, f"of {name} in {filled_file}? [y/N] " in err) == ("", True)


def test_what_was_not_used_for_long_goes_alone(old):
    url, name = old
    rehearsed = run_json("purge", "--older-than", "7d", "--dry-run", "--store", url)
    assert (rehearsed["num_values"], rehearsed["cleared"]) == (3, False)
    assert len(namespaces(url)) == 2
    document = run_json("purge", "--older-than", "7d", "--yes", "--store", url)
    assert (document["num_values"], document["namespaces"]) == (3, [name])
    assert len(namespaces(url)) == 1
    assert name not in namespaces(url)


def test_of_one_namespace_what_was_not_used_for_long_goes(old, prompts):
    url, name = old
    other = prompts[1].namespace.hex
    ran = run("purge", "--older-than", "1h", "--namespace", other, "--yes", "--store", url)
    assert ran.out.startswith("forgot 0 values")
    assert len(namespaces(url)) == 2
    age_files(url, other, 7200)
    run("purge", "--older-than", "1h", "--namespace", other, "--yes", "--store", url)
    assert namespaces(url) == {name}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--yes"], "--namespace HEX, as `pdstore du` shows it, or --older-than DURATION"),
        (["--older-than", "week"], "write one like 90s, 30min, 12h or 7d"),
        (["--older-than", "1s"], "shorter than the lease of 10 s"),
    ],
)
def test_what_it_cannot_do_is_refused(filled_file, words, said):
    ran = run("purge", *words, "--store", filled_file)
    assert ran.status == 2
    assert said in ran.err
    assert len(namespaces(filled_file)) == 2


@pytest.mark.redis
def test_a_redis_that_tells_no_age_keeps_everything(redis_server, prompts):
    server = redis_server()
    url = fill(server.url, prompts)
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lfu")
    ran = run("purge", "--older-than", "1h", "--yes", "--store", url)
    assert "6 values stay: this store does not tell when they were used" in ran.out
    assert len(namespaces(url)) == 2


@pytest.mark.redis
def test_what_only_one_tier_tells_to_be_old_stays(redis_server, prompts, filled_file):
    server = redis_server()
    fill(server.url, prompts)
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lfu")
    for prompt in prompts:
        age_files(filled_file, prompt.namespace.hex, 8 * 86_400)
    tiers = f"{server.url} {filled_file}"
    ran = run("purge", "--older-than", "7d", "--yes", "--store", tiers)
    assert "6 values stay: this store does not tell when they were used" in ran.out
    assert len(namespaces(server.url)) == len(namespaces(filled_file)) == 2


def test_what_is_used_before_the_answer_stays(old, monkeypatch):
    url, name = old

    class SlowTerminal(Terminal):
        def readline(self, *_: int) -> str:
            age_files(url, name, 0)  # a request has found it
            return super().readline()

    monkeypatch.setattr(sys, "stdin", SlowTerminal("y\n"))
    told = clear(url, "", "7d", is_rehearsal=False, is_agreed=False)
    assert (told.document["num_values"], told.status) == (0, 0)
    assert name in namespaces(url)


def test_a_question_where_standard_input_is_closed_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match="give --yes"):
        progress.confirm("forget all", "--yes")
