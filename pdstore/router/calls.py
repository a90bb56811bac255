"""Calls of engine instances: chooses one, and replaces one that fails."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import httpx

from pdstore.router.answers import PROBE_BYTES, WholeAnswer, ask, with_status
from pdstore.router.bodies import (
    Json,
    Refusal,
    decode_body,
    encode,
    encode_beside,
    message_of,
    parse,
    prefill_body,
)
from pdstore.router.counts import Counts, Timeline
from pdstore.router.intake import Asked
from pdstore.router.upstreams import Role, Rotation, Upstream
from pdstore.telemetry.reasons import Repeats

log = logging.getLogger("router")

_NO_PARAMS = (
    "prefill %s answers without kv_transfer_params, so D loads only what it finds without waiting."
    " Either it is no prefill instance: --prefill must be the URL of an instance started with"
    " PD_TRANSFER_VIA_STORAGE=1, PDSTORE_ROLE=prefill and PDSTORE_PUBLISH=1. Or a proxy or gateway"
    " between removes them from the request or from the answer. Or this request bypasses the pool,"
    " as one with data that no key can name. Ask the instance itself, on its own host and port: if"
    " it answers with kv_transfer_params, look at what is between: curl -s"
    """ http://HOST:PORT/v1/completions -H 'content-type: application/json' -d '{"prompt":"""
    """ "%s", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}'"""
    " (SGLang never answers with any: there D finds the pages by itself)"
)
_SAMPLE = "one two three four five six seven eight nine ten"
_STATUS_PAGE = "status page"  # of an instance, whose answer says what to write instead
_UNEQUAL = (
    ", which goes to the client; if {} took the request, give P and D the same --served-model-name"
    " and --max-model-len"
)
_BETWEEN = (
    ": not in an engine's form, so a proxy or load balancer before it may have answered: look at"
    " that one's log and timeouts"
)
_REDIRECT = ": a redirect, which is not followed: write the URL of the instance itself"
_JSON = {"content-type": "application/json"}
_BEGAN_NOTHING = (408, 429, 503)
"""Statuses of an instance that is full, not ready or stopping, and so took nothing of a request."""


class _BrokeOff(Exception):
    """P began a prefill and did not end it."""


