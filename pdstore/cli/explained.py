"""`pdstore explain`: how much of a prompt a pool has, where the run ends, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, age, busy, count, heading, table
from pdstore.cli.listing import NamespaceUse, OpenPool, open_pool, survey
from pdstore.errors import ConfigError, MissingExtra
from pdstore.format.keys import BlockKey, Json, Namespace, PromptKeys
from pdstore.store.optional import StoredValue

_ROWS = 12
_MOST_NAMESPACES = 32
_MOST_ID = (1 << 31) - 1


@dataclass(frozen=True)
class Question:
    """A prompt, as text with the model whose tokenizer reads it, or as token ids.

    namespace: the first digits of the one that is meant; empty for the one that has most of it.
    cache_salt: the request's own.
    """

    prompt: str | None = None
    model: str | None = None
    ids: str | None = None
    namespace: str = ""
    cache_salt: str = ""

    def token_ids(self) -> list[int]:
        """Returns the prompt's ids: given as `1,2,3` or in a file. Raises ConfigError."""
        if self.ids is not None:
            return _ids_of(self.ids)
        if self.prompt is None or self.model is None:
            raise ConfigError("give --ids 1,2,3 (or a file of them), or a PROMPT and its --model")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingExtra(
                "a PROMPT needs a tokenizer: pip install transformers, or give --ids"
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.model)
        except (OSError, ValueError) as error:  # it says all that it has tried, in many lines
            raise ConfigError(
                f"no tokenizer in {self.model}: give the model's directory by --model, or --ids"
            ) from error
        return cast("list[int]", tokenizer(self.prompt)["input_ids"])


class CoveredBlock(NamedTuple):
    """A block of the prompt. num_parts: of its parts, how many are stored; age_s: of the oldest."""

    number: int
    first_token: int
    num_tokens: int
    hash: str
    num_parts: int
    age_s: float | None


@dataclass(frozen=True)
class Cover:
    """All blocks of one prompt in one namespace.

    num_parts: parts that a whole block has, as far as the pool shows.
    youngest_s: seconds since anything of the namespace was used.
    """

    namespace: str
    block_tokens: int
    num_prompt: int
    num_parts: int
    blocks: Sequence[CoveredBlock]
    youngest_s: float | None

    @property
    def num_run(self) -> int:
        """Leading blocks that are whole."""
        gaps = (block.number for block in self.blocks if block.num_parts < self.num_parts)
        return next(gaps, len(self.blocks))

    @property
    def num_tokens(self) -> int:
        """Tokens of the leading blocks that are whole."""
        return sum(block.num_tokens for block in self.blocks[: self.num_run])

    @property
    def num_found(self) -> int:
        """Parts that are stored, in the run or behind it."""
        return sum(block.num_parts for block in self.blocks)

    def why(self) -> str:
        """Returns why the run ends where it does, and what to look at."""
        if self.num_run == len(self.blocks):
            return "all of it is there"
        gap, behind = self.blocks[self.num_run], self.blocks[self.num_run + 1 :]
        name = f"block {gap.number}"
        if gap.num_parts > 0:
            return (
                f"{name} has {gap.num_parts} of {self.num_parts} parts: a rank of P did not save"
                " its own, or it was evicted"
            )
        if any(block.num_parts for block in behind):
            return f"{name} is missing and later ones are there: it was evicted, or was damaged"
        if gap.num_tokens < self.block_tokens:
            return (
                f"the tail of {gap.num_tokens} tokens is missing: P saved no prompt that ends"
                " there, or did so longer than PDSTORE_HANDOFF_TTL_S ago"
            )
        if self.num_run:
            return f"{name} was never saved, or has expired: the prompts differ from there on"
        return (
            "not even the first block is there: P did not save this prompt here, or with other"
            f" token ids, salt or LoRA; the namespace was used {age(self.youngest_s)} ago"
        )


def cover_of(keys: PromptKeys, stored: Mapping[BlockKey, StoredValue], use: NamespaceUse) -> Cover:
    """Returns which blocks of a prompt are stored."""
    parts = keys.namespace.parts
    blocks = []
    for number in range(len(keys)):
        mine = keys.store_keys(parts, number, number + 1)
        found = [stored[key] for key in mine if key in stored]
        ages = [value.age_s for value in found if value.age_s is not None]
        blocks.append(
            CoveredBlock(
                number,
                number * keys.block_tokens,
                keys.tokens_of(number),
                keys.hash_of(number).hex(),
                len(found),
                max(ages, default=None),
            )
        )
    return Cover(use.hex, keys.block_tokens, keys.num_tokens, len(parts), blocks, use.youngest_s)


