"""SplicedExchange: passes P's token on at once, and D's answer behind it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import anyio

from examples.router.bodies import REMOTE_DECODE, Json, encode, parse
from examples.router.calls import params_of
from examples.router.exchange import Exchange
from examples.router.first_token import FirstToken, can_continue, first_body
from examples.router.intake import Asked
from examples.router.open_answer import OpenAnswer
from examples.router.refusal import Refusal

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]
_DATA, _DONE = b"data: ", b"data: [DONE]\n\n"


class SplicedExchange(Exchange):
    """Answers with P's first token, and with what D decodes behind it.

    D gets the prompt and that token. P's hand-off is that of the prompt, so D computes the token
    alone. What cannot be spliced (`can_continue`), or was not prefilled by P, goes as in Exchange.
    """

    async def _answer(self, group: anyio.abc.TaskGroup) -> OpenAnswer:
        asked = self._asked
        if not can_continue(asked.path, asked.body):
            return await super()._answer(group)
        answer = await self._prefill_answer(
            Asked(asked.path, first_body(asked.body), asked.headers), REMOTE_DECODE
        )
        params = params_of(answer)
        first = FirstToken.of(asked.body, answer)
        if first is None:
            return await self._decode(asked, params)
        self._calls.counts.spliced.inc()
        if asked.body.get("stream"):
            return OpenAnswer(200, _EVENT_STREAM, self._stream(first, params))
        return await self._whole(first, params)

    async def _whole(self, first: FirstToken, params: Json | None) -> OpenAnswer:
        if first.is_last:
            return OpenAnswer.of(200, _JSON, encode(first.whole()))
        async with self._rest_of(first, params) as rest:
            body = b"".join([chunk async for chunk in rest.chunks])
        if rest.status != 200:
            return OpenAnswer.of(rest.status, rest.headers, body)
        return OpenAnswer.of(200, _JSON, encode(first.with_rest(parse(body))))

    async def _stream(self, first: FirstToken, params: Json | None) -> AsyncIterator[bytes]:
        """Yields the events of a stream. An error of D is the last one before [DONE]."""
        for part in first.parts():
            yield _event(part)
        if first.is_last:
            yield _DONE
            return
        try:
            async with self._rest_of(first, params) as rest:
                if rest.status == 200:
                    async for line in _lines(rest.chunks):
                        yield _spliced(first, line)
                    return
                error = b"".join([chunk async for chunk in rest.chunks])
        except Refusal as refusal:
            error = refusal.body
        yield _DATA + error.replace(b"\n", b" ") + b"\n\n"
        yield _DONE

    @contextlib.asynccontextmanager
    async def _rest_of(self, first: FirstToken, params: Json | None) -> AsyncIterator[OpenAnswer]:
        asked = Asked(self._asked.path, first.body_of_rest(), self._asked.headers)
        rest = await self._decode(asked, params)
        try:
            yield rest
        finally:
            await rest.close()


def _event(part: Json) -> bytes:
    return _DATA + encode(part) + b"\n\n"


def _spliced(first: FirstToken, line: bytes) -> bytes:
    """Returns a line of D's stream as it reads behind the first token."""
    if not line.startswith(_DATA + b"{"):
        return line + b"\n"
    part = json.loads(line.removeprefix(_DATA))
    return _DATA + encode(part if "error" in part else first.next_part(part)) + b"\n"


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the lines of a stream without their ends."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
    if rest:
        yield rest
