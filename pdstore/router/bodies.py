"""JSON bodies: the client's, those for P and D that are made from it, and errors."""

from __future__ import annotations

import json
from typing import NoReturn, TypeAlias

from pdstore.telemetry.request_record import plain

Json: TypeAlias = dict[str, object]

_MESSAGE_CHARS = 300

# The convention of PD routers: P keeps its KV for a D that is not known yet.
REMOTE_DECODE: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The same of pdstore's P, whose token will be the last one of D's prompt.
REMOTE_DECODE_OF_ALL: Json = REMOTE_DECODE | {"keeps_last_token": True}


def parse(raw: bytes) -> Json:
    """Returns the JSON object in a body. Raises ValueError for anything else, NaN included."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    return body


def encode(body: Json) -> bytes:
    """Returns a body as JSON in UTF-8. Raises ValueError for what no JSON parser must accept.

    `parse` lets such values in: 1e999 becomes infinity, "\\ud800" half a character.
    """
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return text.encode()


def encode_field(body: Json, name: str) -> bytes:
    """Returns one field of a body as JSON, for `encode_beside`. Raises ValueError as `encode`."""
    return encode({name: body[name]})[1:-1]


def encode_beside(body: Json, name: str, field: bytes) -> bytes:
    """Returns a body as JSON, of which one field is encoded already. Raises ValueError."""
    others = encode({each: body[each] for each in body if each != name})[1:-1]
    return b"{%s}" % b",".join(filter(None, (field, others)))


def prefill_body(body: Json, params: Json) -> Json:
    """Returns P's request: the same prompt and one token, since P's work ends with the KV.

    P keeps a client's `min_tokens`, at most 1: the client may get P's token as its first, and it
    must not be one that ends the answer.
    """
    asked = {name: body[name] for name in body if name != "stream_options"}
    asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": params}
    for name in ("max_completion_tokens", "n", "best_of", "min_tokens"):
        if asked.get(name):
            asked[name] = 1
    return asked


def decode_body(body: Json, params: Json | None, prompt_ids: list[int] | None = None) -> Json:
    """Returns D's request: the client's, with these parameters and never the client's own.

    prompt_ids: the ids of a chat's prompt, which engines take in the parameters.
    """
    asked = {name: body[name] for name in body if name != "kv_transfer_params"}
    given = {**(params or {}), **({"prompt_token_ids": prompt_ids} if prompt_ids else {})}
    return asked | {"kv_transfer_params": given} if given else asked


def message_of(raw: bytes) -> str:
    """Returns what an engine's error says, in short; an empty text for a body of another form."""
    try:
        parsed = parse(raw)
    except ValueError:
        return ""
    error = parsed.get("error")
    message = error.get("message") if isinstance(error, dict) else parsed.get("message")
    return plain(message, _MESSAGE_CHARS) if isinstance(message, str) else ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Refusal(Exception):
    """Ends a request with this answer instead of one of D's."""

    def __init__(self, status: int, body: bytes, media_type: str = "application/json") -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.media_type = media_type

    @classmethod
    def saying(cls, status: int, message: str) -> Refusal:
        """Returns a refusal with an error object: the client's fault below 500, else upstream's."""
        kind = "invalid_request_error" if status < 500 else "upstream_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return cls(status, json.dumps({"error": error}).encode())
