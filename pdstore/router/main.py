"""Command line of the router: `pdstore-router`, or `python -m pdstore.router`."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from urllib.parse import urlsplit

from pdstore.errors import PDStoreError
from pdstore.telemetry.spans import open_provider

_DRAIN_S = 5
_KEEP_ALIVE_S = 75  # most proxies keep idle connections for 60 s
_PACKAGES = ("anyio", "h11", "httpx", "starlette", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM.

    Exits with 2 for a wrong option, and with 1 and a line for what else a user can correct.
    """
    given = _parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # uvicorn restores it at its end, and raises the signal again
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        _serve(given)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        missing = f"the router needs a package that is not installed ({error.name})"
        sys.exit(f"router: {missing}: pip install 'pdstore[router]'")
    except PDStoreError as error:
        sys.exit(f"router: {str(error).replace('PDSTORE_STATUS_PORT=', '--status ')}")


def _serve(given: argparse.Namespace) -> None:
    import uvicorn

    from pdstore.router.app import Options, make_app
    from pdstore.router.intake import Limits, TimedProtocol

    options = Options(
        prefill=tuple(given.prefill),
        decode=tuple(given.decode),
        mode=given.mode,
        by_prefix=given.affinity == "prefix",
        first_token=given.first_token,
        retries=given.retries,
        prefill_timeout_s=given.prefill_timeout,
        read_timeout_s=given.read_timeout,
        status_port=given.status,
        limits=Limits(
            body_bytes=given.max_body << 20,
            body_timeout_s=given.body_timeout,
            header_timeout_s=given.header_timeout,
        ),
    )
    provider = open_provider(given.traces, "pdstore-router", "--traces") if given.traces else None
    uvicorn.run(
        make_app(options, provider),
        host=given.host,
        port=given.port,
        http=partial(TimedProtocol, options.limits),  # type: ignore[arg-type]
        access_log=False,
        timeout_keep_alive=given.keep_alive,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdstore-router",
        description="OpenAI-compatible router for prefill/decode disaggregated engines.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    prefill = "a P's URL; may be repeated; none: each instance of --decode does all of a request"
    add("--prefill", action="append", type=_instance, default=[], help=prefill)
    add(
        "--decode",
        action="append",
        type=_instance,
        required=True,
        help="a D's URL; may be repeated",
    )
    add("--host", default="127.0.0.1")
    add("--port", type=_port, default=8000)
    _add_ways(parser)
    add("--status", type=_port, metavar="PORT", help="of a page about this router, on 127.0.0.1")
    add("--traces", type=_url, help="URL of an OTLP receiver for spans; give P and D the same")
    _add_limits(parser)
    return parser


def _add_ways(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mode",
        choices=("relay", "concurrent"),
        default="relay",
        help="relay: P first, then D with P's kv_transfer_params. concurrent: both at once",
    )
    affinity = "none: instances take turns. prefix: a prompt goes where most of it went before"
    add("--affinity", choices=("none", "prefix"), default="none", help=affinity)
    add(
        "--first-token",
        choices=("prefill", "decode"),
        default="decode",
        help="whose first token the client gets. prefill: P's, at once, and D goes on behind it"
        " (completions whose tokens are chosen one by one; others as with decode)",
    )
    add(
        "--retries",
        type=_count,
        default=0,
        help="how often P is asked again when D could not use the hand-off (PDSTORE_ON_MISS=fail)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill-timeout", type=_seconds, default=60.0, help="seconds P may take for a prompt")
    add("--read-timeout", type=_seconds, default=600.0, help="seconds D may be silent")
    idle = "seconds that an idle client's connection is kept: more than a proxy before it keeps one"
    add("--keep-alive", type=_at_least_one, default=_KEEP_ALIVE_S, help=idle)
    add(
        "--max-body",
        type=_at_least_one,
        default=64,
        help="MiB that a request's body may have",
    )
    add("--body-timeout", type=_seconds, default=30.0, help="seconds a body may take to arrive")
    add(
        "--header-timeout",
        type=_seconds,
        default=30.0,
        help="seconds headers may take to arrive",
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.mode == "concurrent" and given.first_token == "prefill":
        parser.error("--first-token prefill needs --mode relay: D's prompt has P's token in it")
    return given


def _instance(text: str) -> str:
    urls = re.split(r"[,;\s]+", text.strip())
    if len(urls) > 1:
        right = "give the option once for each: --decode http://d1 --decode http://d2"
        raise argparse.ArgumentTypeError(f"{text!r} is not one URL: {right}")
    url = _url(text)
    right, v1, rest = url.partition("/v1")
    if v1 and rest[:1] in ("", "/"):
        raise argparse.ArgumentTypeError(f"{url}: write {right}, the router adds /v1 itself")
    return url


def _url(text: str) -> str:
    try:
        address = urlsplit(text)
        is_usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # of the port
        is_usable = False
    if not is_usable:
        raise argparse.ArgumentTypeError(f"not a URL: {text!r}, write http://host:port")
    return text


def _port(text: str) -> int:
    if not 0 <= int(text) < 65536:
        raise argparse.ArgumentTypeError(f"not a port: {text}, write 0 to 65535")
    return int(text)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def _count(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("seconds must be more than 0")
    return seconds
