"""Zygote: a process that has imported the engine and forks instances of it, each within 50 ms.

It reads one order a line and answers with the pid of the new process:

    {"argv": [...], "env": {...}, "log": FILE, "clock": null or [FILE, number]}

An argv that begins with "-m" is a module run in the fork, any other is a program. All of them die
with the zygote, and the zygote with whoever started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

from benchmarks.chaos.wall_clock import WallClock

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_THREADS_END_S = 10.0  # those that load a checkpoint


def main() -> None:
    import_all()
    import_vllm() if sys.argv[2] == "vllm" else load_model(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be waited for
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
        print(pid, flush=True)


def import_all() -> None:
    """Imports what an instance needs, and starts no thread: threads do not survive a fork."""
    import torch

    import pdstore.store.arena.store
    import pdstore.store.redis.store  # noqa: F401

    torch.set_num_threads(1)


def import_vllm() -> None:
    """Imports what both processes of `vllm serve` need, and has them made by a fork, too."""
    import multiprocessing

    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker

    import pdstore.adapters.vllm.connector  # noqa: F401

    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # on CPUs it spawns


def load_model(model: str) -> None:
    """Loads the checkpoint once, since that imports the most; each instance loads it again."""
    from examples.mini_engine.config import parse
    from examples.mini_engine.model import Model

    Model(parse(["--model", model]))
    deadline = time.monotonic() + _THREADS_END_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError("a thread was started that does not end, and no fork would have it")
        time.sleep(0.01)


def become(order: dict[str, Any]) -> None:
    """Makes this fork the process that is ordered. Never returns."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        fd = os.open(path, flags, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(1, 2)
    os.environ.update(order["env"])
    argv = order["argv"]
    if argv[0] != "-m":
        os.execvp(argv[0], argv)
    if order["clock"] is not None:
        WallClock.join(*order["clock"]).install()
    sys.argv = argv[1:]
    status = 1
    try:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=False)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
