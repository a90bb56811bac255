"""The kinds that are compared: which servers one starts, with which KV connector."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.load.client import Mode
from benchmarks.load.workloads import Sizes
from benchmarks.peers import Role, peer_of, start_service
from benchmarks.shapes import Model
from benchmarks.vllm_engine import ENVIRONMENT
from examples.demo.client import is_healthy
from examples.demo.processes import Processes
from examples.ports import free_ports
from examples.vllm_serve import CPU_ENVIRONMENT

_CEILING_TOKENS = 600_000
_SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
_SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}
_BLOCK = 64
_ROUTER_S = 30.0
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


@dataclass
class Instance:
    """One engine: options of its command line, and its environment."""

    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Kind(NamedTuple):
    """The servers of one kind, and the way to ask them.

    service: the peer of pdstore that needs a server beside the engines; "": none does.
    of_service: options of that server's command line.
    router: options of a router in front of the engines, which is asked then; None: there is none.
    gpu: tokens of the engine's own cache, where it is not the workload's.
    """

    instances: Sequence[Instance]
    mode: Mode = "alone"
    service: str = ""
    gpu: int | None = None
    router: Sequence[str] | None = None
    of_service: Sequence[str] = ()


class Disk(NamedTuple):
    """The tier below a host's memory: a directory, and the most that a kind may keep there.

    copy: `copy` of the tier's URL; "": its default.
    """

    directory: Path
    gib: float
    copy: str = ""

    def url(self, **options: str) -> str:
        """Returns the URL of a tier of pdstore. options: more of it."""
        given = {"budget": str(int(self.gib * (1 << 30)))} | options
        given |= {"copy": self.copy} if self.copy else {}
        query = "&".join(f"{name}={value}" for name, value in given.items())
        return f"file://{self.directory}/below?{query}"

    def of_lmcache(self, **options: object) -> list[str]:
        """Returns the options of LMCache's server; by its default it evicts nothing there."""
        below = {"type": "fs_native", "base_path": str(self.directory)}
        most = {"max_capacity_gb": self.gib, "eviction": {"eviction_policy": "LRU"}}
        return ["--l2-adapter", json.dumps(below | most | options)]


def kinds(pool: Path, sizes: Sizes, settings: Mapping[str, str], disk: Disk) -> dict[str, Kind]:
    """Returns every kind by name. settings: more of pdstore's, by variable."""
    num_bytes = int(sizes.pool_gib * (1 << 30))
    arena, files = f"shm://load?size={num_bytes}&dir={pool}", f"file://{pool}/files"

    def instance(url: str, role: str = "both", **more: str) -> Instance:
        environment = {
            "PD_TRANSFER_VIA_STORAGE": "1",
            "PDSTORE_STORE": url,
            "PDSTORE_ROLE": role,
            "PDSTORE_WEIGHTS": "load",
            "PDSTORE_REQUIRE_STORE": "1",
        }
        return Instance((), environment | dict(settings) | more)

    pair = [instance(arena, "prefill"), instance(arena, "decode")]
    return _of_others(sizes, disk) | {
        "shm": Kind([instance(arena)]),
        "shm_prompts": Kind([instance(arena, PDSTORE_SAVE_DECODED="0")]),
        "shm_auto": Kind([instance(arena, PDSTORE_LOAD="auto")]),
        "shm_events": Kind([replace(instance(arena), options=_publishing(pool))]),
        "tiers": Kind([instance(f"{arena} {disk.url()}")]),
        "tiers_direct": Kind([instance(f"{arena} {disk.url(direct='1')}")]),
        "files": Kind([instance(f"{files}?budget={num_bytes}")]),
        "relayed": Kind(pair, "relayed"),
        "concurrent": Kind(pair, "concurrent"),
        "two": Kind([instance(arena)] * 2, router=()),
        "two_affinity": Kind([instance(arena)] * 2, router=("--affinity", "prefix")),
    }


def _of_others(sizes: Sizes, disk: Disk) -> dict[str, Kind]:
    """Returns the kinds without pdstore."""
    lmcache = _peer("lmcache", "kv_producer")
    num_bytes = int(sizes.pool_gib * (1 << 30))
    return {
        "plain": Kind([Instance()]),
        "ceiling": Kind([Instance()], gpu=_CEILING_TOKENS),
        "native": Kind([Instance(["--kv-offloading-size", f"{sizes.pool_gib:g}"])]),
        "simple": Kind([_connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=num_bytes)]),
        "lmcache": Kind([lmcache], service="lmcache"),
        "lmcache_disk": Kind([lmcache], service="lmcache", of_service=disk.of_lmcache()),
        "lmcache_direct": Kind(
            [lmcache], service="lmcache", of_service=disk.of_lmcache(use_odirect=True)
        ),
        "lmcache_pd": Kind([lmcache] * 2, "relayed", service="lmcache"),
        "nixl": Kind([_peer("nixl", "kv_producer"), _peer("nixl", "kv_consumer")], "relayed"),
    }


