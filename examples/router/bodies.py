"""What P and D are asked, made from what the client asked."""

from __future__ import annotations

from typing import TypeAlias

Json: TypeAlias = dict[str, object]

# The convention of PD routers: P keeps its KV for a D that is not known yet.
REMOTE_DECODE: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: Json, params: Json) -> Json:
    """The prompt, and one token: P's work ends with the prompt's KV."""
    asked = {name: body[name] for name in body if name not in ("min_tokens", "stream_options")}
    asked |= {"stream": False, "max_tokens": 1, "kv_transfer_params": params}
    for name in ("max_completion_tokens", "n", "best_of"):
        if name in asked:
            asked[name] = 1
    return asked


def decode_body(body: Json, params: Json | None) -> Json:
    """The client's request with P's parameters; a client's own are not for engines to trust."""
    asked = {name: body[name] for name in body if name != "kv_transfer_params"}
    return asked | {"kv_transfer_params": params} if params else asked
