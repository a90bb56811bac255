"""The page in a real browser: what it shows of a snapshot, also in a narrow window."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

import pytest

from pdstore.errors import Reason
from pdstore.metrics import Metrics, TierState
from pdstore.settings import read_settings
from pdstore.status.history import EVERY_S, History
from pdstore.status.server import CURVES, snapshot
from pdstore.telemetry.request_record import Journal, Phase, RequestRecord
from tests.status.test_snapshot import CACHE
from tests.support.browser import needs_browser, shown
from tests.support.clock import Clock

pytestmark = [needs_browser, pytest.mark.slow]

ARRIVED_AT = 1_790_000_000.0
POOL_ID = bytes.fromhex("1abc76d005d89311f7f9449f7c8bcbc8")
PROBLEM = "file:///mnt/nvme/pdstore: No space left on device"
FRAME = """<!doctype html>
<iframe src="/page" style="border: 0; width: 500px; height: 900px"></iframe>
<script>setTimeout(() => {
  const page = document.querySelector("iframe").contentDocument;
  const cells = [...page.querySelectorAll("#requests td:not(:empty), #tier td")].map(td => {
    const { left, right, width } = td.getBoundingClientRect();
    return [td.textContent, left, right, width];
  });
  const measured = { cells, wide: page.documentElement.scrollWidth };
  document.body.append(Object.assign(document.createElement("pre"),
    { textContent: JSON.stringify(measured) }));
}, 1500);</script>"""


@pytest.fixture
def taken():
    """A snapshot of an instance that has lost a hand-off, with four minutes of history."""
    metrics, journal, clock = Metrics(), Journal(), Clock()
    numbers = {"tokens_total|requested": 0.0, "tokens_total|matched": 0.0}
    history = History(CURVES, lambda: dict(numbers), clock=clock)
    for hits in (90, 90, None, None, 30, 50, 50, 50):
        clock.now += EVERY_S
        if hits is not None:
            numbers["tokens_total|requested"] += 100
            numbers["tokens_total|matched"] += hits
        history.add_if_due()
    metrics.tokens.labels("requested").inc(600)
    metrics.tokens.labels("matched").inc(360)
    journal.add(
        RequestRecord(
            request_id="cmpl-0123456789abcdef",
            handoff="f" * 32,
            role="decode",
            arrived_at=ARRIVED_AT,
            num_tokens=4096,
            num_matched=4032,
            num_loaded=2048,
            num_computed=2048,
            num_saved=0,
            reason=Reason.HANDOFF_FAILED,
            phases=(Phase("wait", 0.0, 0.25), Phase("compute", 0.25, 1.0)),
        )
    )
    first = TierState("0 redis", "redis://store-host:6379/0")
    below = TierState("1 file", "file:///mnt/nvme/pdstore", PROBLEM, 5, {"given_up": 1})
    metrics.add_tiers(lambda: [first, below])
    cache = CACHE._replace(pool_id=POOL_ID, tiers=[first, below])
    registries = [metrics.registry]
    return snapshot(read_settings(), cache, registries, journal, lambda: None, history)


@contextmanager
def serving(taken):
    """Serves the page, and a frame of 500 px with it that measures where its cells are."""
    page = files("pdstore.status").joinpath("page.html").read_bytes()
    bodies = {"/": FRAME.encode(), "/page": page, "/pdstore": json.dumps(taken).encode()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in bodies else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(bodies.get(self.path, b""))

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_shows_the_time_of_day_the_pool_and_the_hit_rate_of_minutes_and_of_an_hour(
    taken, tmp_path
):
    with serving(taken) as url:
        page = shown(f"{url}/page", tmp_path).partition("<script>")[0]
    assert time.strftime("%H:%M:%S", time.localtime(ARRIVED_AT)) in page
    assert "pool 1abc76d0 " in page
    assert "<b>60 %</b>hit rate, last 4 min" in page
    [card] = re.findall(r"<b>60 %</b>hit rate, last.*?</svg>", page)
    assert len(re.findall("<polyline", card)) == 2, "minutes without requests are a gap"
    assert "30 % to 90 %" in card
    assert "handoff_failed" in page


def test_in_a_narrow_window_the_reason_is_in_sight_and_nothing_lies_outside(taken, tmp_path):
    with serving(taken) as url:
        text = shown(url, tmp_path)
    [measured] = re.findall(r"<pre>(.*)</pre>", text)
    measured = json.loads(measured)
    cells = {name: rest for name, *rest in measured["cells"]}
    assert measured["wide"] <= 500
    for text in ("handoff_failed", PROBLEM, "1 given up"):
        left, right, width = cells[text]
        assert 0 <= left < right <= 500
        assert width > 50
    assert time.strftime("%H:%M:%S", time.localtime(ARRIVED_AT)) in cells


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_bars_have_the_contrast_that_wcag_asks_for(scheme):
    style = files("pdstore.status").joinpath("page.html").read_text().partition("</style>")[0]
    light, dark = re.findall(r":root \{(.*?)\}", style)
    colors = dict(re.findall(r"--(\w+): #(\w+)", light))
    if scheme == "dark":
        colors |= re.findall(r"--(\w+): #(\w+)", dark)
    texts = [("ink", "page"), ("dim", "page"), ("bad", "page"), ("ink", "good"), ("bad", "alarm")]
    bars = [(bar, on) for bar in ("wait", "load", "compute", "save") for on in ("page", "track")]
    for least, pairs in ((4.5, texts), (3.0, bars)):
        for front, back in pairs:
            darker, lighter = sorted((luminance(colors[front]), luminance(colors[back])))
            assert (lighter + 0.05) / (darker + 0.05) >= least, (front, back)


def luminance(color):
    """How light a color like fff or 1c2430 is, from 0 to 1, as WCAG defines it."""
    digits = "".join(2 * digit for digit in color) if len(color) == 3 else color
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return sum(x * weight for x, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
