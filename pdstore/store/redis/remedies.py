"""remedy_of: what a user should change, by the error of a redis server or of the way to it."""

from __future__ import annotations

import re

import redis
from redis.exceptions import InvalidResponse, RedisError

from pdstore.errors import ValueRefused

CONNECTION_ERRORS = (redis.ConnectionError, redis.TimeoutError)
"""Errors about a connection, not about one key."""

_NO_REDIS = "what answers there is no redis server: is the port right?"
_SILENT = "the server is slow or hangs, or is no redis server: is the port right?"
_REPLICA = (
    "it is a replica: write its master's address, or make this name lead to the master;"
    " redis+sentinel://HOST:26379/NAME follows a master that moves"
)
_REMEDIES = {
    "certificate is not valid for": (
        "write a host that the server's certificate names, or have it name this one (in a cluster,"
        " nodes are known by their addresses unless cluster-announce-hostname is set)"
    ),
    "certificate has expired": "renew the server's certificate, or correct this host's clock",
    "certificate is not yet valid": "correct the clock of this host, or its maker's",
    "CERTIFICATE_VERIFY_FAILED": "name the authority of the server's certificate: ?ca=/path/ca.pem",
    "reply type byte": _NO_REDIS,
    "cluster support disabled": "it is a single server: write redis:// or valkey://",
    "read only replica": _REPLICA,
    "Link with MASTER is down": _REPLICA,
    "connecting to ?:": "set cluster-announce-hostname, or cluster-announce-ip, of each node",
    "DB index is out of range": "the server has fewer databases: 0 is there always",
    "No master found": "write the port of a sentinel (26379), and the name of a master it watches",
    "unknown command 'SENTINEL'": (
        "it is a redis and not a sentinel: write redis://{host}, or a sentinel's port (26379)"
    ),
    "max number of clients": "raise maxclients of the server, or connect fewer instances to it",
    "Authentication required": "write its password: {scheme}://:PASSWORD@{host}",
    "invalid username-password": (
        "see user and password in PDSTORE_STORE: a password alone is {scheme}://:PASSWORD@{host}"
    ),
    "in protected mode": (
        "the server takes connections of its own host alone: give it a password (requirepass) and"
        " write {scheme}://:PASSWORD@{host}, or in a private network set protected-mode no"
    ),
    "unable to persist to disk": (
        "the server cannot write its snapshot (a full disk, or no right to write to its `dir`), so"
        ' it refuses all writes: a pool needs no snapshots, so set `save ""` (redis-cli CONFIG SET'
        ' save "", and in redis.conf)'
    ),
    "loading the dataset in memory": (
        'wait until the server has read its file; a pool needs none: set `save ""` and'
        " `appendonly no`"
    ),
    "used memory > 'maxmemory'": (
        "raise the pool's size (maxmemory of the server); and if its maxmemory-policy is"
        " noeviction, which refuses what is saved when it is full, set it to volatile-lru, which"
        " evicts the least recently used blocks"
    ),
    "Not enough good replicas": (
        "start its replicas, or set min-replicas-to-write 0: a pool may lose what was written last"
    ),
    "busy running a script": "find who runs a long script on this server: redis-cli SLOWLOG GET",
    "no permissions to": (
        "allow this user the commands and keys that docs/stores.md lists: redis-cli ACL SETUSER"
    ),
    "Name or service not known": "correct the host's name in PDSTORE_STORE, or name its address",
    "No address associated": "correct the host's name in PDSTORE_STORE, or name its address",
    "name resolution": "correct the host's name in PDSTORE_STORE, or look at this host's DNS",
}
"""Remedies, each under words that the text of an error of redis-py or of a server contains."""

_ENDED = (
    "see the server's log: it, or a proxy, ended the connection. The URL of one that speaks TLS is"
    " {tls}://"
)
_ENDINGS = (
    *("reset by peer", "closed by server", "Broken pipe", "closed the connection"),
    "EOF occurred in violation of protocol",  # over TLS
)
_TOO_LARGE = re.compile(r"bulk length|request size|maximum allowed size|too (large|big|long)")
_RAISE = (
    "small values pass: raise the limit of sizes above this one; the server's log names it"
    " (proto-max-bulk-len, client-query-buffer-limit, client-output-buffer-limit or"
    " maxmemory-clients; a proxy has one of its own). Or make values smaller: PDSTORE_BLOCK_TOKENS,"
    " the same for P and D"
)
_MAX_WORDS = 200  # characters; redis explains some errors in 900


def remedy_of(label: str, error: RedisError) -> str:
    """Returns what the user should change; an empty text if the error does not tell."""
    message = str(error)
    scheme, _, place = label.partition("://")
    place = place.rpartition("@")[2]
    for words, remedy in _REMEDIES.items():
        if words in message:
            return remedy.format(scheme=scheme, host=place.partition("/")[0] or place)
    if isinstance(error, InvalidResponse):
        return _NO_REDIS
    is_tls = scheme.partition("+")[0] in ("rediss", "valkeys")
    if is_tls and isinstance(error, CONNECTION_ERRORS) and "refused" not in message:
        plain = scheme.replace("rediss", "redis").replace("valkeys", "valkey")
        return (
            f"{scheme}:// speaks TLS: a server without it is {plain}://, and one that asks its"
            " clients for a certificate takes ?cert= and ?key="
        )
    if isinstance(error, CONNECTION_ERRORS) and any(words in message for words in _ENDINGS):
        tls = scheme.replace("redis", "rediss").replace("valkey", "valkeys")
        return _ENDED.format(tls=tls)
    return _SILENT if message == "Timeout reading from socket" else ""


def may_be_about_size(error: object) -> bool:
    """True if an error, or a connection that ended, may be about a value's length alone."""
    words = str(error)
    if isinstance(error, redis.ConnectionError):
        return any(ending in words for ending in _ENDINGS)
    return isinstance(error, redis.ResponseError) and bool(_TOO_LARGE.search(words))


def ends_connection(error: redis.ResponseError) -> bool:
    """True if a server, or a proxy, may hang up after this reply."""
    return "Protocol error" in str(error) or may_be_about_size(error)


def refused_value(label: str, key: object, num_bytes: int, num_done: int) -> ValueRefused:
    """Returns the error about a value that ends each connection that moves it."""
    message = f"{label}: the server, or a proxy, refuses a value of {num_bytes:,} bytes: {key}"
    return ValueRefused(message, num_done=num_done, remedy=_RAISE)


def short(words: str) -> str:
    """Returns the first sentences of a server's explanation, at most about 200 characters."""
    if len(words) <= _MAX_WORDS:
        return words
    sentences, _, _ = words[:_MAX_WORDS].rpartition(". ")
    return sentences or words[:_MAX_WORDS] + "..."
