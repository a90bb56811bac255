"""One client request from its body to the last byte of its answer."""

from __future__ import annotations

import logging
import secrets
import time

import anyio
import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from examples.router.bodies import REMOTE_DECODE, Json
from examples.router.calls import Asked, Calls, Refusal, reason_of

log = logging.getLogger("router")

_PASSED_ON = ("content-type", "content-length", "content-encoding", "retry-after")


class Exchange:
    """Prefills a request on P, decodes it on D, and passes D's answer on as it comes: a response.

    Everything it starts ends with it: when the client leaves, the calls to P and D are cancelled.
    """

    def __init__(self, calls: Calls, asked: Asked) -> None:
        self._calls, self._asked = calls, asked
        self._begin = time.monotonic()
        self._is_begun = False
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            watch = anyio.CancelScope()
            group.start_soon(self._watch_client, receive, watch, group.cancel_scope)
            try:
                await self._exchange(group, scope, receive, send)
            finally:
                watch.cancel()

    async def _exchange(
        self, group: anyio.abc.TaskGroup, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            answer = await self._answer(group)
        except Refusal as refusal:
            self._count(refusal.status)
            self._observe_first_byte()
            self._is_over = True
            refused = Response(refusal.body, refusal.status, self._headers(refusal.media_type))
            await refused(scope, receive, send)
            return
        try:
            await self._pass_on(answer, send)
        except httpx.TransportError as error:
            # Unfinished, so the server cuts the connection: the client sees a broken answer.
            self._calls.counts.failures.labels("decode", reason_of(error)).inc()
            log.warning("%s: D broke off in its answer: %r", self._asked.request_id, error)
        finally:
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    async def _answer(self, group: anyio.abc.TaskGroup) -> httpx.Response:
        """Relayed: D is asked when P is done, with what P said."""
        params = await self._calls.prefill(self._asked, REMOTE_DECODE)
        return await self._calls.decode(self._asked, params)

    async def _pass_on(self, answer: httpx.Response, send: Send) -> None:
        headers = self._headers()
        headers |= {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": answer.status_code, "headers": raw}
        await send(start)
        self._count(answer.status_code)
        async for chunk in answer.aiter_raw():
            self._observe_first_byte()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_over = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch_client(
        self, receive: Receive, watch: anyio.CancelScope, everything: anyio.CancelScope
    ) -> None:
        with watch:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self._is_over:
                self._calls.counts.disconnects.inc()
                log.info("%s: the client left", self._asked.request_id)
                everything.cancel()

    def _count(self, status: int) -> None:
        self._calls.counts.requests.labels(str(status)).inc()

    def _observe_first_byte(self) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        self._calls.counts.first_byte.observe(time.monotonic() - self._begin)

    def _headers(self, media_type: str | None = None) -> dict[str, str]:
        headers = {"x-request-id": self._asked.request_id}
        return headers | {"content-type": media_type} if media_type else headers


class ConcurrentExchange(Exchange):
    """Gives one attempt to P and D at once; D takes the blocks up as P publishes them."""

    async def _answer(self, group: anyio.abc.TaskGroup) -> httpx.Response:
        params: Json = {"pdstore": {"attempt": secrets.token_hex(16)}}
        group.start_soon(self._prefill_beside, params)
        return await self._calls.decode(self._asked, params)

    async def _prefill_beside(self, params: Json) -> None:
        try:
            await self._calls.prefill(self._asked, params)
        except Refusal as refusal:
            # D refuses the same request by itself.
            log.info("%s: P refused it: HTTP %d", self._asked.request_id, refusal.status)
