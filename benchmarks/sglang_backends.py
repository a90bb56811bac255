"""The pools between two SGLang servers: pdstore's stores, and SGLang's own backends."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.sglang_serve import HICACHE

Started = tuple[list[str], dict[str, str]]
"""The options and the environment of P and D, once their store runs."""


@dataclass
class Place:
    """Where the pools of a session lie, and what runs for them.

    pool: a memory-backed directory. budget: of a pool, as its URL has it.
    logs: the directory of the stores' logs.
    store: the process of a store that is a server; None without one.
    """

    pool: Path
    budget: str
    logs: Path
    store: subprocess.Popen[bytes] | None = None


_MASTER_PORT, _REDIS_PORT = 50061, 31999
_HOST_POOL = "--hicache-size=7"  # GB: the last of HiCache's options wins; a prompt of 32k has 4.3
_EXTRA = '--hicache-storage-backend-extra-config={"prefetch_threshold": 64}'


def _pdstore(store: str) -> Started:
    return [*HICACHE, _HOST_POOL], {
        "PD_TRANSFER_VIA_STORAGE": "1",
        "PDSTORE_STORE": store,
        "PDSTORE_WEIGHTS": "random-0",
        "PDSTORE_REQUIRE_STORE": "1",
    }


def _files(place: Place, running: contextlib.ExitStack) -> Started:
    return _pdstore(f"file://{place.pool}/pdstore-file?budget={place.budget}")


def _arena(place: Place, running: contextlib.ExitStack) -> Started:
    directory = place.pool / "pdstore-shm"
    directory.mkdir()
    return _pdstore(f"shm://sglang?size={place.budget}&dir={directory}")


def _redis(place: Place, running: contextlib.ExitStack) -> Started:
    options = ["--port", str(_REDIS_PORT), "--save", "", "--io-threads", "4"]
    place.store = _beside(place, "redis-server", options, running)
    running.callback(setattr, place, "store", None)
    return _pdstore(f"redis://127.0.0.1:{_REDIS_PORT}/0")


def _theirs(backend: str) -> list[str]:
    kept = [each for each in HICACHE if not each.startswith("--hicache-storage-backend")]
    return [*kept, _HOST_POOL, f"--hicache-storage-backend={backend}", _EXTRA]


def _their_files(place: Place, running: contextlib.ExitStack) -> Started:
    directory = place.pool / "theirs"
    directory.mkdir()  # P and D would both make it
    return _theirs("file"), {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory)}


def _their_mooncake(place: Place, running: contextlib.ExitStack) -> Started:
    options = [f"--rpc_port={_MASTER_PORT}", "--rpc_address=127.0.0.1", "--metrics_port=9013"]
    _beside(place, "mooncake_master", options, running)
    return _theirs("mooncake"), {
        "MOONCAKE_MASTER": f"127.0.0.1:{_MASTER_PORT}",
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "12gb",
    }


def _beside(
    place: Place, program: str, options: list[str], running: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    """Starts a store's process, which ends with `running`."""
    found = shutil.which(program)
    if found is None:
        raise RuntimeError(f"no {program} on the PATH")
    with (place.logs / f"{program}.log").open("ab") as log:
        process = subprocess.Popen([found, *options], stdout=log, stderr=subprocess.STDOUT)
    running.callback(process.wait, 10)
    running.callback(process.kill)
    time.sleep(1)
    return process


BACKENDS: dict[str, Callable[[Place, contextlib.ExitStack], Started]] = {
    "pdstore-shm": _arena,
    "pdstore-file": _files,
    "pdstore-redis": _redis,
    "file": _their_files,
    "mooncake": _their_mooncake,
}
