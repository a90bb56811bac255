"""Measures how long it takes to hash a long prompt into block keys.

python -m benchmarks.keys [--items] [--json FILE]

With --items it measures the digests of images, sounds and videos in vLLM instead.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import UserDict
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import torch

from benchmarks.command import parser_of, run
from benchmarks.report import Report, seconds_of
from pdstore.adapters.vllm.contents import Contents
from pdstore.errors import MissingExtra
from pdstore.format.keys import Namespace, Part, PromptKeys, int32_bytes

NUM_TOKENS = 131_072
_GOALS_MS = {16: 5.0, 64: 2.0}
_ITEM_MB = (1, 25, 200)


def bench_keys(rounds: int) -> Report:
    """Hashes 131,072 tokens; the ways take turns. Raises MissingExtra without cbor2."""
    listed = [random.Random(0).randrange(150_000) for _ in range(NUM_TOKENS)]
    tokens = array("i", listed)
    ways: dict[tuple[str, int], Callable[[], object]] = {
        ("list -> int32", 0): lambda: int32_bytes(listed)
    }
    for size in _GOALS_MS:
        namespace = Namespace({"bench": size}, (Part(0, 0),), size)
        ways["hash sha256", size] = _hashing(namespace, tokens)
        ways["key texts", size] = _texts(PromptKeys(namespace).extend(tokens))
        ways["sha256 over canonical CBOR", size] = _cbor_hashing(listed, size)
    times: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, function in ways.items():
            times[way].append(seconds_of(function) * 1e3)
    report = Report(
        f"{NUM_TOKENS} tokens from an int32 buffer, one core, {rounds} rounds in turn",
        ["what", "block tokens", "median ms", "best ms", "goal ms"],
    )
    for (what, size), measured in times.items():
        goal = _GOALS_MS[size] if what.startswith("hash") else ""
        report.add(what, size or "", median(measured), min(measured), goal)
    return report


def _hashing(namespace: Namespace, tokens: array[int]) -> Callable[[], object]:
    return lambda: PromptKeys(namespace).extend(tokens)


def _texts(keys: PromptKeys) -> Callable[[], object]:
    return lambda: keys.store_keys((Part(0, 0),))


def _cbor_hashing(tokens: list[int], size: int) -> Callable[[], object]:
    """Hashes (parent, tokens, extra) of each block as canonical CBOR, as some engines do."""
    try:
        from cbor2 import dumps
    except ImportError as error:
        raise MissingExtra("the comparison needs cbor2: pip install --group bench") from error

    def hash_all() -> None:
        parent = b""
        for start in range(0, len(tokens), size):
            block = (parent, tuple(tokens[start : start + size]), None)
            parent = hashlib.sha256(dumps(block, canonical=True)).digest()

    return hash_all


def bench_items(rounds: int) -> Report:
    """Asks for the digests of items of 1, 25 and 200 MB, as vLLM's scheduler does."""
    report = Report(
        f"a request with one image, sound or video, {rounds} rounds",
        ["what", "MB", "median ms", "best ms"],
    )
    what = ("until its digest is known", "of it in the scheduler's thread", "sent again")
    for size in _ITEM_MB:
        times = [_item_times(size) for _ in range(rounds)]
        for name, each in zip(what, zip(*times, strict=True), strict=True):
            report.add(name, size, median(each) * 1e3, min(each) * 1e3)
    return report


def _item_times(megabytes: int) -> tuple[float, float, float]:
    """Returns the seconds until a digest is known, those of the caller's calls, and of a repeat."""
    contents = Contents()
    pixels = torch.randint(0, 256, (megabytes * 1_000_000,), dtype=torch.uint8)
    data = UserDict({"pixel_values": pixels.view(torch.bfloat16)})

    def request(name: str) -> SimpleNamespace:
        place = SimpleNamespace(offset=0, length=16)
        item = SimpleNamespace(data=data, identifier="image", mm_position=place)
        return SimpleNamespace(request_id=name, mm_features=[item], lora_request=None)

    first, again = request("first"), request("again")
    asking_s = seconds_of(lambda: contents.content_of(first))
    waiting_s = seconds_of(lambda: contents.content_of(first, 60.0))
    settled_s = seconds_of(lambda: contents.content_of(first, 60.0))
    again_s = seconds_of(lambda: contents.content_of(again, 60.0))
    contents.close()
    return asking_s + waiting_s, asking_s + settled_s, again_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--items", action="store_true", help="digests of images, sounds, videos")
    given = parser.parse_args()
    measure = bench_items if given.items else bench_keys
    run(lambda: measure(given.rounds), given.json)


if __name__ == "__main__":
    main()
