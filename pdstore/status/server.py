"""Reporting: shows an instance's state and requests on a status page, and sends spans.

StatusServer serves that page, and its content as JSON at `/pdstore`, on this host only. The server
is http.server's. With Starlette and uvicorn it has 76 lines instead of 131, of which some still end
slow clients. They bring six packages and 46 ms to each start, and take 0.9 ms of CPU for a request
instead of 0.3.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from typing import Any, Protocol, TypeAlias

from prometheus_client import CollectorRegistry
from pydantic import ByteSize

import pdstore
from pdstore.errors import ConfigError, Reason, Severity
from pdstore.format.keys import Namespace
from pdstore.metrics import METRICS, Across, Kind, TierState, is_first_tier
from pdstore.settings import Settings, origin_of, variable_of
from pdstore.status.history import Curve, History
from pdstore.store.url import StoreURL, without_secret
from pdstore.telemetry.reasons import ADVICE
from pdstore.telemetry.request_record import Journal
from pdstore.telemetry.spans import Spans
from pdstore.threads import Deadline, Ticker

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # as Host: other sites' pages send another
_TURN_S = 0.2
_STOP_TIMEOUT_S = _TURN_S + 4.0  # longer than `take` needs, with which a request may be busy
_MAX_BYTES = 1 << 20
_NO_API = "this is pdstore's status page: requests, /health and /metrics are at the port of the API"


class StatusServer:
    """Serves the page at `/` and the JSON object that `take` returns at `/pdstore`.

    One thread answers the requests, one after another, which is enough for a few people.

    port: 0 takes a free port. Raises ConfigError for a port that another process uses.
    tick: is called by that thread about five times a second.
    request_s: seconds that a client may take to send its request, and to read the answer; then the
      server closes the connection, however much of it has come.
    """

    def __init__(
        self,
        port: int,
        take: Callable[[], dict[str, object]],
        request_s: float = 2.0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        page = files("pdstore.status").joinpath("page.html").read_bytes()
        try:
            self._server = _Server((_HOST, port), partial(_Handler, page, take))
        except (OSError, OverflowError) as error:  # taken, reserved, or above 65535
            raise ConfigError(f"PDSTORE_STATUS_PORT={port}: {error}") from error
        self._server.timeout = _TURN_S
        self._server.request_s = request_s
        self._tick = tick
        self._thread = Ticker("pdstore-status", self._turn)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self._server.server_port}"

    def close(self) -> None:
        """Stops the server, also in the middle of a request. May be called twice."""
        self._server.hang_up()
        self._thread.stop(_STOP_TIMEOUT_S)
        self._server.server_close()  # a thread that is left looks at no other request

    def _turn(self) -> float:
        self._server.handle_request()
        self._tick()
        return 0.0


class _TimedSocket(socket.socket):
    """A connection with one timeout for all that it receives, and one for each part it sends.

    A socket's own timeout begins again with each byte that comes.
    """

    limit_s: float
    request_deadline: Deadline

    def recv_into(self, *arguments: Any) -> int:  # noqa: ANN401
        if self.request_deadline.is_over():
            raise TimeoutError("the request did not arrive in time")
        self.settimeout(self.request_deadline.remaining_s())
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:  # noqa: ANN401
        self.settimeout(self.limit_s)
        super().sendall(*arguments)


class _Server(HTTPServer):
    request_s: float
    _connection: socket.socket | None = None
    _is_closing = False

    def get_request(self) -> tuple[socket.socket, object]:
        accepted, address = super().get_request()
        request = _TimedSocket(fileno=accepted.detach())
        request.limit_s = self.request_s
        request.request_deadline = Deadline(self.request_s)
        self._connection = request
        return request, address

    def verify_request(self, request: object, client_address: object) -> bool:
        """Returns False for a connection that came while the server was being closed."""
        return not self._is_closing

    def hang_up(self) -> None:
        """Ends the open connection, which another thread may wait for, and all that come later."""
        self._is_closing = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs the exception of a request, which the base class would write to stderr."""
        is_gone = isinstance(sys.exc_info()[1], OSError)  # the client has gone
        log.log(logging.DEBUG if is_gone else logging.ERROR, "a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    def __init__(
        self, page: bytes, take: Callable[[], dict[str, object]], *arguments: object
    ) -> None:
        self._page = page
        self._take = take
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self._refuse(403, "this page is for this host alone")
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", self._page)
        elif self.path == "/pdstore":
            self._answer("application/json", json.dumps(self._take()).encode())
        else:
            self._refuse(404, _NO_API)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if length.isdecimal():  # a client that still sends would not see the answer
            self.rfile.read(min(int(length), _MAX_BYTES))
        self._refuse(404, _NO_API)

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing, because an open page sends a request every second."""

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error in OpenAI's form; Prometheus shows the message, too."""
        error = {"message": message, "type": "invalid_request_error", "code": status}
        self._answer("application/json", json.dumps({"error": error}).encode(), status, message)

    def _answer(
        self, kind: str, body: bytes, status: int = 200, message: str | None = None
    ) -> None:
        self.send_response(status, message)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


