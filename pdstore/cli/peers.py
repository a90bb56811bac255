"""Compares the pools and namespaces that P and D report: they must be the same.

The client is urllib's. httpx would save about 3 of the 28 lines that ask, since it has no timeout
for a whole answer either; it takes 63 ms and six packages, and without proxies ignores
SSL_CERT_FILE.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import AliasPath, BaseModel, Field

from pdstore.async_runner import AsyncRunner
from pdstore.cli.answer import Finding, bad, info, ok, warn
from pdstore.errors import ConfigError
from pdstore.settings import read_settings
from pdstore.store.connect import place_of

_MAX_BYTES = 4 << 20  # more of an answer is not read; an engine's /metrics is far smaller
_TIMEOUT_S = 5.0
_PATH = "/pdstore"
_FIELDS = (
    "D's log names the field that differs when the next hand-off comes. To see it here, start both"
    " with PDSTORE_STATUS_PORT and name these ports; for an instance on another host, whose page"
    " only its own host can read: ssh -N -L 8301:127.0.0.1:ITS_PORT HOST, and name"
    " http://127.0.0.1:8301"
)
_NO_PDSTORE = (
    "start the instance with PD_TRANSFER_VIA_STORAGE=1 (in vLLM, also see that VLLM_PLUGINS is"
    " unset or names pdstore), and name the URL of its API; where that shows no metrics, set"
    " PDSTORE_STATUS_PORT and name this port"
)
_NO_REQUEST = "it has answered no request yet, and vLLM's /metrics tells of pdstore only then"
_ONE_ROLE = (
    "give P and D each an address of its own (in Kubernetes, each a Service whose selector has a"
    " label that only its pods have)"
)
_TRIES = 4  # with two instances behind a URL, one is missed in 1 of 16 runs
_OWN_NAMES = ("127.0.0.1", "localhost", "::1")
_LEASE = "write the same ?lease= in PDSTORE_STORE of both (redis: the same PDSTORE_..._TTL_S)"

_MAX_SAID = 400  # characters
_ITS_LOG = "look at that instance's log: what it names keeps it from its pool"


class Peer(BaseModel):
    """The part of an instance's status that is compared with another instance's.

    digest: the digest of the instance's namespace.
    fields: the namespace as `Namespace.described`; empty if only metrics tell the namespace.
    pool: the id of the instance's pool; None if it does not tell the id or does not know it yet.
    store: the URL of the instance's store, without secrets; empty if it does not tell.
    role: the instance's role; empty if it does not tell.
    lease_s: seconds that the store keeps a matched value; 0 if not known yet.
    problem: what the instance says is wrong with its pool now; None if it says nothing.
    url: the URL at which the instance was asked.
    format: the number of the format in which it stores values; empty if it is only in `fields`.
    """

    digest: str = Field(validation_alias=AliasPath("namespace", "hex"))
    fields: dict[str, str] = Field(validation_alias=AliasPath("namespace", "fields"))
    pool: str | None = Field(None, validation_alias=AliasPath("pool", "id"))
    store: str = ""
    role: str = ""
    lease_s: float = Field(0.0, validation_alias=AliasPath("pool", "lease_s"))
    problem: str | None = None
    url: str = ""
    format: str = ""


def _metrics_of(url: str, timeout_s: float) -> Peer | Finding | None:
    address = url.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        text = _get(address, timeout_s).decode("utf-8", "replace")
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, http.client.HTTPException):
        return None
    samples = itertools.chain.from_iterable(family.samples for family in families)
    described = [sample.labels for sample in samples if _describes(sample)]
    if not described:
        is_young = any(family.name.endswith("pdstore_info") for family in families)
        return bad(f"peer {url}", _NO_REQUEST, "send it one, then ask again") if is_young else None
    # a process that does not know the pool's id yet shows none
    labels = max(described, key=lambda labels: bool(labels.get("pool")))
    return Peer.model_validate(
        {
            "namespace": {"hex": labels["namespace"], "fields": {}},
            "pool": {"id": labels.get("pool") or None},
            "store": labels.get("store", ""),
            "role": labels.get("role", ""),
            "url": url,
            "format": labels.get("format", ""),
        }
    )


def _describes(sample: Sample) -> bool:
    """True for a sample of `pdstore_info` that holds now."""
    is_named = sample.name.endswith("pdstore_info") and bool(sample.labels.get("namespace"))
    return is_named and sample.value > 0


def _status_of(url: str, timeout_s: float) -> Peer | Finding:
    address = url.rstrip("/").removesuffix(_PATH) + _PATH
    try:
        body = _get(address, timeout_s)
        return Peer.model_validate_json(body).model_copy(update={"url": url})
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _silence(url, error)


class _Loss(BaseModel):
    words: str


class _Request(BaseModel):
    request_id: str
    loss: _Loss | None = None


class _Journal(BaseModel):
    requests: list[_Request]


def losses_at(url: str, timeout_s: float = _TIMEOUT_S) -> list[str]:
    """Returns a sentence for each of an instance's last requests whose load fell short.

    url: of the instance's status page.
    Raises ConfigError if no such page is there.
    """
    address = url.rstrip("/").removesuffix(_PATH) + _PATH
    try:
        journal = _Journal.model_validate_json(_get(address, timeout_s))
    except (OSError, ValueError, http.client.HTTPException) as error:
        message = f"no status page at {url}: {error}; name the instance's PDSTORE_STATUS_PORT"
        raise ConfigError(message) from error
    losses = ((request.request_id, request.loss) for request in journal.requests)
    return [f"request {name}: {loss.words}" for name, loss in losses if loss is not None]


def _silence(url: str, error: Exception) -> Finding:
    """Returns why no status was read: a wrong URL, no answer, or an instance without pdstore."""
    if isinstance(error, ConfigError):
        return bad(f"peer {url}", str(error), "write http://HOST:PORT")
    is_away = isinstance(error, ConnectionError | TimeoutError | urllib.error.URLError)
    if is_away and not isinstance(error, urllib.error.HTTPError):
        why = getattr(error, "reason", error)  # an URLError's own text is `<urlopen error ...>`
        message = str(getattr(why, "strerror", None) or why)
        return bad(f"peer {url}", f"no answer: {message}", _way_to(url, message))
    return bad(
        f"peer {url}", f"neither {_PATH} nor /metrics there tells of pdstore: {error}", _NO_PDSTORE
    )


def _way_to(url: str, error: str) -> str:
    """Returns what to do where the way to an instance fails, by the words of the error."""
    scheme, _, place = url.partition("://")
    if "WRONG_VERSION_NUMBER" in error:
        return f"it speaks http: write http://{place}"
    if "CERTIFICATE_VERIFY_FAILED" in error:
        return "name the authority of its certificate: SSL_CERT_FILE=/path/ca.pem"
    if scheme == "http" and "closed connection" in error:  # http.client's words
        return f"if it speaks TLS, write https://{place}"
    if (urlsplit(url).hostname or "") in _OWN_NAMES:
        return "start it (PDSTORE_STATUS_PORT opens such a port), or name the URL of its API"
    return (
        "start it, check that it listens on this address (--host 0.0.0.0) and that no firewall is"
        " between; a status page (PDSTORE_STATUS_PORT) listens on 127.0.0.1 alone: name the URL of"
        " its API"
    )


def check_peers(urls: Sequence[str], timeout_s: float = _TIMEOUT_S) -> Iterator[Finding]:
    """Yields findings: whether all instances use one pool and one namespace.

    Each further instance is compared with the first. For an instance without a status page, the
    metric `pdstore_info` is read, which has the pool's id, the store's URL without secrets and the
    namespace's digest, but not the namespace's fields.

    timeout_s: how long one answer may take, from the connection to its last byte. An instance that
      does not answer takes two timeouts at most; one that answers is asked several more times.
    """
    peers = []
    for url in urls:
        found = _ask(url, timeout_s)
        if isinstance(found, Peer):
            peers.append(found)
            yield from _ask_again(found, timeout_s)
        else:
            yield found
    for peer in peers:
        pool = f"pool {peer.pool[:8]}" if peer.pool else "pool not known"
        yield info(f"peer {peer.url}", f"{pool}, namespace {peer.digest[:12]}")
        if peer.problem:
            yield warn("degraded", f"{peer.url} says: {peer.problem[:_MAX_SAID]}", _ITS_LOG)
    for other in peers[1:]:
        yield from _compare(peers[0], other)


_VERSIONS = "install the same version of pdstore for both"
_REMEDIES = {
    "format": _VERSIONS,
    "block_tokens": (
        "make it equal, by PDSTORE_BLOCK_TOKENS; of a model with sliding windows or states, by the"
        " engines' TP size, dtypes, speculation and --block-size, which decide it"
    ),
    "form": (
        "give both engines the same version, dtypes, kernels, block size and kind of GPU, so that"
        " states and pages are alike"
    ),
    "speculation": (
        "speculation differs: the number of drafted tokens decides the shape of states, so give"
        " both engines the same --speculative-config, or neither"
    ),
}
"""By the names of a namespace's fields."""


