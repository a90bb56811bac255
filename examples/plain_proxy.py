"""A minimal PD proxy, of the kind that comes with vLLM's connectors: asks P, then D.

    python -m examples.plain_proxy --port N --prefill URL --decode URL

It knows nothing of pdstore. The demo sends every prompt through it too, to show that any proxy will
do that relays P's `kv_transfer_params` to D. For more than that, take `pdstore-router`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_OF_THE_ANSWER = (
    *("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of", "use_beam_search"),
)
"""Fields that P must not obey: it computes the prompt once, and one token."""
ASK_P = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_app(prefill: str, decode: str) -> Starlette:
    """Returns the proxy in front of one P and one D, as an ASGI application."""
    limits = httpx.Limits(keepalive_expiry=2.0)  # instances drop idle connections after 5 s
    client = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)

    @contextlib.asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    async def complete(request: Request) -> Response:
        body, path = await request.json(), request.url.path
        ask_p = {name: body[name] for name in body if name not in _OF_THE_ANSWER}
        ask_p |= {"max_tokens": 1, "stream": False, "kv_transfer_params": ASK_P}
        prefilled = await client.post(prefill + path, json=ask_p)
        prefilled.raise_for_status()
        params = prefilled.json().get("kv_transfer_params")
        ask_d = body | ({"kv_transfer_params": params} if params else {})
        asking = client.build_request("POST", decode + path, json=ask_d)
        answer = await client.send(asking, stream=True)
        kind = answer.headers.get("content-type")
        return StreamingResponse(_pass_on(answer), answer.status_code, media_type=kind)

    async def health(request: Request) -> Response:
        return Response()

    paths = ("/v1/completions", "/v1/chat/completions")
    posts = [Route(path, complete, methods=["POST"]) for path in paths]
    return Starlette(routes=[*posts, Route("/health", health)], lifespan=running)


async def _pass_on(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="P, then D with P's kv_transfer_params.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    given = parser.parse_args()
    app = make_app(given.prefill.rstrip("/"), given.decode.rstrip("/"))
    uvicorn.run(app, host="127.0.0.1", port=given.port, access_log=False)
