"""Connections to a redis server from a store URL, and redis-py's errors as the store's."""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
)
from redis.retry import Retry

from pdstore.errors import (
    ConfigError,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    WrongLength,
)
from pdstore.format.keys import BlockKey
from pdstore.store.url import StoreURL

CHUNK = 256 << 10
"""Redis moves values in pieces of this size faster than whole ones."""
_CONNECT_S = 1.0
_TIMEOUT_S = 5.0

_ERRORS: tuple[tuple[type[RedisError], type[StoreError]], ...] = (
    (AuthenticationError, StoreDenied),  # of redis-py's, the special before the general
    (AuthorizationError, StoreDenied),
    (NoPermissionError, StoreDenied),
    (OutOfMemoryError, StoreFull),
    (redis.TimeoutError, StoreTimeout),
    (redis.ConnectionError, StoreUnavailable),
)
_KNOWN = {
    "redis": "timeout",
    "rediss": "ca, cert, key, timeout",
    "redis+unix": "db, timeout",
}
_UNKNOWN_AUTHORITY = " (name the authority of the server's certificate: ?ca=/path/ca.pem)"
_CLUSTER = (AskError, ClusterDownError, MovedError)


def connection_pool(url: StoreURL) -> redis.ConnectionPool:
    """Returns connections as the URL says, none of them made yet. Raises ConfigError."""
    options = {
        "username": url.username,
        "password": url.password,
        "db": _database(url),
        "socket_timeout": url.seconds("timeout", _TIMEOUT_S),
        "socket_connect_timeout": _CONNECT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
        "max_connections": 4096,
        # hiredis, where it is installed, reads twice as fast, but copies what it sends
        "command_packer": PythonRespSerializer(CHUNK, _encode),
        **_without_client_info(),
        **_endpoint(url),
    }
    url.finish(_KNOWN[url.scheme])
    return redis.ConnectionPool(**options)  # type: ignore[arg-type]


def _endpoint(url: StoreURL) -> dict[str, object]:
    if url.scheme == "redis+unix":
        if url.host or not url.path:
            raise ConfigError(f"{url.label}: write redis+unix:///path/redis.sock")
        return {"connection_class": redis.UnixDomainSocketConnection, "path": url.path}
    server = {"host": url.host or "localhost", "port": url.port or 6379}
    if url.scheme == "redis":
        return {**server}
    return {
        **server,
        "connection_class": redis.SSLConnection,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": url.options.pop("ca", None),
        "ssl_certfile": url.options.pop("cert", None),
        "ssl_keyfile": url.options.pop("key", None),
        "redis_connect_func": _connect_and_ping,
    }


def error_of(label: str, error: RedisError, key: BlockKey, num_done: int) -> StoreError:
    """Returns the store's error for the error of redis-py that ended a call at `key`."""
    if isinstance(error, _CLUSTER):
        why = "is a node of a Redis Cluster, and only single servers can be used"
        return StoreError(f"{label} {why}: {error}", num_done=num_done)
    if str(error).startswith("WRONGTYPE"):  # a list, a hash: removed like other corrupt values
        return WrongLength(f"{label}: {key} holds no string: {error}", num_done=num_done)
    kinds = (ours for theirs, ours in _ERRORS if isinstance(error, theirs))
    hint = _hint(label, error)
    return next(kinds, StoreError)(f"{label}: {error}: {key}{hint}", num_done=num_done)


def _hint(label: str, error: RedisError) -> str:
    """Returns what to change in the URL, where an error tells."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _UNKNOWN_AUTHORITY
    if isinstance(error, InvalidResponse) or "reply type byte" in str(error):
        return "; what answers there is no redis server: is the port right?"
    is_lost = isinstance(error, redis.TimeoutError | redis.ConnectionError)
    if label.startswith("rediss:") and is_lost:
        return (
            "; rediss:// speaks TLS: a server without it is redis://, and one that asks its clients"
            " for a certificate takes ?cert= and ?key="
        )
    return ""


def _database(url: StoreURL) -> int:
    text = url.options.pop("db", "0") if url.scheme == "redis+unix" else url.path.strip("/") or "0"
    if not text.isdecimal():
        raise ConfigError(f"{url.label}: {text!r} is no database number")
    return int(text)


def _encode(argument: str | int | bytes | memoryview) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


def _connect_and_ping(connection: redis.SSLConnection) -> None:
    """Reads the session tickets of TLS 1.3, which hiredis takes for a reply to nothing."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("PING")  # type: ignore[no-untyped-call]
    connection.read_response()


def _without_client_info() -> dict[str, None]:
    """Returns the options that keep redis-py from CLIENT SETINFO, which few users may call."""
    if hasattr(redis, "DriverInfo"):
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}
