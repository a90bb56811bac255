"""`pdstore up`: a redis or a Mooncake pool on this host, for a rehearsal, until Ctrl-C."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from pydantic import ByteSize, TypeAdapter, ValidationError

from pdstore.cli.answer import Answer, Output
from pdstore.cli.ports import free_port
from pdstore.errors import ConfigError, StoreError, StoreUnavailable

_START_S, _STOP_S, _PAUSE_S = 20.0, 5.0, 0.02
_HOST = "127.0.0.1"
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Rehearsal:
    """Servers that end with this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, program: str, install: str, arguments: list[str], port: int) -> None:
        """Starts a server and waits until it listens. Raises ConfigError or StoreUnavailable."""
        beside_python = str(Path(sys.executable).parent)
        found = shutil.which(program, path=beside_python) or shutil.which(program)
        if found is None:
            raise ConfigError(f"{program} is not installed: {install}")
        if _listens(port):
            raise ConfigError(f"port {port} is taken: name another one by --port, or none")
        log = self._directory / f"{program}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [found, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us, who then stop it
            )
        self._running.append(process)
        deadline = time.monotonic() + _START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise StoreUnavailable(f"{program} did not start: {''.join(last)}")
            time.sleep(_PAUSE_S)

    def wait(self) -> None:
        """Returns when a signal asks for the end. Raises StoreError if a server ends first."""
        while True:
            for process in self._running:
                if process.poll() is not None:
                    raise StoreError(f"{process.args!r} ended by itself: {process.returncode}")
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends all servers, the last one first."""
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def up(kind: str, memory: str, port: int | None, json_target: str | None = None) -> Answer:
    """Starts a pool, says how to use it, and stops it at Ctrl-C. It listens on loopback alone.

    port: None takes a free one.
    json_target: where a document with the URL goes as soon as the pool serves; None: a line for
    a shell is printed instead.
    """
    num_bytes, output = _bytes_of(memory), Output(json_target)
    with tempfile.TemporaryDirectory(prefix="pdstore_up_") as scratch:
        rehearsal = Rehearsal(Path(scratch))
        try:
            with _signals(signal.default_int_handler), contextlib.suppress(KeyboardInterrupt):
                url = _STARTS[kind](rehearsal, scratch, num_bytes, port)
                if json_target is None:
                    print(f"export PDSTORE_STORE='{url}'", flush=True)
                else:
                    output.emit(Answer({"kind": kind, "store": url, "memory_bytes": num_bytes}))
                print(f"{kind} runs with {memory} until Ctrl-C", file=sys.stderr)
                rehearsal.wait()
        finally:
            with _signals(signal.SIG_IGN):  # a second one would leave a server behind
                rehearsal.stop()
    said = f"{kind} is stopped, and its values are gone"
    return Answer({"stopped": kind}, [said] if json_target is None else [])


def _start_redis(rehearsal: Rehearsal, scratch: str, num_bytes: int, port: int | None) -> str:
    chosen = port or free_port()
    options = f"--port {chosen} --bind {_HOST} --dir {scratch} --maxmemory {num_bytes}"
    limits = ["--appendonly", "no", "--save", "", "--maxmemory-policy", "noeviction"]
    install = "apt-get install redis-server"
    rehearsal.start("redis-server", install, [*options.split(), *limits], chosen)
    return f"redis://{_HOST}:{chosen}/0"


def _start_mooncake(rehearsal: Rehearsal, scratch: str, num_bytes: int, port: int | None) -> str:
    master, metrics, holder = port or free_port(), free_port(), free_port()
    install = "pip install 'pdstore[mooncake]', or without a GPU 'pdstore[mooncake-cpu]'"
    options = f"--rpc_port={master} --rpc_address={_HOST} --metrics_port={metrics}"
    options += f" --metrics_host={_HOST}"
    rehearsal.start("mooncake_master", install, options.split(), master)
    options = f"--host={_HOST} --port={holder} --global_segment_size={num_bytes} --protocol=tcp"
    options += f" --master_server_address={_HOST}:{master} --metadata_server=P2PHANDSHAKE"
    rehearsal.start("mooncake_client", install, options.split(), holder)
    return f"mooncake://{_HOST}:{master}?metrics_port={metrics}"


_STARTS = {"redis": _start_redis, "mooncake": _start_mooncake}


@contextlib.contextmanager
def _signals(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> Iterator[None]:
    """Handles Ctrl-C, SIGTERM and a terminal that is closed in one way."""
    before = {number: signal.signal(number, handler) for number in _ENDS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _bytes_of(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise ConfigError(f"--memory {text!r} is no size; write one like 1GiB") from error


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 0.5):
        return True
    return False