def _ask(url: str, timeout_s: float) -> Peer | Finding:
    found = _status_of(url, timeout_s)
    return found if isinstance(found, Peer) else _metrics_of(url, timeout_s) or found


def _ask_again(peer: Peer, timeout_s: float) -> Iterator[Finding]:
    """Yields a finding if new connections to an instance's URL lead to an instance of another role.

    A URL that leads to instances by chance may seem to lead to one, but seldom. The same page is
    asked: where two instances take turns, two requests a try would always meet the same one.
    """
    ask = _status_of if peer.fields else _metrics_of
    for _ in range(_TRIES):
        again = ask(peer.url, timeout_s)
        if not isinstance(again, Peer):
            return
        if peer.role and again.role and again.role != peer.role:
            message = f"it leads to an instance of role {peer.role}, and then to one of role"
            yield bad(f"peer {peer.url}", f"{message} {again.role}", _ONE_ROLE)
            return


def _compare(first: Peer, other: Peer) -> Iterator[Finding]:
    pair = f"{first.url} and {other.url}"
    yield from _compare_pools(first, other)
    if not (first.fields and other.fields):
        yield _compare_digests(first, other)
        return
    names = sorted({*first.fields, *other.fields})
    differing = [name for name in names if first.fields.get(name) != other.fields.get(name)]
    for name in differing:
        there = first.fields.get(name, "missing")
        here = other.fields.get(name, "missing")
        yield bad(
            f"namespace: {name}",
            f"{there} at {first.url}, {here} at {other.url}",
            _REMEDIES.get(name, "make it equal")
            + ": until then neither finds what the other saved",
        )
    if not differing:
        yield ok("namespace", f"{pair} agree in all {len(names)} fields")


