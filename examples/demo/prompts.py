"""The prompts: English text about this project, in lengths that need every kind of block."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from tokenizers import Tokenizer

Prompt: TypeAlias = str | list[int]

BLOCK_TOKENS = 64

SENTENCES = (
    "A prefill instance reads the whole prompt once and leaves its keys and values in the pool.",
    "A decode instance finds them there, because both compute the same block keys from the tokens.",
    "The two never speak to each other: the store is where they meet.",
    "A block holds the keys and values of sixty-four tokens, over all layers of the model.",
    "The name of a block depends on its own tokens and on all tokens before it.",
    "The last block of a prompt is often not full, and it is stored under a key of its own.",
    "Every value carries a checksum, and a value that fails it is removed and computed again.",
    "A miss is never an error: the tokens that are not found are simply computed.",
    "When the store is slow, the decode instance waits for a while and then computes the prompt.",
    "When the store is gone, both instances go on, and join again as soon as it comes back.",
    "Blocks are gathered from the paged cache into slots of a staging buffer, sealed and put.",
    "On the other side they are verified first and only then scattered into the paged cache.",
    "A chunk of a long prompt is saved while the next chunk is still being computed.",
    "The decode instance computes one token of the prompt, the last, since it needs its logits.",
    "A lease keeps a block from being evicted between the match and the moment it is read.",
    "Redis is good for a test on one machine, and a shared directory needs no server at all.",
    "Where one machine is not enough, the same code talks to a distributed pool.",
    "Nothing that is read from the store is ever executed, only copied and compared.",
)


def make_prompts(checkpoint: Path) -> list[Prompt]:
    """Returns short prompts, whole blocks, long ones with a tail, and two with a common prefix."""
    text = " ".join(SENTENCES)
    tokens = _tokens_of(checkpoint, text)
    beginning = " ".join(SENTENCES[4:12])
    return [
        "The store is",
        SENTENCES[7],
        tokens[:BLOCK_TOKENS],
        tokens[100 : 100 + 2 * BLOCK_TOKENS],
        " ".join(SENTENCES[10:14]),
        " ".join(SENTENCES[8:18]),
        text,
        beginning + " In short, a prefill instance",
        beginning + " For the decode instance this means that",
    ]


def first_turn(checkpoint: Path) -> list[int]:
    """Returns the first turn of a conversation: 200 tokens."""
    return _tokens_of(checkpoint, " ".join(reversed(SENTENCES)))[:200]


def question(checkpoint: Path) -> list[int]:
    """Returns what the second turn adds to the first and its answer: three tokens."""
    return _tokens_of(checkpoint, " And what then?")[:3]


def whole_blocks(num_tokens: int) -> int:
    """Returns how many of the first tokens are in whole blocks."""
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _tokens_of(checkpoint: Path, text: str) -> list[int]:
    tokens: list[int] = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return tokens
