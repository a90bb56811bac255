"""The commands and the environment that the files of deploy/ give to programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
MANIFESTS = COMPOSE + sorted(DEPLOY.glob("kustomize/**/*.yaml"))


class _Loader(yaml.SafeLoader):
    """Reads compose's own tags as if they were not there."""


_Loader.add_constructor("!reset", lambda loader, node: None)
_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def services() -> dict[str, dict[str, Any]]:
    """The services of all compose files together, as the last file has them."""
    found: dict[str, dict[str, Any]] = {}
    for path in COMPOSE:
        for name, service in yaml.load(path.read_text(), _Loader)["services"].items():
            found[name] = found.get(name, {}) | service
    return found


def commands() -> list[list[str]]:
    """Every command: a program's or a module's name and its arguments."""
    found = [shlex.split(line) for path in UNITS for line in _exec_lines(path)]
    for path in MANIFESTS:
        for document in yaml.load_all(path.read_text(), _Loader):
            found += _commands_in(document)
    return [[command[0].removeprefix("/opt/pdstore/venv/bin/"), *command[1:]] for command in found]


def commands_of(program: str) -> list[list[str]]:
    """Arguments of each command that runs a program or module."""
    return [
        command[command.index(program) + 1 :] for command in commands() if program in command[:3]
    ]


def options_of(arguments: list[str]) -> set[str]:
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}


def variables() -> set[str]:
    """Names in deploy/ that look like pdstore's variables."""
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    return {name for text in texts for name in re.findall(r"\b(?:PDSTORE|PD)_[A-Z][A-Z_]+", text)}


def _exec_lines(path: Path) -> list[str]:
    return re.findall(r"^ExecStart=(.*)", path.read_text().replace("\\\n", " "), re.MULTILINE)


def _commands_in(node: Any) -> Iterator[list[str]]:
    """Lists under `entrypoint`, `command` and `args`, joined where a container has several."""
    if isinstance(node, dict):
        lists = [node.get(name) for name in ("entrypoint", "command", "args")]
        words = [word for part in lists if isinstance(part, list) for word in part]
        if words:
            yield [str(word) for word in words]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _commands_in(child)
