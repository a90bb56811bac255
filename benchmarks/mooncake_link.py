"""Two network namespaces as two hosts: pdstore over Mooncake against the link between them.

    python -m benchmarks.mooncake_link [--gbit 1 10] [--delay-ms 1] [--json FILE]      (as root)

P's host has the master, the process that holds the memory, and P, whose puts cross no link. D's
host has D, which gets what P put. D also puts, as a P does whose own host holds no memory. The link
is a veth pair shaped by tc; nothing leaves the namespaces. Three ways take turns on the same
buffers: one plain TCP stream, the library's batch calls, and pdstore with its checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

from benchmarks.raw import RawMooncake
from benchmarks.report import seconds_of
from pdstore.format import block
from pdstore.format.keys import BlockKey
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.base import Slots
from pdstore.store.mooncake.store import MooncakeStore
from pdstore.testing.values import filled_slots, fresh_keys

P_HOST, D_HOST = "10.77.0.1", "10.77.0.2"
MASTER, HOLDER, METRICS, STREAM = 51051, 51052, 51003, 51004
SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20}
COUNT = 16
ROUNDS = 7
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--delay-ms", type=float, default=1.0, help="added to each round trip")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=["p", "d"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker = Worker()
        print(json.dumps(worker.p() if given.worker == "p" else worker.d()))
        worker.store.close()
        return
    if os.geteuid() != 0 or shutil.which("ip") is None:
        sys.exit("needs root and iproute2: apt-get install iproute2")
    results = []
    for gbit in given.gbit:
        with two_hosts() as hosts:
            shaped = shape(hosts, gbit, given.delay_ms)
            with mooncake(hosts[0]):
                rows = [
                    row
                    for host, role in zip(hosts, "pd", strict=True)
                    for row in json.loads(
                        run_in(host, sys.executable, "-m", __spec__.name, "--worker", role)
                    )
                ]
        results.append({"gbit": gbit, "shaped": shaped, "rows": rows})
        show(gbit, shaped, rows)
    if given.json:
        machine = {"cpus": os.cpu_count(), "system": os.uname().release}
        given.json.write_text(json.dumps({"machine": machine, "links": results}, indent=1) + "\n")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Makes two namespaces with a veth pair between them, and removes them at the end."""
    hosts = tuple(f"pdstore-{secrets.token_hex(3)}" for _ in range(2))
    for host in hosts:
        sh("ip", "netns", "add", host)
    try:
        sh(*f"ip link add v netns {hosts[0]} type veth peer name v netns {hosts[1]}".split())
        for host, address in zip(hosts, (P_HOST, D_HOST), strict=True):
            sh(*f"ip -n {host} addr add {address}/24 dev v".split())
            for device in ("lo", "v"):
                sh(*f"ip -n {host} link set {device} up".split())
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            sh("ip", "netns", "del", host)


def shape(hosts: tuple[str, str], gbit: float, delay_ms: float) -> str:
    """Sets the rate, and half of the round trip's delay, each way; returns what it set, in words.

    Without the kernel's netem, sets the rate alone.
    """
    netem = f"netem rate {gbit}gbit delay {delay_ms / 2}ms limit 100000"
    burst = max(256, int(gbit * 256))
    tbf = f"tbf rate {gbit}gbit burst {burst}kb latency 50ms"
    for discipline in (netem, tbf):
        adding = [f"tc -n {host} qdisc add dev v root {discipline}".split() for host in hosts]
        done = [subprocess.run(each, capture_output=True, check=False) for each in adding]
        if not any(each.returncode for each in done):
            return discipline if "delay" in discipline else f"{discipline}; no delay: no netem here"
    sys.exit(f"tc cannot shape here: {done[0].stderr.decode()}")


@contextlib.contextmanager
def mooncake(host: str) -> Iterator[None]:
    """Runs a master, a holder and a server of plain bytes on P's host."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        master = [f"--rpc_port={MASTER}", f"--rpc_address={P_HOST}", f"--metrics_port={METRICS}"]
        lender = [f"--host={P_HOST}", f"--port={HOLDER}", "--global_segment_size=3GB"]
        lender += [f"--master_server_address={P_HOST}:{MASTER}", "--metadata_server=P2PHANDSHAKE"]
        bin_directory = Path(sys.executable).parent
        for port, *command in (
            (MASTER, bin_directory / "mooncake_master", *master),
            (HOLDER, bin_directory / "mooncake_client", *lender),
            (STREAM, sys.executable, "-c", _STREAM_SERVER),
        ):
            log = stack.enter_context((Path(scratch) / f"{port}.log").open("wb"))
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *map(str, command)],
                stdout=log,
                stderr=log,
                env={**os.environ, "MC_TCP_BIND_ADDRESS": P_HOST},
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            run_in(host, sys.executable, "-c", _WAIT, P_HOST, str(port))
        yield


_WAIT = """
import socket, sys, time
for _ in range(200):
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()
        break
    except OSError:
        time.sleep(0.05)
else:
    sys.exit("nobody listens on " + sys.argv[2])
"""
_STREAM_SERVER = f"""
import socket
data, view = bytes(1 << 20), memoryview(bytearray(1 << 20))
with socket.create_server(("{P_HOST}", {STREAM})) as server:
    while True:
        with server.accept()[0] as connection:
            while asked := connection.recv(9):
                left = int.from_bytes(asked[1:], "big")
                if asked[:1] == b"g":
                    while left > 0:
                        left -= connection.send(data[: min(left, len(data))])
                else:
                    while left > 0:
                        left -= connection.recv_into(view, min(left, len(view)))
                    connection.sendall(b"k")
