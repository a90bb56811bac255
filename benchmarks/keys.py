"""Measures how long it takes to hash a long prompt into block keys.

python -m benchmarks.keys [--json FILE]
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable
from statistics import median

from benchmarks.command import parser_of, run
from benchmarks.report import Report, seconds_of
from pdstore.errors import MissingExtra
from pdstore.format.keys import Namespace, Part, PromptKeys, int32_bytes

NUM_TOKENS = 131_072
_GOALS_MS = {16: 5.0, 64: 2.0}


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
        raise MissingExtra("the comparison needs cbor2: pip install 'pdstore[bench]'") from error

    def hash_all() -> None:
        parent = b""
        for start in range(0, len(tokens), size):
            block = (parent, tuple(tokens[start : start + size]), None)
            parent = hashlib.sha256(dumps(block, canonical=True)).digest()

    return hash_all


def main() -> None:
    given = parser_of(__doc__).parse_args()
    run(lambda: bench_keys(given.rounds), given.json)


if __name__ == "__main__":
    main()
