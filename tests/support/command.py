"""The command `pdstore` in this process, and pools for it to look into."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any, NamedTuple
from unittest import mock

from pdstore.cli.main import main
from pdstore.format import block
from pdstore.format.keys import Namespace, Part, PromptKeys
from pdstore.store.base import Slots, Store

PAYLOAD = 1000


class Ran(NamedTuple):
    """A run of the command that has ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str, **variables: str) -> Ran:
    """Runs the command with settings of its own; `tests/cli/test_main.py` starts the program."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PDSTORE_", "PD_"))}
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {**own, **variables}, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(arguments)
    return Ran(status, out.getvalue(), err.getvalue())


def run_json(*arguments: str, **variables: str) -> Any:
    """Runs the command with `--json`; it must not fail to run."""
    ran = run(*arguments, "--json", **variables)
    assert ran.status in (0, 1), ran.err
    return ran.json


def namespaces(url: str) -> set[str]:
    """Returns the namespaces of a pool, as `pdstore du` finds them."""
    return {use["namespace"] for use in run_json("du", "--store", url)["namespaces"]}


def namespace_of(name: str, *, parts: tuple[Part, ...] = (Part(0, 0),)) -> Namespace:
    return Namespace({"test": name}, parts, block_tokens=16)


def save(store: Store, keys: PromptKeys, *, start: int = 0, stop: int | None = None) -> None:
    """Puts sealed values for the blocks start..stop of a prompt."""
    parts = keys.namespace.parts
    for number in range(start, len(keys) if stop is None else stop):
        for part, key in zip(parts, keys.store_keys(parts, number, number + 1), strict=True):
            header = block.Header(
                block.FLAG_TAIL if ":partial:" in key else 0,
                part.group,
                part.shard,
                1,
                keys.tokens_of(number),
                PAYLOAD,
                keys.namespace.header_digest(part),
                keys.hash_of(number),
            )
            value = memoryview(bytearray(block.HEADER_BYTES + PAYLOAD))
            block.seal(value, header)
            assert store.put([key], Slots(value, len(value), [0], [len(value)])) == 1
