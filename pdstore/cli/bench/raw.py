"""Raw: the plain calls that each kind of store stands on, to compare the store with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from pdstore.format.keys import BlockKey
from pdstore.native.library import address_of
from pdstore.store.base import Slots, Store
from pdstore.store.mooncake.library import Library, MooncakeConfig
from pdstore.store.mooncake.store import MooncakeStore
from pdstore.store.url import StoreURL


class Raw(Protocol):
    """Moves the same values as a store, without headers, checksums or any rule."""

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> None: ...
    def get(self, keys: Sequence[BlockKey], slots: Slots) -> None: ...
    def remove(self, keys: Sequence[BlockKey]) -> None: ...


def raw_of(scheme: str, url: str, store: Store, temporary: Path) -> Raw:
    """Returns the raw calls of the store that was opened at `url`; copies in memory for others.

    temporary: a directory on the file system to measure, for files.
    """
    if scheme == "file":
        return RawFiles(temporary)
    if scheme.endswith("+cluster"):
        return RawRedis(_cluster_client(url), bytes, store.label)
    if scheme.startswith(("redis", "valkey")):
        return RawRedis(_server_client(url), memoryview, store.label)
    if scheme == "mooncake":
        return RawMooncake(url, cast(MooncakeStore, store))
    return RawCopies()


class RawCopies:
    """Copies in this process's memory."""

    def __init__(self) -> None:
        self._values: dict[BlockKey, bytearray] = {}

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        for i, key in enumerate(keys):
            self._values[key] = bytearray(slots.value(i))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        for i, key in enumerate(keys):
            slots.value(i)[:] = self._values[key]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._values.pop(key, None)


class RawFiles:
    """open, write and close; open, readinto and close."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        for i, key in enumerate(keys):
            with open(self._directory / key, "wb", buffering=0) as file:
                file.write(slots.value(i))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        for i, key in enumerate(keys):
            with open(self._directory / key, "rb", buffering=0) as file:
                file.readinto(slots.value(i))

    def remove(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            (self._directory / key).unlink(missing_ok=True)


class RawRedis:
    """Pipelines of SET and GET.

    argument: makes what the client sends of a value's memory.
    """

    def __init__(
        self, client: Any, argument: Callable[[memoryview], bytes | memoryview], label: str
    ) -> None:
        self._client, self._argument, self._label = client, argument, label

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        values = (self._argument(slots.value(i)) for i in range(len(keys)))
        self._ask(("SET", *each) for each in zip(_raw(keys), values, strict=True))

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        for i, value in enumerate(self._ask(("GET", key) for key in _raw(keys))):
            slots.value(i)[:] = value

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._ask(("UNLINK", key) for key in _raw(keys))

    def _ask(self, commands: Iterable[tuple[str | bytes | memoryview, ...]]) -> list[Any]:
        """Returns the replies. Raises StoreError."""
        from pdstore.store.redis.connection import named_errors

        with named_errors(self._label, "raw"):
            pipe = self._client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute())


def _server_client(url: str) -> Any:
    """Returns a client with the store's own connections: as fast, and with the same rights."""
    from pdstore.store.redis.connection import open_servers

    return open_servers(StoreURL.of(url)).masters()[0]


def _cluster_client(url: str) -> Any:
    from redis.cluster import RedisCluster

    first = StoreURL.of(url)
    return RedisCluster(
        host=first.host,
        port=first.port or 6379,
        username=first.username,
        password=first.password,
        ssl=first.scheme.partition("+")[0] in ("rediss", "valkeys"),
        ssl_ca_certs=first.options.get("ca"),
        ssl_certfile=first.options.get("cert"),
        ssl_keyfile=first.options.get("key"),
        protocol=2,
    )


class RawMooncake:
    """batch_put_from and batch_get_into on the store's own connection and registered memory."""

    def __init__(self, url: str, store: MooncakeStore) -> None:
        self._lookup, self._data = store.connections
        config = MooncakeConfig.from_url(StoreURL.of(url))
        self._put_config = Library(config).put_config(is_pinned=False)

    def put(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        addresses = _addresses(slots)
        with self._data.call() as raw:
            codes = raw.batch_put_from(_raw(keys), addresses, list(slots.sizes), self._put_config)
        assert not any(codes), codes

    def get(self, keys: Sequence[BlockKey], slots: Slots) -> None:
        addresses = _addresses(slots)
        with self._data.call() as raw:
            assert raw.batch_get_into(_raw(keys), addresses, list(slots.sizes)) == [*slots.sizes]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        with self._lookup.call() as raw:
            raw.batch_remove(_raw(keys), True)


def _addresses(slots: Slots) -> list[int]:
    base = address_of(slots.view)
    return [base + number * slots.slot_bytes for number in slots.numbers]


def _raw(keys: Sequence[BlockKey]) -> list[str]:
    return [f"{key}:raw" for key in keys]