class Calls:
    """Asks Ps and Ds over one HTTP client.

    prefill_s: seconds that P may take until its answer is whole.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        prefills: Rotation,
        decodes: Rotation,
        counts: Counts,
        prefill_s: float,
    ) -> None:
        self.client = client
        self.prefills = prefills
        self.decodes = decodes
        self.counts = counts
        self.prefill_s = prefill_s
        self.timeline = Timeline()
        self._takes_ids: bool | None = None
        self._num_outages_then = 0  # of D's, when `_takes_ids` was told
        self._repeats = Repeats()
        self._opened: dict[str, list[Upstream]] = {}  # by request

    @property
    def upstreams(self) -> list[Upstream]:
        """Every instance, the Ps first."""
        return self.prefills.upstreams + self.decodes.upstreams

    @property
    def takes_ids(self) -> bool | None:
        """True if D takes a chat's prompt as token ids.

        None before a D has told it, and again when a D could not be reached since then: the one
        that comes back may be of another version.
        """
        is_of_now = self._num_outages_then == self.decodes.num_outages
        return self._takes_ids if is_of_now else None

    def note_ids(self, are_taken: bool | None) -> None:
        """Notes what a D has told just now: see `takes_ids`."""
        self._takes_ids = are_taken
        self._num_outages_then = self.decodes.num_outages

    async def prefill_answer(self, asked: Asked, params: Json) -> Json | None:
        """Prefills on one P. Returns P's answer; None if no P could be asked or could do it.

        Only a P that began nothing is replaced by another. One that broke, hung or failed may have
        done so because of this request, which must not take the others down too: D computes.
        Raises Refusal with P's answer when P says that the request itself is wrong (4xx).
        """
        content = _content(asked, prefill_body(asked.body, params))
        for upstream in self.prefills.in_turn(asked.body):
            if upstream.is_skipped(self.prefill_s):
                continue
            try:
                answer = await self._prefill_on(upstream, asked, content)
            except _BrokeOff:
                break
            if answer is None:
                continue
            self.note_answer(asked, upstream.role, upstream.url, answer)
            if not _is_at_fault(answer.status):
                upstream.answered()
                given = _json_of(answer)
                if params_of(given) is None:
                    about = (upstream.url, "no params")
                    self.log_unless_recent(about, _NO_PARAMS, upstream.url, _SAMPLE)
                return given
            if answer.status not in _BEGAN_NOTHING:
                break
            upstream.refused(answer.status)
        self.counts.degraded.inc()
        self.log_unless_recent("no P", "%s: no P could prefill it, D computes", asked.request_id)
        return None

    async def _prefill_on(
        self, upstream: Upstream, asked: Asked, content: bytes
    ) -> WholeAnswer | None:
        """Returns one P's answer within the time for a prefill; None if it cannot be reached.

        Raises _BrokeOff if the connection broke, the answer was too long, or not whole in time.
        """
        self._open(upstream, asked)
        try:
            return await ask(self.client, self._request(upstream, asked, content), self.prefill_s)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._failed(upstream, asked, error)
            return None
        except httpx.ReadTimeout as error:
            self._failed(upstream, asked, error)
            upstream.timed_out(self.prefill_s)  # the client has waited long enough
            raise _BrokeOff from error
        except httpx.TransportError as error:
            self._failed(upstream, asked, error)
            raise _BrokeOff from error

    async def decode(self, asked: Asked, params: Json | None) -> httpx.Response:
        """Asks one D. Returns its answer with the body unread; the caller closes it.

        Only a D that began nothing is replaced by another: one that broke may have broken because
        of this request, which must not take the others down too. If all that can be reached are
        full, the last one's answer is returned. Raises Refusal if D did not answer (502, 504) or
        none could be reached (503).
        """
        content = _content(asked, decode_body(asked.body, params, asked.prompt_ids))
        full: httpx.Response | None = None
        for upstream in self.decodes.in_turn(asked.body):
            answer = await self._decode_on(upstream, asked, content)
            if answer is None:
                continue
            if full is not None:
                self.note_decoded(asked, full)
                await full.aclose()
            if answer.status_code not in _BEGAN_NOTHING:
                upstream.came_back()
                return answer
            upstream.refused(answer.status_code)
            full = answer
        if full is not None:
            return full
        raise Refusal.saying(503, "no decode instance can be reached: see /health")

    async def _decode_on(
        self, upstream: Upstream, asked: Asked, content: bytes
    ) -> httpx.Response | None:
        """Returns one D's answer, its body unread; None if it cannot be reached. Raises Refusal."""
        self._open(upstream, asked)
        try:
            answer = await self.client.send(self._request(upstream, asked, content), stream=True)
            answer = await with_status(answer)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._failed(upstream, asked, error)
            return None
        except httpx.TimeoutException as error:
            self._failed(upstream, asked, error)
            raise Refusal.saying(504, f"D did not answer in time: {upstream.url}") from error
        except httpx.TransportError as error:
            self._failed(upstream, asked, error)
            raise Refusal.saying(502, f"D broke off: {upstream.url}") from error
        return answer

    async def answer_of_decode(self, question: Asked) -> WholeAnswer | None:
        """Asks one D a short question of the router's own, within the time for a prefill.

        Returns its whole answer, of any status; None if no D could be reached or one gave none.
        """
        content = _content(question, decode_body(question.body, None, question.prompt_ids))
        for upstream in self.decodes.in_turn():
            request = self._request(upstream, question, content)
            try:
                answer = await ask(self.client, request, self.prefill_s, PROBE_BYTES)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._failed(upstream, question, error)
                continue
            except httpx.TransportError as error:
                self._failed(upstream, question, error)
                break
            if _is_at_fault(answer.status):
                self.note_answer(question, upstream.role, upstream.url, answer)
            return answer
        return None

    def _request(self, upstream: Upstream, asked: Asked, content: bytes) -> httpx.Request:
        headers = {**_JSON, **asked.headers}
        return self.client.build_request(
            "POST", upstream.url + asked.path, content=content, headers=headers
        )

    def note_decoded(self, asked: Asked, answer: httpx.Response, first: bytes = b"") -> None:
        """Notes D's answer, of whose body `first` has come, as `note_answer` does."""
        media_type = answer.headers.get("content-type", "application/json")
        url = str(answer.url).removesuffix(asked.path)
        whole = WholeAnswer(answer.status_code, first, media_type)
        self.note_answer(asked, "decode", url, whole)

    def note_answer(self, asked: Asked, role: Role, url: str, answer: WholeAnswer) -> None:
        """Logs an answer that is no success, and counts it unless it is the client's fault.

        answer: as much of its body as has come.
        """
        if answer.is_success:
            return
        status = answer.status
        message = message_of(answer.content)
        words = f"{message and ': '}{message}"
        if _is_at_fault(status):
            self.counts.failures.labels(role, "status").inc()
            words += _hint_of(answer)
        elif status in (400, 404) and _STATUS_PAGE not in message:
            words += _UNEQUAL.format("D" if role == "prefill" else "P")
        line = "%s: %s %s: HTTP %d%s"
        self.log_unless_recent((url, status), line, asked.request_id, role, url, status, words)

    def log_unless_recent(
        self, about: Hashable, words: str, *values: object, level: int = logging.WARNING
    ) -> None:
        """Logs a line, unless one about the same was logged a moment ago."""
        left_out = self._repeats.note(about)
        if left_out is not None:
            log.log(level, "%s%s", words % values, left_out)

    def forget(self, asked: Asked) -> None:
        """Takes note that a request is over: it is no load of the instances any more."""
        for upstream in self._opened.pop(asked.request_id, ()):
            upstream.num_open -= 1

    def _open(self, upstream: Upstream, asked: Asked) -> None:
        upstream.num_open += 1
        self._opened.setdefault(asked.request_id, []).append(upstream)

    def _failed(self, upstream: Upstream, asked: Asked, error: httpx.TransportError) -> None:
        if not isinstance(error, httpx.ReadTimeout):
            upstream.went_down()
        reason = reason_of(error)
        self.counts.failures.labels(upstream.role, reason).inc()
        facts = (asked.request_id, upstream.role, upstream.url, error, upstream.way_to(str(error)))
        self.log_unless_recent((upstream.url, reason), "%s: %s %s: %r%s", *facts)