Json: TypeAlias = dict[str, object]

_URLS = ("store", "traces")
_TO_LOOK_AT = [
    reason.value for reason in Reason if reason.severity in (Severity.WARNING, Severity.CRITICAL)
]
CURVES = (
    Curve("hit rate", ("tokens_total|matched",), of=("tokens_total|requested",)),
    Curve("loaded tokens/s", ("tokens_total|loaded",)),
    Curve("saved tokens/s", ("tokens_total|saved",)),
    Curve(
        "failures/s",
        tuple(f"{kind}_total|{name}" for kind in ("misses", "drops") for name in _TO_LOOK_AT),
    ),
)
"""What an instance's page shows of the last hour."""


class TellsPool(Protocol):
    """The part of a `PrefixCacheManager` that tells its instance's pool and namespace."""

    @property
    def namespace(self) -> Namespace: ...

    @property
    def pool_id(self) -> bytes | None:
        """The pool's id; None until the store has told it."""

    @property
    def lease_s(self) -> float: ...

    @property
    def tiers(self) -> Sequence[TierState]:
        """The state of each tier, as this process sees it; empty for a pool of one store."""


class Reporting:
    """Opens a status page if PDSTORE_STATUS_PORT is set, and spans if PDSTORE_TRACES is set.

    cache: tells the pool and the namespace.
    registries: hold the instance's metrics, which the page combines.
    problem: returns what is wrong with the pool now, or None.
    number: this instance's number among the instances with the same environment variables; it is
      added to the page's port. A port that cannot be opened costs a warning and the page, because
      the instance works without it.
    Raises MissingExtra if spans need a package that is not installed.

    journal: takes the records of requests that have ended.
    """

    def __init__(
        self,
        settings: Settings,
        cache: TellsPool,
        registries: Sequence[CollectorRegistry],
        problem: Callable[[], str | None],
        number: int = 0,
    ) -> None:
        self.journal = Journal()
        self._server: StatusServer | None = None
        with contextlib.ExitStack() as undo:
            if settings.traces is not None:
                store = StoreURL.of(settings.store).label
                spans = Spans.to(
                    settings.traces, settings.role, namespace=cache.namespace.hex, store=store
                )
                undo.callback(spans.close)
                self.journal.listen(spans.add)
            if settings.status_port is not None:
                history = History(CURVES, partial(_numbers_of, registries))
                tell = partial(
                    snapshot, settings, cache, registries, self.journal, problem, history
                )
                port = settings.status_port and settings.status_port + number
                self._server = _open_page(port, tell, history)
                if self._server is not None:
                    undo.callback(self._server.close)
            self._opened = undo.pop_all()

    @property
    def url(self) -> str | None:
        """The page's address; None without one."""
        return self._server.url if self._server else None

    def close(self) -> None:
        """Stops the page and sends the last spans. May be called twice."""
        self._opened.close()


def _open_page(port: int, tell: Callable[[], Json], history: History) -> StatusServer | None:
    """Returns the page's server; None, with a warning, if the port cannot be opened."""
    try:
        server = StatusServer(port, tell, tick=history.add_if_due)
    except ConfigError as error:
        log.warning("%s: this instance has no status page. Name another port, or 0", error)
        return None
    log.info("status on %s", server.url)
    return server