def explain(url: str | None, question: Question) -> Answer:
    """Compares a prompt's keys with what is stored. Status 1 unless all of it is there.

    The largest namespaces of the pool are tried, the one that is meant before them, so that a
    prompt that P saved under another one is found.
    """
    with busy("reading the prompt"):
        ids = question.token_ids()
    with open_pool(url) as pool:
        with busy(f"listing {pool.store.label}"):
            stored = {value.key: value for value in pool.lists.stored_values()}
        uses = survey(stored.values())
        uses.sort(key=lambda use: not use.hex.startswith(question.namespace))
        tried = uses[:_MOST_NAMESPACES]
        covers = [_cover(pool, use, ids, question, stored) for use in tried]
        label = pool.store.label
    named = [cover for cover in covers if cover.namespace.startswith(question.namespace)]
    meant = max(named, key=lambda c: (c.num_tokens, c.num_found), default=None)
    if meant is None:
        why = "this pool has no such namespace" if question.namespace else "this pool is empty"
        numbers: Json = {"store": label, "prompt_tokens": len(ids), "found_tokens": 0, "why": why}
        return Answer(numbers, [f"0 of {count(len(ids))} tokens: {why} ({label})"], status=1)
    return _answer(label, meant, covers, len(uses))


def _cover(
    pool: OpenPool,
    use: NamespaceUse,
    ids: Sequence[int],
    question: Question,
    stored: Mapping[BlockKey, StoredValue],
) -> Cover:
    """Returns what a namespace has of the prompt.

    The size of its blocks is that of a stored one; without one, that of the settings.
    """
    found = pool.read(use.sample.key) if use.sample else None
    told = found.header.num_tokens if found and found.header else 0
    block_tokens = told or pool.settings.block_tokens  # whoever wrote the value may have said 0
    parts = tuple(sorted(use.parts))
    namespace = Namespace({}, parts, block_tokens, digest=bytes.fromhex(use.hex))
    salt = question.cache_salt.encode()
    return cover_of(PromptKeys(namespace, cache_salt=salt).extend(ids), stored, use)


def _ids_of(text: str) -> list[int]:
    try:
        listed = text if set(text) <= set("0123456789, []") else Path(text).read_text()
        found = json.loads(listed if listed.lstrip().startswith("[") else f"[{listed}]")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--ids: {text[:40]!r} is neither ids nor a file of them") from error
    if not found or not all(type(each) is int and 0 <= each <= _MOST_ID for each in found):
        raise ConfigError(f"--ids: {text[:40]!r} is no list of token ids")
    return cast("list[int]", found)


def _answer(label: str, meant: Cover, covers: Sequence[Cover], num_namespaces: int) -> Answer:
    whole, why = meant.num_tokens == meant.num_prompt, meant.why()
    others: dict[str, Json] = {
        c.namespace: c.num_tokens for c in covers if c is not meant and c.num_tokens
    }
    blocks: list[Json] = [dict(block._asdict()) for block in meant.blocks]
    document: Json = {
        "store": label,
        "namespace": meant.namespace,
        "block_tokens": meant.block_tokens,
        "prompt_tokens": meant.num_prompt,
        "found_tokens": meant.num_tokens,
        "why": why,
        "blocks": blocks,
        "other_namespaces": others,
        "num_namespaces": num_namespaces,
    }
    title = f"{count(meant.num_tokens)} of {count(meant.num_prompt)} tokens in namespace"
    shown: list[RenderableType] = [heading(f"{title} {meant.namespace[:12]} of {label}")]
    shown += [table(["block", "tokens", "hash", "parts", ">used"], _rows(meant)), f"→ {why}"]
    for name, tokens in others.items():
        shown.append(
            f"→ namespace {name[:12]} has {tokens} tokens of the same prompt: if P and D should"
            " agree, `pdstore doctor --peer P --peer D` names the fields that differ"
        )
    if num_namespaces > len(covers):
        shown.append(
            f"→ {len(covers)} of {num_namespaces} namespaces were tried: name another one by"
            " --namespace"
        )
    return Answer(document, shown, status=int(not whole))


def _rows(cover: Cover) -> list[list[RenderableType]]:
    """Shows the blocks around the end of the run; the others look all alike."""
    first = max(0, min(cover.num_run - _ROWS // 2, len(cover.blocks) - _ROWS))
    rows: list[list[RenderableType]] = []
    for block in cover.blocks[first : first + _ROWS]:
        colour = "green" if block.num_parts == cover.num_parts else "red"
        parts = Text(f"{block.num_parts} of {cover.num_parts}", colour)
        span = f"{block.first_token}-{block.first_token + block.num_tokens - 1}"
        rows.append([str(block.number), span, block.hash[:12], parts, age(block.age_s)])
    return rows
