"""Redis clusters, and a master with its sentinel, for tests."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from examples.ports import free_port
from tests.support.kv import eventually
from tests.support.redis_server import RedisServer

NUM_SLOTS = 16384


class ClusterOfServers:
    """Masters with equal parts of the slots, each with one replica, which know each other at once.

    The nodes' files are written before they start, so the nodes need not be introduced. A cluster
    takes two seconds before it takes writes, however it is made.

    tls: options that name certificate, key and authority; then all speak TLS, nodes too.
    binary: as RedisServer's.
    """

    def __init__(
        self,
        directory: Path,
        num_masters: int = 3,
        replicas: int = 1,
        node_timeout_ms: int = 15_000,
        tls: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        num = num_masters * (1 + replicas)
        ports, buses = ([free_port() for _ in range(num)] for _ in range(2))
        names = [hashlib.sha1(f"{directory}{i}".encode()).hexdigest() for i in range(num)]
        slots = [NUM_SLOTS * i // num_masters for i in range(num_masters + 1)]
        roles = [
            f"master - 0 0 {i + 1} connected {slots[i]}-{slots[i + 1] - 1}"
            if i < num_masters
            else f"slave {names[i % num_masters]} 0 0 {i % num_masters + 1} connected"
            for i in range(num)
        ]
        places = [f"{names[i]} 127.0.0.1:{ports[i]}@{buses[i]} " for i in range(num)]
        self.nodes: list[RedisServer] = []
        for i in range(num):
            home = directory / f"node-{i}"
            home.mkdir()
            lines = [f"{places[j]}{'myself,' * (i == j)}{roles[j]}\n" for j in range(num)]
            end = f"vars currentEpoch {num} lastVoteEpoch 0\n"
            (home / "nodes.conf").write_text("".join([*lines, end]))
            self.nodes.append(
                RedisServer(
                    home,
                    *("--cluster-enabled", "yes", "--cluster-port", str(buses[i])),
                    *("--cluster-node-timeout", str(node_timeout_ms)),
                    *(("--tls-port", str(ports[i]), "--tls-cluster", "yes", *tls) if tls else ()),
                    *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
                    port=ports[i],
                    binary=binary,
                )
            )
        self.masters, self.has_replicas = self.nodes[:num_masters], replicas > 0
        self.names = names
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports[:2])

    def wait(self) -> None:
        """Returns when every node takes commands, and each replica is fed by its master."""
        for node in self.nodes:
            node.wait()
            with node.client() as client:
                _until(lambda c=client: c.cluster("INFO")["cluster_state"] == "ok")
        for node in self.masters if self.has_replicas else ():
            with node.client() as client:
                _until(lambda c=client: _is_fed(c))

    def flush(self) -> None:
        for node in self.masters:
            with node.client() as client:
                client.flushall()

    def close(self) -> None:
        for node in self.nodes:
            node.stop()


@contextlib.contextmanager
def master_with_sentinel(directory: Path) -> Iterator[tuple[RedisServer, str]]:
    """A master that has a replica, and the URL by which a sentinel is asked for the master."""
    for name in ("master", "replica", "sentinel"):
        (directory / name).mkdir()
    with contextlib.ExitStack() as stack:
        master = RedisServer(directory / "master", "--repl-diskless-sync-delay", "0")
        stack.callback(master.stop)
        of = ("--replicaof", "127.0.0.1", str(master.port))
        replica = RedisServer(directory / "replica", *of)
        stack.callback(replica.stop)
        with master.client() as client:
            _until(lambda: _is_fed(client))
        settings = directory / "sentinel" / "sentinel.conf"
        settings.write_text(
            f"sentinel monitor pool 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds pool 2000\nsentinel failover-timeout pool 3000\n"
        )
        sentinel = RedisServer(directory / "sentinel", str(settings), "--sentinel")
        stack.callback(sentinel.stop)
        yield master, f"redis+sentinel://127.0.0.1:{sentinel.port}/pool"


def _is_fed(client: redis.Redis) -> bool:
    """True if a master's first replica follows it."""
    return client.info("replication").get("slave0", {}).get("state") == "online"


def _until(is_so) -> None:
    def is_so_now():
        with contextlib.suppress(redis.RedisError):
            return is_so()

    eventually(is_so_now, 20.0)