def snapshot(
    settings: Settings,
    cache: TellsPool,
    registries: Sequence[CollectorRegistry],
    journal: Journal,
    problem: Callable[[], str | None],
    history: History | None = None,
) -> Json:
    """Returns the object that `/pdstore` shows: the present state, without secrets.

    cache, registries, problem: as `Reporting` takes them. The namespace's fields are shown as
      `Namespace.described`. Each number that is shown combines the values of all registries.
    """
    numbers = _numbers_of(registries)
    namespace = cache.namespace
    pool_id = cache.pool_id
    return {
        "time": time.time(),
        "version": pdstore.__version__,
        "role": settings.role,
        "store": StoreURL.of(settings.store).label,
        "pool": {"id": pool_id.hex() if pool_id else None, "lease_s": cache.lease_s},
        "namespace": {"hex": namespace.hex, "fields": namespace.described},
        "problem": problem(),
        "settings": settings_of(settings),
        "metrics": numbers,
        "curves": history.as_json(numbers) if history else [],
        "tiers": [_tier_of(tier, numbers) for tier in cache.tiers],
        "reasons": _reasons_of(numbers),
        "requests": [record.as_json() for record in journal.last()],
    }


def settings_of(settings: Settings) -> list[Json]:
    """Returns each setting with its variable, its value without secrets, and its origin."""
    shown: list[Json] = []
    for field in Settings.model_fields:
        value = getattr(settings, field)
        text = str(int(value) if isinstance(value, bool) else value)  # as a variable is written
        if isinstance(value, ByteSize):
            text = value.human_readable()
        if field in _URLS:
            text = without_secret(text)
        origin = origin_of(settings, field)
        shown.append({"name": variable_of(field), "value": text, "origin": origin})
    return shown


def _numbers_of(registries: Sequence[CollectorRegistry]) -> dict[str, float]:
    """Returns counters and gauges by name and labels: `tokens_total|loaded`."""
    found: dict[str, float] = {}
    for family in itertools.chain.from_iterable(each.collect() for each in registries):
        metric = METRICS.get(family.name.removeprefix("pdstore_"))
        if metric is None or metric.kind is Kind.HISTOGRAM or metric.name == "info":
            continue
        for sample in family.samples:
            if sample.name == metric.shown_name:
                labels = [sample.labels[name] for name in metric.labels]
                key = "|".join((sample.name.removeprefix("pdstore_"), *labels))
                before = found.get(key, 0.0)
                is_sum = metric.across is Across.SUM
                found[key] = before + sample.value if is_sum else max(before, sample.value)
    return found


def _tier_of(tier: TierState, numbers: Mapping[str, float]) -> Json:
    """Returns what the page shows of one tier, with the numbers of all processes.

    Calls, bytes and copies of the first tier are not counted apart: the whole pool makes them.
    """

    def number(name: str) -> float:
        return numbers.get(f"{name}|{tier.name}", 0.0)

    def numbers_of(name: str) -> dict[str, float]:
        begin = f"{name}|{tier.name}|"
        found = {key: value for key, value in numbers.items() if key.startswith(begin)}
        return {key.removeprefix(begin): value for key, value in found.items()}

    is_first = is_first_tier(tier.name)
    is_out = numbers.get("breaker_open", 0.0) if is_first else number("tier_out")
    return {
        "name": tier.name,
        "store": tier.label,
        "is_out": bool(is_out),
        "problem": tier.problem,
        "used_bytes": number("tier_used_bytes"),
        "capacity_bytes": number("tier_capacity_bytes"),
        "num_evicted": number("tier_evictions_total"),
        "waiting_bytes": None if is_first else number("tier_waiting_bytes"),
        "copies": numbers_of("tier_copies_total"),
        "calls": numbers_of("tier_calls_total"),
        "bytes": numbers_of("tier_bytes_total"),
        "tokens": numbers.get(f"tier_tokens_total|{tier.name}"),
    }


def _reasons_of(numbers: dict[str, float]) -> Json:
    """Returns the reasons of misses and drops so far: counts, advice, whether something failed."""
    found: Json = {}
    for reason, advice in ADVICE.items():
        misses = numbers.get(f"misses_total|{reason.value}", 0.0)
        drops = numbers.get(f"drops_total|{reason.value}", 0.0)
        if misses or drops:
            look_at = advice.look_at.replace("`", "")
            is_fault = reason.value in _TO_LOOK_AT
            one = {"misses": misses, "drops": drops, "look_at": look_at, "is_fault": is_fault}
            found[reason.value] = one
    return found