def _publishing(directory: Path) -> list[str]:
    """Returns the options by which vLLM publishes KV events; nobody needs to read them."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    return ["--kv-events-config", json.dumps({**events, "endpoint": f"ipc://{directory}/events"})]


def _connector(name: str, role: str = "kv_both", **extra: object) -> Instance:
    transfer = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return Instance(["--kv-transfer-config", json.dumps(transfer)])


def _peer(name: str, role: Role) -> Instance:
    transfer, environment = peer_of(name, role)
    return Instance(["--kv-transfer-config", json.dumps(transfer)], environment)


class Fleet:
    """Starts the servers of a kind.

    engine: `vllm` or `mini`. tree: the checkout that the servers import pdstore from.
    model: of vLLM: a shape's name, or a directory.
    gpus: of the instances of a kind, in order; the last one also serves all further instances.
    options: of the engine's command line, behind all others.
    """

    def __init__(
        self,
        processes: Processes,
        scratch: Path,
        sizes: Sizes,
        engine: Literal["vllm", "mini"],
        options: Sequence[str],
        gpus: Sequence[str],
        *,
        is_cpu: bool,
        model: str = "llama-8b",
    ) -> None:
        self._gpus, self._named = gpus, model
        self._processes, self._model, self._sizes = processes, scratch / "model", sizes
        self._is_mini, self._options, self._is_cpu = engine == "mini", options, is_cpu

    def start(self, name: str, kind: Kind, tree: Path) -> list[str]:
        """Returns the URLs of the engines, which do not answer yet. Raises DemoError."""
        self._make_model()
        environment = self._environment(tree)
        gib = f"{self._sizes.pool_gib:g}"
        start_service(kind.service, gib, self._processes, kind.of_service)
        tokens = kind.gpu or self._sizes.gpu
        ports = free_ports(len(kind.instances))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for number, each in enumerate(kind.instances):
            engine = self._mini(tokens) if self._is_mini else self._vllm(tokens)
            command = [*engine, "--host", "127.0.0.1", "--port", str(ports[number])]
            self._processes.start(
                f"load-{name}-{number}",
                [sys.executable, "-m", *command, *each.options, *self._options],
                partial(is_healthy, urls[number]),
                environment | self._gpu(number) | dict(each.environment),
            )
        return urls

    def asked(self, kind: Kind, urls: list[str], within_s: float) -> list[str]:
        """Returns the URLs to ask, once all that was started answers. Raises DemoError."""
        self._processes.wait_ready(within_s, lambda text: None)
        return urls if kind.router is None else self._start_router(urls, kind.router)

    def _gpu(self, number: int) -> dict[str, str]:
        chosen = self._gpus[min(number, len(self._gpus) - 1)] if self._gpus else None
        return {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}

    def _start_router(self, urls: Sequence[str], options: Sequence[str]) -> list[str]:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "pdstore.router", "--port", str(port), *options]
        command += [word for each in urls for word in ("--decode", each)]
        self._processes.start("load-router", command, partial(is_healthy, url))
        self._processes.wait_ready(_ROUTER_S, lambda text: None)
        return [url]

    def _environment(self, tree: Path) -> dict[str, str]:
        multiprocessing = "0" if self._is_cpu else "1"
        return {
            **os.environ,
            **ENVIRONMENT,
            **(CPU_ENVIRONMENT if self._is_cpu else {}),
            "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
            "PYTHONSAFEPATH": "1",  # not this checkout before `tree`
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
        }

    def _vllm(self, tokens: int) -> list[str]:
        model, chunk = self._served, 512 if self._is_cpu else 8192
        dtype = "float32" if self._is_cpu and not model.has_states else "bfloat16"
        command = ["vllm.entrypoints.cli.main", "serve", str(model.path)]
        command += ["--load-format", model.load_format, "--dtype", dtype]
        command += ["--max-model-len", str(self._longest), "--max-num-seqs", "64"]
        command += ["--max-num-batched-tokens", str(chunk)]
        command += ["--disable-uvicorn-access-log", "--shutdown-timeout", "5"]
        if model.has_states:  # vLLM chooses the size of their blocks
            command += ["--enable-prefix-caching"]
        else:
            command += ["--block-size", str(_BLOCK)]
            command += ["--num-gpu-blocks-override", str(tokens // _BLOCK)]
        if self._is_cpu:
            return [*command, "--enforce-eager"]
        # Several instances start on one GPU at once: none may reckon with what is free just now.
        command += ["--gpu-memory-utilization", "0.05"]
        command += ["--kv-cache-memory-bytes", str(model.cache_bytes(tokens))]
        chooses = model.has_states or model.is_mla  # vLLM chooses
        command += [] if chooses else ["--attention-backend", "FLASH_ATTN"]
        return [*command, "--compilation-config", json.dumps(_GRAPHS)]

    def _mini(self, tokens: int) -> list[str]:
        command = ["examples.mini_engine", "--model", str(self._model)]
        command += ["--num-blocks", str(tokens // 16), "--max-num-seqs", "16"]
        return [*command, "--max-model-len", str(self._longest)]

    @property
    def _longest(self) -> int:
        return self._sizes.longest + 1024

    def _make_model(self) -> None:
        """Writes what the engines serve, once: a shape, or a tiny Llama."""
        from benchmarks.checkpoint import Shape, make_model, write_tokenizer

        vocabulary = self._sizes.vocabulary
        if self._is_mini:
            if not self._model.exists():
                shape = Shape(vocabulary, 4, 256, self._longest)
                make_model(shape, self._model, "cpu", "float32")
            return
        changes = {"vocab_size": vocabulary} | (_SMALL if self._is_cpu else {})
        directory = Path(tempfile.mkdtemp(dir=self._model.parent)) / "model"
        changes = changes if self._named == "llama-8b" else {}
        self._served = Model.open(self._named, directory, **changes)
        if self._served.path == directory.resolve():
            write_tokenizer(directory)
