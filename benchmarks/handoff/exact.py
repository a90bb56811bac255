"""Compares D with an instance that computes the same chunks, and with a D that lacks something.

The answers of a model depend on where chunks end, so an instance without a pool computes each
prompt again in the chunks that P and D computed. So does P, because two instances may differ in the
last bits: vLLM's attention on a CPU rounds by where blocks lie in the cache. Where an indexer
chooses the tokens that are read, all instances read them in one order, which vLLM leaves open. How
far D's answers differ without states, or without the pages of indexers, says what that means.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.handoff.instance import Ask, Instance, Prompt
from benchmarks.handoff.vllm import VllmInstance
from pdstore.router.bodies import REMOTE_DECODE

_REPLAY = "tests.support.vllm_replay"
LOG = "CHUNK_LOG"  # the variable that this module's schedulers read
WAYS: dict[str, dict[str, Any]] = {
    "eager": {
        **{"enforce_eager": True, "async_scheduling": False},
        "scheduler_cls": f"{_REPLAY}.ReplayScheduler",
    },
    "graphs": {"async_scheduling": True, "scheduler_cls": f"{_REPLAY}.AsyncReplayScheduler"},
}
"""Arguments of `vllm.LLM`: step by step, or as it serves."""
_NUM_DECODED = 16


def chunks_in(scratch: Path) -> Path:
    """The log of the chunks that all instances computed."""
    return scratch / "chunks"


def with_choices_sorted(arguments: dict[str, Any]) -> VllmInstance:
    """Makes an instance whose indexers, if its model has any, choose tokens in one order."""
    from tests.support.vllm_replay import sort_what_indexers_choose

    if "index_topk" in json.loads((Path(arguments["model"]) / "config.json").read_text()):
        sort_what_indexers_choose()
    return VllmInstance(arguments)


def with_used_blocks(arguments: dict[str, Any]) -> VllmInstance:
    """Makes an instance whose free blocks are full of NaN, as an earlier request may leave them."""
    from pdstore.adapters.vllm.connector import PDStoreConnector

    caches: list[torch.Tensor] = []
    register = PDStoreConnector.register_kv_caches

    def keep(connector: PDStoreConnector, kv_caches: dict[str, torch.Tensor]) -> None:
        caches.extend(kv_caches.values())
        register(connector, kv_caches)

    PDStoreConnector.register_kv_caches = keep  # type: ignore[method-assign, assignment]
    instance = with_choices_sorted(arguments)
    for cache in caches:
        rows_of_a_block = len(cache) // instance.about()["blocks"]
        as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
        cache[rows_of_a_block:].view(as_integers).fill_(-1)  # vLLM reads block 0 as zeros
    return instance


def without_states_and_pages(arguments: dict[str, Any]) -> VllmInstance:
    """Makes an instance that loads only the KV of tokens to where its model reads it."""
    from tests.support.vllm_replay import load_without_pages, load_without_states

    load_without_states()
    load_without_pages()
    return with_choices_sorted(arguments)


def compare_all(
    answers: Mapping[str, Answers], given: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Hands a prompt of each length over each store, prints the rows, and writes `--json`."""
    found["rows"] = []
    for store, tokens in product(answers, given.tokens):
        row = {"store": store, "way": given.exact, **answers[store].compare(tokens)}
        print(json.dumps(row), flush=True)
        found["rows"].append(row)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


class Answers:
    """A pair, the negative control, and the instance that computes all by itself.

    drops_last: True if P leaves out the last token of a prompt that it hands over, as it does of
      models with states. Otherwise P is asked for a prompt without it, so that its chunks are D's.
    """

    def __init__(
        self,
        pair: tuple[Instance, Instance],
        control: Instance,
        alone: Instance | None,
        chunks: Path,
        *,
        drops_last: bool,
    ) -> None:
        assert alone is not None
        self._p, self._d = pair
        self._control, self._alone = control, alone
        self._chunks, self._drops_last = chunks, drops_last
        self._num_asked = 0

    def compare(self, num_tokens: int) -> dict[str, Any]:
        """Returns a row for one new prompt."""
        from tests.support.vllm_replay import REPLAY, ends_of

        prompt = Prompt(num_tokens, secrets.randbits(48))
        given = prompt if self._drops_last else prompt._replace(num_tokens=num_tokens - 1)
        handoff = self._ask(self._p, given, 1, REMOTE_DECODE)["handoff"]
        mine = self._ask(self._d, prompt, _NUM_DECODED, handoff)
        ends = ends_of(self._chunks, mine["prompt_ids"])
        control = self._ask(self._control, prompt, _NUM_DECODED, handoff)
        theirs, repeated = (
            self._ask(instance, prompt, _NUM_DECODED, {REPLAY: ends}, skips_cache=True)
            for instance in (self._alone, self._p)
        )
        return {
            "tokens": num_tokens,
            "chunks": ends,
            "d_computed": mine["computed"],
            "d_loaded": mine["loaded"],
            "ids_equal": mine["ids"] == theirs["ids"],
            "largest_difference": _difference(mine, theirs),
            "repeated_ids_equal": repeated["ids"] == theirs["ids"],
            "repeated_largest_difference": _difference(repeated, theirs),
            "control_computed": control["computed"],
            "control_ids_equal": control["ids"] == theirs["ids"],
            "control_largest_difference": _difference(control, theirs),
        }

    def _ask(
        self,
        instance: Instance,
        prompt: Prompt,
        max_tokens: int,
        params: Any,
        skips_cache: bool = False,
    ) -> dict[str, Any]:
        name = f"exact-{self._num_asked}"
        self._num_asked += 1
        instance.stage(prompt)
        instance.ask(Ask(name, prompt, max_tokens, params, True, skips_cache))
        facts: dict[str, Any] = instance.wait("done", name)[1]
        instance.settle()
        return facts


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between logprobs of two answers, token by token."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return max(float(abs(a - b)) for a, b in pairs)