def reason_of(error: httpx.TransportError) -> str:
    """Returns a failed call in one word, for the metrics."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "connect"
    return "timeout" if isinstance(error, httpx.TimeoutException) else "broken"


def _is_at_fault(status: int) -> bool:
    """True if an instance, or a proxy before it, did not do what it should; else the client."""
    return status >= 500 or 300 <= status < 400 or status in _BEGAN_NOTHING


def _hint_of(answer: WholeAnswer) -> str:
    if 300 <= answer.status < 400:
        return _REDIRECT
    is_of_a_proxy = answer.status in (502, 503, 504) and "json" not in answer.media_type
    return _BETWEEN if is_of_a_proxy else ""


def _content(asked: Asked, body: Json) -> bytes:
    """Returns as JSON a body for P or D that was made from the client's."""
    try:
        if "prompt" in body:
            return encode_beside(body, "prompt", asked.prompt_field)
        return encode(body)
    except ValueError as error:
        raise Refusal.saying(400, f"the body cannot be used: {error}") from error


def params_of(answer: Json | None) -> Json | None:
    """Returns the `kv_transfer_params` of P's answer; None if it has none."""
    params = (answer or {}).get("kv_transfer_params")
    return params if isinstance(params, dict) else None


def _json_of(answer: WholeAnswer) -> Json | None:
    if answer.status >= 400:
        raise Refusal(answer.status, answer.content, answer.media_type)
    try:
        return parse(answer.content)
    except ValueError:
        return None
