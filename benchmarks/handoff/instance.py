"""An engine in a process of its own, driven over a pipe as a client drives a server."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks.handoff.recorder import Recorder, now


class Prompt(NamedTuple):
    """Random token ids, which every instance makes from the seed by itself."""

    num_tokens: int
    seed: int


class Ask(NamedTuple):
    """A request for a prompt that was staged before, so that nothing makes or carries it now.

    is_compared: its facts have the prompt's ids too, and the logprobs of the answer's.
    skips_cache: all of it is computed, also what the engine has in its own cache.
    """

    name: str
    prompt: Prompt
    max_tokens: int
    params: dict[str, Any] | None = None
    is_compared: bool = False
    skips_cache: bool = False


class Served(Protocol):
    """An engine inside the process."""

    def stage(self, prompt: Prompt) -> None:
        """Makes the ids of a prompt, before it is asked for."""

    def submit(self, ask: Ask, say: Callable[[str, str, Any], None]) -> None:
        """Starts a request. Says ("first", name, seconds) and ("done", name, facts) later."""

    def step(self) -> bool:
        """Does what there is to do; False if that is nothing. For engines without a thread."""

    def is_idle(self) -> bool:
        """True if no request, save or load is left."""

    def about(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Instance:
    """The client's end: starts the process, sends requests, receives what it says.

    make: makes the engine, called in the process with `arguments`.
    environment: set there before anything is imported but `preload`.
    log: takes the process's output.
    preload: modules that are imported once for all instances, which are forked then.
    tree: a checkout whose code the process runs, in place of this one's.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Served],
        arguments: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        preload: Sequence[str] = (),
        tree: Path | None = None,
    ) -> None:
        self.name, self.log = name, log
        self._inbox: list[tuple[float, str, str, Any]] = []
        context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
        if preload and tree is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(list(preload))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, arguments, environment, str(log)), name=name
        )
        with _path_of(tree):
            self._process.start()
        theirs.close()

    def ready(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the start. Returns what the engine says about itself."""
        about: dict[str, Any] = self.wait("about", "", timeout_s)[1]
        return about

    def stage(self, prompt: Prompt) -> None:
        """Makes a prompt there; returns when it is made."""
        self._pipe.send(prompt)
        self.wait("staged", "")

    def ask(self, ask: Ask) -> float:
        """Sends a request. Returns the time at which it was sent."""
        at = now()
        self._pipe.send(ask)
        return at

    def wait(self, kind: str, name: str, timeout_s: float = 120) -> tuple[float, Any]:
        """Returns when this message came, and its value. Raises RuntimeError or TimeoutError."""
        end = now() + timeout_s
        while True:
            for i, (at, its_kind, its_name, value) in enumerate(self._inbox):
                if its_kind == "error":
                    raise RuntimeError(f"{self.name}: {value}\n{self._tail()}")
                if (its_kind, its_name) == (kind, name):
                    del self._inbox[i]
                    return at, value
            left = end - now()
            if left <= 0 or not self._pipe.poll(left):
                raise TimeoutError(
                    f"{self.name}: no {kind} {name} in {timeout_s} s\n{self._tail()}"
                )
            try:
                words = self._pipe.recv()
            except EOFError:
                raise RuntimeError(f"{self.name} ended\n{self._tail()}") from None
            self._inbox.append((now(), *words))

    def record(self) -> None:
        """Begins to record the watched calls."""
        self._pipe.send("record")

    def recorded(self) -> list[Any]:
        """Ends it. Returns the calls as spans."""
        self._pipe.send("recorded")
        spans: list[Any] = self.wait("spans", "")[1]
        return spans

    def settle(self, timeout_s: float = 120) -> None:
        """Waits until nothing is left to do there."""
        self._pipe.send("settle")
        self.wait("idle", "", timeout_s)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(15)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-3000:]
        return ""


@contextlib.contextmanager
def _path_of(tree: Path | None) -> Iterator[None]:
    """Lets processes that are spawned meanwhile import from another checkout first."""
    ours = sys.path.copy()
    sys.path[:0] = [str(tree.resolve())] if tree is not None else []
    yield
    sys.path[:] = ours


def _serve(
    pipe: Connection,
    make: Callable[..., Served],
    arguments: dict[str, Any],
    environment: dict[str, str],
    log: str,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    try:
        engine = make(**arguments)
        pipe.send(("about", "", engine.about()))
        _answer(pipe, engine, Recorder())
        engine.close()
    except Exception:  # noqa: BLE001 - whatever it is, the client reports it
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("error", "", traceback.format_exc()))
    os._exit(0)  # whatever threads a library left


def _answer(pipe: Connection, engine: Served, recorder: Recorder) -> None:
    """Takes requests and steps the engine until the client says None or is gone."""

    talking = threading.Lock()

    def say(kind: str, name: str, value: Any) -> None:
        with talking:
            pipe.send((kind, name, value))

    is_asked_to_settle = False
    while True:
        has_worked = engine.step()
        if is_asked_to_settle and engine.is_idle():
            say("idle", "", None)
            is_asked_to_settle = False
        pause = 0.0 if has_worked else 0.001 if is_asked_to_settle else 0.1
        if not pipe.poll(pause):
            continue
        word = _next_word(pipe)
        if word is None:
            return
        if word == "settle":
            is_asked_to_settle = True
        else:
            _obey(word, engine, recorder, say)


def _obey(
    word: Any, engine: Served, recorder: Recorder, say: Callable[[str, str, Any], None]
) -> None:
    if isinstance(word, Ask):
        engine.submit(word, say)
    elif isinstance(word, Prompt):
        engine.stage(word)
        say("staged", "", None)
    elif word == "record":
        recorder.begin()
    else:
        say("spans", "", recorder.take())


def _next_word(pipe: Connection) -> Any:
    """Returns the client's next message, or None when the client is gone."""
    try:
        return pipe.recv()
    except EOFError:
        return None
