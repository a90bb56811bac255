"""Faults between two SGLang servers and their pool: D's answer has to be that of one server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sglang_instance import Answer, Instance, distance
from benchmarks.stored_bytes import damage

Row = dict[str, Any]

_TOKENS = 8
_START_S = 150.0


class Scene(NamedTuple):
    """The servers, and the pool between P and D.

    directory: of the pool's values; empty where a server keeps them.
    store: the process of a store that is a server; None for files.
    prompt: one that nobody has asked yet.
    settle_s: seconds in which P has stored it.
    """

    directory: Path
    store: subprocess.Popen[bytes] | None
    plain: Instance
    p: Instance
    d: Instance
    prompt: list[int]
    settle_s: float

    def save(self) -> None:
        """Lets P store the prompt, and forget it."""
        self.p.ask(self.prompt, 1)
        time.sleep(self.settle_s)
        self.p.forget()

    def ask(self) -> Row:
        """Returns D's answer beside that of one server.

        Where D has loaded pages, that server answers from its own cache; else it computes the
        whole prompt. A page that is computed alone rounds otherwise than within a whole prompt.
        `one_server_computed` says which of the two it was.
        """
        given = self._answer(self.d)
        one = self._answer(self.plain)
        if given.num_cached:
            one = self._answer(self.plain)
        for each in (self.plain, self.d):
            each.forget()
        return {
            "d_first_token_s": given.first_at - given.asked_at,
            "d_computed": len(self.prompt) - given.num_cached,
            "one_server_computed": len(self.prompt) - one.num_cached,
            "equals_one_server": given.ids == one.ids,
            "d_to_one_server": distance(given, one),
        }

    def _answer(self, server: Instance) -> Answer:
        return server.ask(self.prompt, _TOKENS, logprobs=True)


def _damaged(scene: Scene) -> Row:
    """Damages all that is stored; then lets P store the prompt once more, and asks D again."""
    scene.save()
    num_bits, found = damage(scene.directory), scene.ask()
    scene.save()
    return {"bits": num_bits, **found, "d_computed_when_saved_again": scene.ask()["d_computed"]}


def _restarted(scene: Scene) -> Row:
    """Starts D again over a pool that P has filled."""
    scene.save()
    scene.d.stop()
    scene.d.start()
    return {"started_s": scene.d.wait_ready(_START_S), **scene.ask()}


def _dead(scene: Scene) -> Row:
    """Kills P when it has answered: pages that it has not stored will not come."""
    scene.p.ask(scene.prompt, 1)
    scene.p.stop(kill=True)
    found = scene.ask()
    scene.p.start()
    return {"started_s": scene.p.wait_ready(_START_S), **found}


def _hung(scene: Scene) -> Row:
    """Stops the store's process while D asks."""
    assert scene.store is not None
    scene.save()
    with _stopped(scene.store):
        return scene.ask()


def _gone(scene: Scene) -> Row:
    """Ends the store, or deletes its files, under the servers."""
    scene.save()
    if scene.store is not None:
        scene.store.kill()
        scene.store.wait(10)
    else:
        shutil.rmtree(scene.directory, ignore_errors=True)
    return scene.ask()


@contextlib.contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


FAULTS: dict[str, Callable[[Scene], Row]] = {
    "pages damaged": _damaged,
    "store hung": _hung,
    "D restarted over a warm pool": _restarted,
    "P killed after its answer": _dead,
    "store gone": _gone,
}
"""The quick ones come first, and the end of the pool last."""


def suits(fault: str, scene: Scene) -> bool:
    """True if a scene can have the fault: files are damaged, and a process hangs."""
    unsuited = "pages damaged" if scene.store is not None else "store hung"
    return fault != unsuited
