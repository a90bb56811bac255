"""A program in the place of an SGLang server, for the benchmark's own test: tokens without a model.

    python -m tests.support.sglang_stub --model-path DIRECTORY --port N [OPTIONS OF SGLANG]

Its tokens are a digest of the prompt; the logprobs of watched tokens tell how much of it was
computed. With a storage backend it keeps a file for each whole page as P, in the directory of
pdstore's arena or beside the checkpoint, and finds it there as D unless its bytes have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from examples.sglang_serve import HICACHE

PAGE = 64
OPTIONS = dict(pair for pair in zip(sys.argv[1:], sys.argv[2:], strict=False))


def option(name: str) -> str | None:
    joined = [each.partition("=")[2] for each in sys.argv if each.startswith(f"{name}=")]
    return joined[-1] if joined else OPTIONS.get(name)


ARENA = parse_qs(urlsplit(os.environ.get("PDSTORE_STORE", "")).query).get("dir")
POOL = Path(ARENA[0]) if ARENA else Path(str(option("--model-path"))).parent / "stub"
STORED = bytes(8192)
"""The bytes of a page."""
OWN: set[str] = set()


def pages_of(prompt: list[int]) -> list[str]:
    whole = range(PAGE, len(prompt), PAGE)  # the last token is always computed
    return [hashlib.sha256(repr(prompt[:end]).encode()).hexdigest() for end in whole]


def stored() -> set[str]:
    return {each.name for each in POOL.glob("*") if each.read_bytes() == STORED}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/flush_cache":
            OWN.clear()
            self._answer(b"")
            return
        asked = json.loads(body)
        prompt, count = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        ids = list(hashlib.sha256(repr(prompt).encode()).digest())[:count]
        num_cached = self._cached(pages_of(prompt)) * PAGE
        about: dict[str, object] = {"cached_tokens": num_cached}
        if asked["return_logprob"]:
            about["output_token_logprobs"] = [[-0.5, each, None] for each in ids]
            first = -float(ids[0]) - (len(prompt) - num_cached) / 1024
            watched = [[first, each, None] for each in asked["token_ids_logprob"]]
            about["output_token_ids_logprobs"] = [watched]
        lines = [
            json.dumps({"output_ids": ids[: n + 1], "meta_info": about}) for n in range(len(ids))
        ]
        self._answer("".join(f"data: {line}\n\n" for line in lines).encode() + b"data: [DONE]\n\n")

    def _cached(self, pages: list[str]) -> int:
        is_stored = option("--hicache-storage-backend") is not None
        role = os.environ.get("PDSTORE_ROLE")
        found = OWN | (stored() if is_stored else set())
        count = next((n for n, page in enumerate(pages) if page not in found), len(pages))
        OWN.update(pages)
        if is_stored and role == "prefill":
            POOL.mkdir(exist_ok=True)
            for page in pages:
                (POOL / page).write_bytes(STORED)
        return count

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    assert option("--hicache-storage-backend") is None or set(HICACHE[:3]) <= set(sys.argv)
    ThreadingHTTPServer(("127.0.0.1", int(str(option("--port")))), Handler).serve_forever()
