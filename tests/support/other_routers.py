"""The requests that other people's routers send to P and D, as their sources build them.

Each class is one router: `ask_p` and `ask_d` take a client's body, as `Body` is here, and return
those of P and D. `waits` says that D waits for what P has not stored yet, because the router
relays P's `kv_transfer_params`. `request_id` is of the form that the router gives both.
"""

from __future__ import annotations

import uuid
from typing import Any

Body = dict[str, Any]

REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What all that know vLLM's NixlConnector ask P for."""

FIELDS = dict.fromkeys(("no_stop_trim", "ignore_eos", "return_hidden_states"), False)
FIELDS |= {"skip_special_tokens": True}
FIELDS_OF_CHATS = {
    **dict.fromkeys(("logprobs", "continue_final_message"), False),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), True),
}
"""SGLang's own, of every request and of chats; vllm-router, which began as a copy, has them too."""


def whole(body: Body) -> Body:
    """Returns a body with the fields that SGLang's router and vllm-router add."""
    return FIELDS | (FIELDS_OF_CHATS if "messages" in body else {"echo": False}) | body


class Sidecar:
    """llm-d's sidecar with the connector `nixlv2`, the default: `handleNIXLV2`, ebab6879."""

    waits = True
    request_id = str(uuid.UUID(int=7))
    limits = ("max_tokens", "max_completion_tokens", "min_tokens")

    @classmethod
    def ask_p(cls, body: Body) -> Body:
        asked = {name: body[name] for name in body if name != "stream_options"}
        asked |= dict.fromkeys(cls.limits, 1)
        return asked | {"stream": False, "kv_transfer_params": REMOTE}

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        return body | {"kv_transfer_params": answered.get("kv_transfer_params")}


class SidecarWithSharedStorage:
    """llm-d's connector `shared-storage`: nothing is relayed, so D may look too early."""

    waits = False
    request_id = Sidecar.request_id

    @staticmethod
    def ask_p(body: Body) -> Body:
        return body | {"max_tokens": 1, "max_completion_tokens": 1, "cache_hit_threshold": 0}

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        return body | {"cache_hit_threshold": 0}


class Coordinator:
    """llm-d's coordinator with `kv-nixl`: `PrefillStep` and `DecodeStep`, ebab6879.

    Without its step that tokenizes. Then a prompt is sent as it came, and `tokens` is empty.
    """

    waits = True
    request_id = Sidecar.request_id

    @classmethod
    def ask_p(cls, body: Body) -> Body:
        if "messages" in body:
            asked = {name: body[name] for name in body if name != "stream_options"}
            asked |= {"tokens": {"token_ids": None}}
        else:
            asked = {"request_id": cls.request_id, "model": body["model"], "prompt": body["prompt"]}
        return asked | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE}

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        pulled = {"do_remote_decode": False, "do_remote_prefill": True}
        asked = body | {"kv_transfer_params": answered["kv_transfer_params"] | pulled}
        return asked | ({"tokens": {"token_ids": None}} if "messages" in body else {})


class VllmRouter:
    """vllm-router 0.1.17 with `--vllm-pd-disaggregation`."""

    waits = True
    request_id = "___prefill_addr_127.0.0.1:1___decode_addr_127.0.0.1:2_a12c7cf5"

    @staticmethod
    def ask_p(body: Body) -> Body:
        limits = {"max_tokens": 1, "min_tokens": 1, "stream": False}
        return whole(body) | limits | {"kv_transfer_params": REMOTE}

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        return whole(body) | {"kv_transfer_params": answered["kv_transfer_params"]}


class RayServe:
    """Ray Serve's `build_pd_openai_app`, 2.60: `DefaultPDProtocolMixin`, for any connector that
    Ray does not know."""

    waits = True
    request_id = str(uuid.UUID(int=9))

    @staticmethod
    def ask_p(body: Body) -> Body:
        limits = {"max_tokens": 1, "stream": False, "stream_options": None}
        if "messages" in body:
            limits["max_completion_tokens"] = 1
        return body | limits | {"kv_transfer_params": REMOTE}

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        return body | {"kv_transfer_params": answered["kv_transfer_params"]}


class SGLangRouter:
    """SGLang's router, 0.3.2, with `--worker-urls`: it asks one instance, and then another one."""

    waits = False
    request_id = str(uuid.UUID(int=8))

    @staticmethod
    def ask_p(body: Body) -> Body:
        return whole(body)

    @staticmethod
    def ask_d(body: Body, answered: Body) -> Body:
        return whole(body)


REPLAYED = (
    Sidecar,
    SidecarWithSharedStorage,
    Coordinator,
    VllmRouter,
    RayServe,
    SGLangRouter,
)
