"""Opens connections to a URL's redis servers; turns redis-py's errors into StoreErrors."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry
from redis.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.store.redis.cluster import Address, Cluster, OneServer
from pdstore.store.redis.remedies import CONNECTION_ERRORS, ends_connection, remedy_of, short
from pdstore.store.url import StoreURL

_CONNECT_TIMEOUT_S = 1.0
_TIMEOUT_S = 5.0
_IDLE_S = 60.0  # middleboxes forget an idle connection after minutes: Azure's after four
_KEEPALIVE = {
    name: seconds
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if (name := getattr(socket, option, None)) is not None
}
_PORT = 6379
_SENTINEL_PORT = 26379

_OF_A_CLUSTER = (AskError, ClusterDownError, MovedError)
_ERRORS: dict[tuple[type[RedisError], ...], type[StoreError]] = {
    # redis-py's errors, subclasses first; after a ReadOnlyError, a master has become a replica
    (AuthenticationError, AuthorizationError, NoPermissionError): StoreDenied,
    (OutOfMemoryError,): StoreFull,
    (redis.TimeoutError,): StoreTimeout,
    (redis.ConnectionError, ReadOnlyError, *_OF_A_CLUSTER): StoreUnavailable,
}
_OTHER_SERVER = "what answers there is no redis server, or a proxy: name the server itself"

Servers: TypeAlias = OneServer | Cluster


def _parts_of(scheme: str) -> tuple[bool, str]:
    """Returns whether a URL scheme means TLS, and its kind: `valkeys+cluster` is TLS to a cluster.

    Valkey uses redis' protocol, so its schemes are other names for redis' schemes.
    """
    name, _, kind = scheme.partition("+")
    return name in ("rediss", "valkeys"), kind


def open_servers(url: StoreURL) -> Servers:
    """Returns the server or cluster of a URL without connecting to it. Raises ConfigError."""
    is_tls, kind = _parts_of(url.scheme)
    options = {**_options(url), **(_tls(url) if is_tls else {})}
    if kind != "unix":
        options |= _lasting(url, is_tls=is_tls, is_of_sentinel=kind == "sentinel")
    kinds = {"unix": _by_socket, "cluster": _cluster, "sentinel": _by_sentinel}
    servers = kinds.get(kind, _by_address)(url, options)
    names = {"": (), "cluster": (), "unix": ("db",), "sentinel": ("db", "sentinel_password")}
    tls = ("ca", "cert", "key") if is_tls else ()
    of_network = () if kind == "unix" else ("idle",)
    url.finish(", ".join([*tls, *names[kind], "timeout", *of_network]))
    return servers


def _options(url: StoreURL) -> dict[str, Any]:
    # so redis-py sends no CLIENT SETINFO, which few redis users are allowed to send
    old = {"lib_name": None, "lib_version": None}
    driver = {"driver_info": None} if hasattr(redis, "DriverInfo") else old
    return {
        "username": url.username,
        "password": url.password,
        "socket_timeout": url.seconds("timeout", _TIMEOUT_S, 600),
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
        "redis_connect_func": _connect_and_ping,
        "max_connections": 4096,
        # if hiredis is installed, it reads twice as fast, but it would copy the values of a SET
        "command_packer": PythonRespSerializer(256 << 10, _encode),
        **driver,
    }


def _tls(url: StoreURL) -> dict[str, Any]:
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": url.options.pop("ca", None),
        "ssl_certfile": url.options.pop("cert", None),
        "ssl_keyfile": url.options.pop("key", None),
    }


def _lasting(url: StoreURL, *, is_tls: bool, is_of_sentinel: bool) -> dict[str, Any]:
    """Returns what keeps connections through a network, which may forget idle ones silently."""
    base: type[Any] = redis.SSLConnection if is_tls else redis.Connection
    if is_of_sentinel:
        base = SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
    return {
        "connection_class": _renewing(base, url.seconds("idle", _IDLE_S)),
        "socket_keepalive": True,
        "socket_keepalive_options": _KEEPALIVE,
    }


def _renewing(base: type[Any], idle_s: float = math.inf) -> type[Any]:
    """Returns a class of connections that connect anew after an idle time of over `idle_s`.

    What a middlebox has forgotten would swallow the command, and cost the whole timeout. They also
    connect anew after a reply that a server hangs up after: it may do so a moment later, and then
    the next call would fail, maybe one of another thread.
    """

    class Renewing(base):  # type: ignore[misc]
        _taken_at = 0.0
        _is_ending = False

        def connect(self) -> None:
            """Prepares for a call; the pool calls it each time that it lends the connection."""
            now = time.monotonic()
            if self._is_ending or now - self._taken_at > idle_s:
                self.disconnect()
            self._is_ending = False
            self._taken_at = now
            super().connect()

        def read_response(self, *args: object, **options: object) -> object:
            try:
                return super().read_response(*args, **options)
            except ResponseError as error:
                self._is_ending = self._is_ending or ends_connection(error)
                raise

    return Renewing


def _by_address(url: StoreURL, options: dict[str, Any]) -> Servers:
    database = _database(url, url.path.strip("/") or "0")
    options |= {"host": url.host or "localhost", "port": url.port or _PORT, "db": database}
    call_timeout_s = options["socket_timeout"] / 2
    return OneServer(lambda: redis.ConnectionPool(**options), call_timeout_s)


def _by_socket(url: StoreURL, options: dict[str, Any]) -> Servers:
    if url.host or not url.path:
        raise ConfigError(f"{url.label}: write {url.scheme}:///path/redis.sock")
    options |= {"connection_class": _renewing(redis.UnixDomainSocketConnection), "path": url.path}
    database = _database(url, url.options.pop("db", "0"))
    options |= {"db": database}
    call_timeout_s = options["socket_timeout"] / 2
    return OneServer(lambda: redis.ConnectionPool(**options), call_timeout_s)


def _cluster(url: StoreURL, options: dict[str, Any]) -> Servers:
    if url.path.strip("/") not in ("", "0"):
        raise ConfigError(f"{url.label}: a cluster has no databases: leave {url.path} out")

    def open_pool(address: Address) -> redis.ConnectionPool:
        return redis.ConnectionPool(host=address.host, port=address.port, **options)

    return Cluster(_addresses(url, _PORT), open_pool)


def _by_sentinel(url: StoreURL, options: dict[str, Any]) -> Servers:
    name = url.path.strip("/")
    if not re.fullmatch(r"[^/]+", name):
        raise ConfigError(f"{url.label}: name the master: {url.scheme}://host:26379/mymaster")
    ask = {
        "socket_timeout": _CONNECT_TIMEOUT_S,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "retry": options["retry"],
        "password": url.options.pop("sentinel_password", None),
        **{name: options[name] for name in options if name.startswith("socket_keepalive")},
    }
    is_tls = "ssl_cert_reqs" in options
    tls = {"ssl": True, **{k: v for k, v in options.items() if k.startswith("ssl_")}}
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        _addresses(url, _SENTINEL_PORT), sentinel_kwargs={**ask, **(tls if is_tls else {})}
    )
    database = _database(url, url.options.pop("db", "0"))
    options |= {"ssl": is_tls, "db": database}

    def open_pool() -> redis.ConnectionPool:
        return SentinelConnectionPool(name, sentinel, **options)  # type: ignore[no-untyped-call]

    sentinels = [each.connection_pool for each in sentinel.sentinels]
    call_timeout_s = options["socket_timeout"] / 2
    return OneServer(open_pool, call_timeout_s, *sentinels)


def _addresses(url: StoreURL, port: int) -> Sequence[Address]:
    """Returns the hosts of the URL, and empties `url.more_hosts`."""
    others, url.more_hosts = url.more_hosts, ()
    found = [Address(host, of_host or port) for host, of_host in others]
    return [Address(url.host or "localhost", url.port or port), *found]


def error_of(label: str, error: object, key: object, num_done: int) -> StoreError:
    """Returns the StoreError for redis-py's error or for the unexpected reply that ended a call."""
    if not isinstance(error, RedisError):
        message = f"{label}: {str(error)[:80]!r} is no answer of a redis server: {key}"
        return StoreError(message, num_done=num_done, remedy=_OTHER_SERVER)
    is_of_a_cluster = isinstance(error, _OF_A_CLUSTER) and not isinstance(error, MasterDownError)
    if is_of_a_cluster and "+cluster://" not in label:
        remedy = "it is a node of a cluster: write redis+cluster:// or valkey+cluster://"
        return StoreError(f"{label}: {error}", num_done=num_done, remedy=remedy)
    if str(error).startswith("WRONGTYPE"):  # the key has a list or a hash: the caller removes it
        return WrongLength(f"{label}: {key} holds no string: {error}", num_done=num_done)
    kinds = (ours for theirs, ours in _ERRORS.items() if isinstance(error, theirs))
    remedy = remedy_of(label, error)
    is_about_key = isinstance(error, NoPermissionError) or not remedy
    about = f": {key}" if is_about_key and not isinstance(error, CONNECTION_ERRORS) else ""
    words = short(str(error).partition(" : <")[0]).rstrip(
        ". "
    )  # redis-py appends what it was given
    words = re.sub(r"^Error -?\d+ connecting to (\S+)\. ", r"cannot connect to \1: ", words)
    message = f"{label}: {words}{about}"
    return next(kinds, StoreError)(message, num_done=num_done, remedy=remedy)


@contextlib.contextmanager
def named_errors(label: str, key: object, num_done: int = 0) -> Iterator[None]:
    """Turns redis-py's errors in a `with` into StoreErrors, also those about unreadable replies."""
    try:
        yield
    except (RedisError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise error_of(label, error, key, num_done) from error


def refuses_writes(error: object) -> bool:
    """True if a server that may be read says that it takes no writes now."""
    return isinstance(error, ResponseError) and str(error).startswith(("MISCONF", "NOREPLICAS"))


def _database(url: StoreURL, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{url.label}: {text!r} is no database number")
    return int(text)


def _encode(argument: str | int | bytes | memoryview) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


def _connect_and_ping(connection: redis.Connection) -> None:
    """Prepares a new connection; sends a PING, and reads all that comes until the PING's reply.

    The server may send an error and hang up, if it has too many clients. It may send the session
    tickets of TLS 1.3, which hiredis would take for a reply to no command.
    """
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("PING")  # type: ignore[no-untyped-call]
    try:
        connection.read_response()
    except ResponseError as error:  # a server that may not write denies even a PING
        if not isinstance(error, NoPermissionError) and not refuses_writes(error):
            raise