"""


class Worker:
    """P or D on its host. Both derive the same keys from sizes and rounds."""

    def __init__(self) -> None:
        url = f"mooncake://{P_HOST}:{MASTER}?lease=10"
        self.store = cast(MooncakeStore, open_store(url, read_settings(store=url)))
        self.raw = RawMooncake(url, self.store)
        self.rows: list[Row] = []

    def p(self) -> list[Row]:
        """Puts what D will get."""
        for name, size in SIZES.items():
            slots = self._slots(size)
            seconds = []
            for turn in range(ROUNDS + 1):
                keys, headers = named(size, f"P{turn}")
                self.raw.put(keys, slots)
                seconds.append(seconds_of(partial(self._put, keys, headers, slots)))
            self._add(name, "P put, no link", size, seconds)
        return self.rows

    def d(self) -> list[Row]:
        """Gets what P put, and puts, in turn with the raw calls and a plain stream."""
        with socket.create_connection((P_HOST, STREAM)) as stream:
            for name, size in SIZES.items():
                slots = self._slots(size)
                seconds: dict[str, list[float]] = {}
                for turn in range(ROUNDS + 1):
                    for way, function in self._ways(size, turn, slots, stream).items():
                        seconds.setdefault(way, []).append(seconds_of(function))
                    mine = named(size, f"D{turn}")[0]
                    self.store.remove(mine)
                    self.raw.remove(mine)
                for way, times in seconds.items():
                    self._add(name, way, size, times)
        self._add_latencies()
        return self.rows

    def _ways(
        self, size: int, turn: int, slots: Slots, stream: socket.socket
    ) -> dict[str, Callable[[], object]]:
        theirs, their_headers = named(size, f"P{turn}")
        mine, headers = named(size, f"D{turn}")
        return {
            "get": lambda: self._get(theirs, their_headers, slots),
            "raw get": lambda: self.raw.get(theirs, slots),
            "tcp receive": lambda: receive(stream, slots.view),
            "put": lambda: self._put(mine, headers, slots),
            "raw put": lambda: self.raw.put(mine, slots),
            "tcp send": lambda: send(stream, slots.view),
        }

    def _put(self, keys: list[BlockKey], headers: list[block.Header], slots: Slots) -> None:
        for i, header in enumerate(headers):
            block.seal(slots.value(i), header)
        assert self.store.put(keys, slots) == COUNT

    def _get(self, keys: list[BlockKey], headers: list[block.Header], slots: Slots) -> None:
        assert self.store.get(keys, slots) == COUNT
        for i, header in enumerate(headers):
            assert block.verify(slots.value(i), header) is None

    def _slots(self, size: int) -> Slots:
        view = self.store.allocate(size * COUNT)
        view[:] = secrets.token_bytes(size * COUNT)
        return Slots(view, size, range(COUNT), [size] * COUNT)

    def _add(self, name: str, way: str, size: int, seconds: list[float]) -> None:
        rate = size * COUNT / median(seconds[1:]) / 1e9  # the first warms up
        self.rows.append({"value": name, "way": way, "gb_s": rate, "seconds": seconds[1:]})

    def _add_latencies(self) -> None:
        """Measures a match of one key, a match of 1,024 keys, and the get of one block."""
        keys, size = fresh_keys(1024), SIZES["1 MiB"]
        self.store.put(keys, filled_slots([b"x"] * len(keys)))
        block_key, slots = named(size, "P1")[0][:1], self._slots(size).part(0, 1)
        for way, function in {
            "match of 1 key": lambda: self.store.match(keys[:1]),
            "match of 1,024 keys": lambda: self.store.match(keys),
            "get of 1 MiB": lambda: self.store.get(block_key, slots),
        }.items():
            times = quantiles([seconds_of(function) for _ in range(100)], n=100)
            self.rows.append({"way": way, "p50_ms": times[49] * 1e3, "p99_ms": times[98] * 1e3})


def named(size: int, turn: str) -> tuple[list[BlockKey], list[block.Header]]:
    """Returns the keys and headers of one batch, the same in every process."""
    hashes = [f"{size}{turn}.{i}".encode().ljust(16, b".") for i in range(COUNT)]
    keys = [BlockKey(f"pds1:link:{h.hex()}") for h in hashes]
    return keys, [block.Header(0, 0, 0, 1, 64, size - 64, b"b" * 16, h) for h in hashes]


def send(stream: socket.socket, view: memoryview) -> None:
    stream.sendall(b"p" + len(view).to_bytes(8, "big"))
    stream.sendall(view)
    stream.recv(1)


def receive(stream: socket.socket, view: memoryview) -> None:
    stream.sendall(b"g" + len(view).to_bytes(8, "big"))
    left = len(view)
    while left:
        left -= stream.recv_into(view[:left])


def show(gbit: float, shaped: str, rows: list[Row]) -> None:
    print(f"\n{gbit:g} Gbit/s ({gbit / 8:.3f} GB/s), {shaped}")
    for row in rows:
        if "gb_s" in row:
            share = row["gb_s"] / (gbit / 8)
            print(
                f"  {row['value']} x {COUNT}  {row['way']:14} {row['gb_s']:.3f} GB/s {share:4.0%}"
            )
        else:
            print(f"  {row['way']:20} p50 {row['p50_ms']:.2f} ms  p99 {row['p99_ms']:.2f} ms")


def run_in(host: str, *command: str) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def sh(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