def _compare_digests(first: Peer, other: Peer) -> Finding:
    """Returns whether two namespaces are equal where one instance shows no fields."""
    if first.digest == other.digest:
        return ok("namespace", f"{first.url} and {other.url} have the same namespace")
    if first.format and other.format and first.format != other.format:
        message = f"{first.format} at {first.url}, {other.format} at {other.url}"
        return bad(
            "namespace: format", message, f"{_VERSIONS}: until then neither finds the other's KV"
        )
    return bad(
        "namespace",
        f"{first.digest[:12]} at {first.url}, {other.digest[:12]} at {other.url}: neither finds"
        " what the other saved",
        _FIELDS,
    )


def _compare_pools(first: Peer, other: Peer) -> Iterator[Finding]:
    if not first.pool or not other.pool:
        yield from _compare_stores(first, other)
        return
    if first.pool == other.pool:
        yield ok("pool", f"{first.url} and {other.url} use the same pool")
        if first.lease_s and other.lease_s and first.lease_s != other.lease_s:
            message = f"{first.lease_s:g} s at {first.url}, {other.lease_s:g} s at {other.url}"
            yield warn("lease", message, _LEASE)
        return
    two = [f"{peer.pool[:8]} ({peer.store}) at {peer.url}" for peer in (first, other) if peer.pool]
    remedy = "give both the same PDSTORE_STORE"
    if first.store and first.store == other.store:
        why = _why_two(first.store) or ": give both a URL that names one place"
        remedy = f"{first.store} is another place for each{why}"
    yield bad("pool", f"two pools, {' and '.join(two)}: neither finds what the other saved", remedy)


def _why_two(label: str) -> str:
    """Returns text that says why one URL may name two places; empty for an unknown scheme."""
    with contextlib.suppress(ConfigError):
        return place_of(label, read_settings()).why_two
    return ""


def _compare_stores(first: Peer, other: Peer) -> Iterator[Finding]:
    """Yields a finding about two instances of which one does not tell its pool's id."""
    unknown = first if not first.pool else other
    if not first.store or not other.store or first.store == other.store:
        yield info("pool", f"not compared: {unknown.url} does not tell its pool's id yet")
        return
    yield warn(
        "pool",
        f"{unknown.url} does not tell its pool's id; its store is {unknown.store}, the other's"
        f" {(other if unknown is first else first).store}",
        "give both the same PDSTORE_STORE; if these name one place, run this again in a minute",
    )


def _get(url: str, timeout_s: float) -> bytes:
    """Returns at most 4 MiB of the body at a URL. Follows redirects, but uses no proxy.

    The timeout of a socket is one for each read, so that a peer which sends a byte now and then
    would be waited for without end. So the request runs beside its caller, who waits `timeout_s`.
    Raises ConfigError for a URL that is not HTTP; OSError or http.client.HTTPException.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError("a URL begins with http:// or https://")
    asker: AsyncRunner[bytes] = AsyncRunner("pdstore-peer")
    asker.launch(partial(_body_of, url, timeout_s))
    asker.close(0.0)  # the thread ends after this request
    try:
        return asker.sync(timeout_s) or b""
    except TimeoutError:
        raise TimeoutError(f"its answer did not arrive within {timeout_s:g} s") from None


def _body_of(url: str, timeout_s: float) -> bytes:
    # a proxy that the environment names leads to another network
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Accept": "application/json, text/plain"})
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        raise
