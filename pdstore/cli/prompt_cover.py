"""Cover: which blocks of one prompt one namespace has, and why it has no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdstore.cli.quantity import age
from pdstore.cli.survey import NamespaceUse
from pdstore.format.keys import BlockKey, PromptKeys
from pdstore.store.optional import StoredValue


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
