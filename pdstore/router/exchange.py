"""One client request from its body to the last byte of its answer."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time

import anyio
import httpx
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdstore.router.answers import OpenAnswer, close
from pdstore.router.bodies import REMOTE_DECODE, Json, Refusal
from pdstore.router.calls import Calls, params_of, reason_of
from pdstore.router.counts import Routed
from pdstore.router.intake import Asked


class Exchange:
    """A response: prefills a request on P, decodes it on D, and passes D's answer on as it comes.

    Everything it starts ends with it: when the client leaves, the calls to P and D are cancelled.

    retries: how often P and D are asked once more, when D could not use the hand-off and does not
      compute instead.
    """

    def __init__(self, calls: Calls, asked: Asked, retries: int = 0) -> None:
        self._calls = calls
        self._asked = asked
        self._retries = retries
        self._begin = time.monotonic()
        self.routed = Routed(asked.request_id)
        self._is_begun = False
        self._is_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as group:
                watch = anyio.CancelScope()
                group.start_soon(self._watch_client, receive, watch, group.cancel_scope)
                try:
                    await self._exchange(group, scope, receive, send)
                finally:
                    watch.cancel()
                    if not self._is_ended:  # else the client sees a broken answer once P is done
                        group.cancel_scope.cancel()
                    self.routed.timer.end("answer")
                    self._calls.timeline.add(self.routed)
        finally:
            self._calls.forget(self._asked)  # when no call is left, also of P

    async def _exchange(
        self, group: anyio.abc.TaskGroup, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            answer = await self._answer(group)
        except Refusal as refusal:
            self._observe_first_byte()
            self._is_ended = True
            self.routed.reason = f"HTTP {refusal.status}"
            headers = {"x-request-id": self._asked.request_id, "content-type": refusal.media_type}
            await Response(refusal.body, refusal.status, headers)(scope, receive, send)
            return
        try:
            await self._pass_on(answer, send)
        except httpx.TransportError as error:
            # Unfinished, so the server cuts the connection: the client sees a broken answer.
            self._calls.counts.failures.labels("decode", reason_of(error)).inc()
            self.routed.reason = "D broke off"
            words = "%s: D broke off in its answer: %r"
            self._calls.log_unless_recent("broke off", words, self._asked.request_id, error)
        finally:
            await answer.aclose()

    async def _answer(self, group: anyio.abc.TaskGroup) -> OpenAnswer:
        """Asks D when P is done, with the parameters of P's answer. Raises Refusal."""
        params = await self._prefilled(self._asked, REMOTE_DECODE)
        return await self._decode(self._asked, params)

    async def _prefilled(self, asked: Asked, params: Json) -> Json | None:
        """Prefills on P; returns the parameters of its answer, None if D is asked without any.

        If the request has several prompts, there are none, and D looks up each prompt in the pool.
        """
        answer = await self._prefill_answer(asked, params)
        return None if asked.has_several_prompts else params_of(answer)

    async def _prefill_answer(self, asked: Asked, params: Json) -> Json | None:
        """Prefills on P; returns its whole answer, None if no P gave one."""
        self.routed.timer.begin("prefill")
        try:
            answer = await self._calls.prefill_answer(asked, params)
        finally:
            self.routed.timer.end("prefill")
        if answer is None:
            self.routed.reason = "no P could prefill it"
        self.routed.note_handoff(params_of(answer))
        return answer

    async def _decode(self, asked: Asked, params: Json | None) -> OpenAnswer:
        """Returns D's answer when its first bytes are there. Raises Refusal.

        A D that could not use P's hand-off has answered nothing, so that both may be asked again.
        """
        for retries_left in reversed(range(self._retries + 1)):
            answer = await self._begun(asked, params)
            lost = answer.lost if params is not None else None
            if lost is None:
                return answer
            await answer.aclose()
            self._calls.counts.lost.inc()
            words = "%s: D could not use the hand-off: %s"
            self._calls.log_unless_recent("lost", words, asked.request_id, lost)
            if retries_left:
                params = await self._prefilled(asked, REMOTE_DECODE)
        raise Refusal.saying(502, lost or "")

    async def _begun(self, asked: Asked, params: Json | None) -> OpenAnswer:
        """Returns D's answer when its first bytes are there: vLLM sends its headers before."""
        self.routed.timer.begin("decode")
        response = await self._calls.decode(asked, params)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(close, response)
            chunks = response.aiter_raw()
            try:
                first = await anext(chunks, b"")
            except httpx.TransportError as error:
                self._calls.counts.failures.labels("decode", reason_of(error)).inc()
                raise Refusal.saying(502, "D broke off before it began to answer") from error
            undo.pop_all()
        self.routed.timer.end("decode")
        self._calls.note_decoded(asked, response, first)
        return OpenAnswer.of_response(response, first, chunks)

    async def _pass_on(self, answer: OpenAnswer, send: Send) -> None:
        headers = [(b"x-request-id", self._asked.request_id.encode()), *answer.headers]
        self.routed.timer.begin("answer")
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for chunk in answer.chunks:
            self._observe_first_byte()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_ended = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch_client(
        self, receive: Receive, watch: anyio.CancelScope, everything: anyio.CancelScope
    ) -> None:
        with watch:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self._is_ended:
                self.routed.reason = "the client left"
                self._calls.counts.disconnects.inc()
                words = "%s: the client left"
                request_id = self._asked.request_id
                self._calls.log_unless_recent("client left", words, request_id, level=logging.INFO)
                everything.cancel()

    def _observe_first_byte(self) -> None:
        if self._is_begun:
            return
        self._is_begun = True
        self._calls.counts.first_byte.observe(time.monotonic() - self._begin)


class AloneExchange(Exchange):
    """Asks one instance, which prefills and decodes: for a router without Ps."""

    async def _answer(self, group: anyio.abc.TaskGroup) -> OpenAnswer:
        return await self._decode(self._asked, None)


class ConcurrentExchange(Exchange):
    """Gives one hand-off id to P and D at once; D follows P's blocks as P publishes them.

    If P publishes nothing, D is asked again without the id as long as it has not begun to answer:
    else it would wait for a hand-off that does not come. If P says that its last save fell short, D
    is asked again with P's answer, and sees whether this one comes.
    """

    def __init__(self, calls: Calls, asked: Asked, retries: int = 0) -> None:
        super().__init__(calls, asked, retries)
        self._refusal: Refusal | None = None
        self._params: Json | None = None  # of a P that may not save what D waits for

    async def _answer(self, group: anyio.abc.TaskGroup) -> OpenAnswer:
        if self._asked.has_several_prompts:
            return await super()._answer(group)
        params: Json = {"pdstore": {"attempt": secrets.token_hex(16)}}
        self.routed.note_handoff(params)
        with anyio.CancelScope() as following:
            group.start_soon(self._prefill, params, following)
            return await self._decode(self._asked, params)
        if self._refusal is not None:
            raise self._refusal
        return await self._decode(self._asked, self._params)

    async def _prefill(self, params: Json, following: anyio.CancelScope) -> None:
        """Prefills on P; ends D's call if P refused the request or published nothing."""
        try:
            published = await self._prefilled(self._asked, REMOTE_DECODE | params)
        except Refusal as refusal:
            self._refusal = refusal
        else:
            if published is not None and not _last_save_failed(published):
                return
            self._params = published
        following.cancel()  # without effect once D has begun to answer


def _last_save_failed(params: Json) -> bool:
    """Returns whether P says that its last save fell short."""
    fields = params.get("pdstore")
    return isinstance(fields, dict) and fields.get("last_save") is not None
