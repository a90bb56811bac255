"""A process that has imported vLLM once, and forks into a server for each line that it reads.

    python -m tests.adapters.vllm.preloaded

A line is JSON, {"module": "...", "argv": [...], "env": {...}, "log": "..."}: what `python -m` would
run. The answer is the new process's id; it leads a process group. When the input ends, all of them
are killed. A vLLM server is two processes that import for 8 s each, and then there in 2 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Serves until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers
    servers = []
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        servers.append(pid)
        print(pid, file=answers, flush=True)
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _import_vllm() -> None:
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
    _let_later_stages_receive(vllm.v1.worker.cpu_model_runner.CPUModelRunner)


def _let_later_stages_receive(runner: Any) -> None:
    """Allocates what a pipeline stage receives, as vLLM does in the warm-up that it skips here."""
    receive = runner.sync_and_gather_intermediate_tensors

    @functools.wraps(receive)
    def allocated(self: Any, *args: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return receive(self, *args)

    runner.sync_and_gather_intermediate_tensors = allocated


def _become(asked: dict[str, Any]) -> None:
    """Runs a module in this process, and ends it."""
    status = 1
    try:
        _leave(asked["log"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = [asked["module"], *asked["argv"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is belongs in the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _leave(log: str) -> None:
    """A process group, a log and a death of its own; but it ends with its parent."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(stream, number)


if __name__ == "__main__":
    main()
