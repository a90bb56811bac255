"""Stage: P, D and a router in front of one pool, with proxies between all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.chaos.asking import Answer, ask
from benchmarks.chaos.engines import MINI, Engine
from benchmarks.chaos.plan import INSTANCES
from benchmarks.chaos.pools import Pool
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.spawner import Child, Spawner
from benchmarks.chaos.wall_clock import WallClock
from examples.ports import free_ports
from pdstore.store.url import urls_in

_READY_S = 60.0
_LINKS = (("client-router", "router"), ("router-prefill", "prefill"), ("router-decode", "decode"))
_ENVIRONMENT = {
    "PD_TRANSFER_VIA_STORAGE": "1",
    "PDSTORE_WEIGHTS": "chaos",
    "PDSTORE_STAGING": "4MiB",
    "PDSTORE_WORKERS": "3",
    "PDSTORE_HANDOFF_WAIT_S": "1",
    "PDSTORE_DEADLINE_S": "1",
    "PDSTORE_DRAIN_S": "1",
}


@dataclass(frozen=True)
class Options:
    """The options in which stages over one kind of pool differ.

    mode: the router's.
    faulty: the options of `faulty+`, with which P and D fail on purpose; "" for neither.
    env, arguments: added to P's and D's environment and command line.
    router: added to the router's command line.
    is_direct: True if there are no proxies between clients, the router, P and D.
    engine: P's and D's.
    """

    mode: str = "relay"
    faulty: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    router: Sequence[str] = ()
    is_direct: bool = False
    engine: Engine = MINI


class Stage:
    """The instances of one pool. Its URL for clients is `url`."""

    def __init__(
        self, spawner: Spawner, pool: Pool, model: Path, options: Options, seed: str
    ) -> None:
        self.pool, self.options = pool, options
        self._spawner, self._model, self._seed = spawner, model, seed
        self._ports = dict(zip(INSTANCES, free_ports(len(INSTANCES)), strict=True))
        self.children: dict[str, Child] = {}
        self.links: dict[str, Proxy] = {}
        self.clocks: dict[str, WallClock] = {}

    @property
    def url(self) -> str:
        return self._url_through("client-router", "router")

    def url_of(self, name: str) -> str:
        """Returns an instance's own URL, past any proxy."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def _url_through(self, link: str, target: str) -> str:
        """Returns the URL by which one side reaches an instance: a proxy's, if there are any."""
        if self.options.is_direct:
            return self.url_of(target)
        return f"http://127.0.0.1:{self.links[link].port}"

    async def open(self) -> None:
        await self.pool.open()
        for link, target in () if self.options.is_direct else _LINKS:
            self.links[link] = Proxy(link, self._ports[target], f"{self._seed} {link}")
            await self.links[link].open()
        self.links |= self.pool.links
        for name in INSTANCES:
            self.start(name)
        await self.ready()

    def start(self, name: str) -> None:
        """Starts an instance, or starts it again."""
        clock = None
        if name != "router":
            path = self._model.parent / "clocks"
            number = INSTANCES.index(name)
            self.clocks[name] = WallClock.create(path, number)
            clock = (path, number)
        engine = self.options.engine
        env = {"PDSTORE_BLOCK_TOKENS": str(engine.block_tokens), **_ENVIRONMENT}
        if name != "router":
            env |= engine.env(name, self._store_of(name))
        env |= {**self.pool.env, **self.options.env}
        self.children[name] = self._spawner.spawn(name, self._command(name), env, clock)

    async def ready(self) -> None:
        """Waits until all instances answer. Raises TimeoutError, with the end of a log."""
        for name, child in self.children.items():
            await wait_ready(child, self.url_of(name))

    async def ready_again(self, name: str) -> None:
        """Waits until an instance answers that was started again. Raises TimeoutError."""
        await wait_ready(self.children[name], self.url_of(name))

    async def heal(self) -> list[str]:
        """Makes everything whole again. Returns the instances that had died by themselves."""
        died: list[str] = []
        for link in self.links.values():
            await link.be("pass")
        for clock in self.clocks.values():
            clock.shift(0.0)
        for child in (*self.children.values(), *self.pool.servers.values()):
            child.go_on()
        await self.pool.heal()
        for name, child in self.pool.servers.items():
            if not child.is_alive:
                died.append(name)
        for name, child in self.children.items():
            if not child.is_alive:
                died.append(f"{name}\n{tail_of(child.log)}")
                self.start(name)
        await self.ready()
        return died

    async def close(self) -> None:
        for child in self.children.values():
            child.kill()
        for link in self.links.values():
            await link.close()
        await self.pool.close()

    def _command(self, name: str) -> list[str]:
        if name == "router":
            command = ["-m", "pdstore.router", "--port", str(self._ports[name])]
            command += ["--mode", self.options.mode]
            for role in ("prefill", "decode"):
                command += [f"--{role}", self._url_through(f"router-{role}", role)]
            command += ["--prefill-timeout", "3", "--read-timeout", "8"]
            return [*command, *self.options.router]
        store = self._store_of(name)
        made = self.options.engine.command(self._model, self._ports[name], name, store)
        return [*made, *self.options.arguments]

    def _store_of(self, name: str) -> str:
        """Returns the store's URL for P or D."""
        return " ".join(map(self._with_faults, urls_in(self.pool.url_for(name))))

    def _with_faults(self, url: str) -> str:
        if not self.options.faulty:
            return url
        faulty = f"faulty+{url.removeprefix('faulty+')}"
        return f"{faulty}{'&' if '?' in url else '?'}{self.options.faulty}"


@contextlib.asynccontextmanager
async def open_stage(
    spawner: Spawner, pool: Pool, model: Path, options: Options, seed: str
) -> AsyncIterator[Stage]:
    stage = Stage(spawner, pool, model, options, seed)
    try:
        await stage.open()
        yield stage
    finally:
        await stage.close()


async def answers_of_one(
    spawner: Spawner,
    model: Path,
    prompts: Sequence[Sequence[int]],
    engine: Engine = MINI,
) -> list[Answer]:
    """Returns what all answers are compared with: those of one instance without a pool."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    alone = spawner.spawn("alone", engine.command(model, port, "", ""), engine.env("", ""))
    try:
        await wait_ready(alone, url)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return [await ask(client, url, prompt, engine) for prompt in prompts]
    finally:
        alone.kill()


async def wait_ready(child: Child, url: str) -> None:
    """Returns when an instance serves. Raises TimeoutError, with the end of its log."""
    deadline = time.monotonic() + _READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        while not await _serves(client, url, is_router=child.name == "router"):
            if time.monotonic() > deadline or not child.is_alive:
                raise TimeoutError(f"{child.name} is not ready\n{tail_of(child.log)}")
            await asyncio.sleep(0.02)


async def _serves(client: httpx.AsyncClient, url: str, *, is_router: bool) -> bool:
    """True if an instance answers; a router says 503 while it sees no D."""
    try:
        return (await client.get(url + "/health")).status_code == 200 or is_router
    except httpx.TransportError:
        return False


def tail_of(log: Path, num_lines: int = 30) -> str:
    """Returns the end of a log under its name."""
    lines = log.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n".join([f"--- end of {log.name}:", *lines])
