"""SplicedExchange: passes P's token on at once, and D's answer behind it."""

# Decision: docs/decisions/036-router-splice.md
from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

import anyio
import httpx

from pdstore.router.answers import MAX_BYTES, OpenAnswer, TooLong, gather
from pdstore.router.bodies import REMOTE_DECODE_OF_ALL, Json, Refusal, encode, parse
from pdstore.router.calls import params_of, reason_of
from pdstore.router.exchange import Exchange
from pdstore.router.first_token import FirstChatToken, FirstToken, first_body
from pdstore.router.intake import Asked

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = [(b"content-type", b"application/json")]
_DATA = b"data: "
_DONE = b"data: [DONE]\n\n"
_KINDS = {"/v1/completions": FirstToken, "/v1/chat/completions": FirstChatToken}


class IdsIgnored(Refusal):
    """D has answered a chat's messages, and not the token ids that it got instead of them."""


class SplicedExchange(Exchange):
    """Answers with P's first token, and then with what D decodes after it.

    D gets the prompt and that token. P's hand-off covers the prompt, so D computes the token
    alone. A request that cannot be spliced (`can_continue`), or that P did not prefill, is answered
    as by Exchange; so is a chat unless D has said that it takes token ids. If P's token cannot be
    shown alone, D gets the prompt with the same hand-off, or with a second one that leaves out the
    last token: a model with states needs it.

    If a D that took token ids was replaced by one that does not, its answer shows it. Then the chat
    is answered as by Exchange; but if P's token is with the client already, D is asked to continue
    it as a message.
    """

    async def _answer(self, group: anyio.abc.TaskGroup) -> OpenAnswer:
        asked = self._asked
        kind = _KINDS.get(asked.path)
        if kind is None or not kind.can_continue(asked.body):
            return await super()._answer(group)
        if kind is FirstChatToken and not await self._takes_ids():
            return await super()._answer(group)
        answer = await self._prefill_answer(
            Asked(asked.path, first_body(asked.body), asked.headers), REMOTE_DECODE_OF_ALL
        )
        params = params_of(answer)
        first = kind.found_in(asked.body, answer)
        if first is None and _is_exact(params):
            return await super()._answer(group)  # D has no state before the prompt's last token
        if first is None:
            return await self._decode(asked, params)
        if asked.body.get("stream"):
            self._calls.counts.spliced.inc()
            return OpenAnswer(200, _EVENT_STREAM, self._stream(first, params))
        try:
            whole = await self._whole(first, params)
        except IdsIgnored:
            return await super()._answer(group)
        self._calls.counts.spliced.inc()
        return whole

    async def _takes_ids(self) -> bool:
        """Returns whether D takes a chat's prompt as token ids: asked once, until a D was down.

        It is asked before P, whose hand-off depends on the answer, and without a hand-off, which it
        could refuse. If D does not say, the next chat asks again.
        """
        calls = self._calls
        if calls.takes_ids is None:
            answer = await calls.answer_of_decode(FirstChatToken.question(self._asked))
            calls.note_ids(FirstChatToken.are_ids_taken(answer))
        if calls.takes_ids is None:
            words = (
                "%s: D did not say whether it takes token ids in chats%s. It gives the first token"
            )
            status = f": HTTP {answer.status}" if answer is not None else ""
            calls.log_unless_recent("takes ids", words, self._asked.request_id, status)
        return calls.takes_ids is True

    async def _whole(self, first: FirstToken, params: Json | None) -> OpenAnswer:
        if first.is_last:
            return OpenAnswer.made(200, _JSON, encode(first.whole()))
        rest = await self._decode(first.rest_of(self._asked), params)
        body = await self._all_of(rest)
        if rest.status != 200:
            return OpenAnswer.made(rest.status, rest.headers, body)
        answer = parse(body)
        self._check_continues(first, answer)
        return OpenAnswer.made(200, _JSON, encode(first.with_rest(answer)))

    def _check_continues(self, first: FirstToken, answer: Json) -> None:
        """Raises IdsIgnored, and notes it, if D's answer does not go on behind the first token."""
        if first.is_continued_by(answer):
            return
        self._calls.note_ids(False)
        words = "%s: D takes no token ids in chats any more: it gives the first token from now on"
        self._calls.log_unless_recent("ids ignored", words, self._asked.request_id)
        raise IdsIgnored.saying(502, "D takes no token ids in chats, unlike a D before")

    async def _all_of(self, answer: OpenAnswer) -> bytes:
        """Returns the body of D's answer, and closes it.

        Raises Refusal if D breaks off, or sends more than the router keeps.
        """
        async with contextlib.aclosing(answer):
            try:
                return await gather(answer.chunks)
            except TooLong as error:
                self._calls.counts.failures.labels("decode", reason_of(error)).inc()
                raise Refusal.saying(502, f"D sent {error}") from error
            except httpx.TransportError as error:
                self._calls.counts.failures.labels("decode", reason_of(error)).inc()
                raise Refusal.saying(502, "D broke off in its answer") from error

    async def _stream(self, first: FirstToken, params: Json | None) -> AsyncIterator[bytes]:
        """Yields the events of a stream. An error of D is the last one before [DONE]."""
        for part in first.parts():
            yield _event(part)
        if first.is_last:
            yield _DONE
            return
        try:
            try:
                asked = first.rest_of(self._asked)
                async with contextlib.aclosing(self._rest(first, asked, params)) as lines:
                    async for line in lines:
                        yield line
            except IdsIgnored:
                assert isinstance(first, FirstChatToken)
                asked = first.rest_in_words(self._asked)
                async with contextlib.aclosing(self._rest(first, asked, None)) as lines:
                    async for line in lines:
                        yield line
        except Refusal as refusal:
            yield _DATA + refusal.body.replace(b"\n", b" ") + b"\n\n"
            yield _DONE

    async def _rest(
        self, first: FirstToken, asked: Asked, params: Json | None
    ) -> AsyncGenerator[bytes]:
        """Yields the lines of D's stream as they read behind the first token.

        Raises Refusal: before the first line, with D's answer if that is an error.
        """
        answer = await self._decode(asked, params)
        async with contextlib.aclosing(answer):
            if answer.status != 200:
                raise Refusal(answer.status, await gather(answer.chunks))
            is_begun = False
            async for line in _lines(answer.chunks):
                if not line.startswith(_DATA + b"{"):
                    yield line + b"\n"
                    continue
                part = json.loads(line.removeprefix(_DATA))
                if not is_begun and "error" not in part:
                    self._check_continues(first, part)
                is_begun = True
                yield _DATA + encode(part if "error" in part else first.next_part(part)) + b"\n"


def _is_exact(params: Json | None) -> bool:
    """Returns whether P says that D can go on only after all tokens of the hand-off."""
    fields = (params or {}).get("pdstore")
    return isinstance(fields, dict) and fields.get("is_exact") is True


def _event(part: Json) -> bytes:
    return _DATA + encode(part) + b"\n\n"


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the lines of a stream without their ends. Raises TooLong for one that does not end."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                yield line.rstrip(b"\r")
        if len(rest) > MAX_BYTES:
            raise TooLong(f"a line of more than {MAX_BYTES} bytes")
    if rest:
        yield bytes(rest)
