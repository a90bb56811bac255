"""Cover: the run of a prompt, and a true reason for its end."""

from __future__ import annotations

import pytest

from pdstore.cli.prompt_cover import cover_of
from pdstore.cli.survey import NamespaceUse
from pdstore.format.keys import PromptKeys
from pdstore.format.namespace import Part
from pdstore.store.optional import StoredValue
from tests.support.command import namespace_of

NAMESPACE = namespace_of("any", parts=(Part(0, 0), Part(0, 1)))
KEYS = PromptKeys(NAMESPACE).extend(range(70))  # four blocks of 16 and a tail of 6


def covered(*missing):
    """The cover of a prompt of which all but some (block, part) are stored, for block seconds."""
    names = KEYS.store_keys(NAMESPACE.parts)
    stored = {
        key: StoredValue(key, 1, float(i // 2))
        for i, key in enumerate(names)
        if divmod(i, 2) not in missing and (i // 2, None) not in missing
    }
    return cover_of(KEYS, stored, NamespaceUse(NAMESPACE.hex, youngest_s=7.0))


def test_a_whole_prompt_is_covered_to_its_last_token():
    cover = covered()
    assert (cover.num_run, cover.num_tokens, cover.num_found) == (5, 70, 10)
    assert [block.num_tokens for block in cover.blocks] == [16, 16, 16, 16, 6]
    assert [block.age_s for block in cover.blocks] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert cover.why() == "all of it is there"


@pytest.mark.parametrize(
    ("missing", "num_tokens", "why"),
    [
        ([(2, 1)], 32, "block 2 has 1 of 2 parts"),
        ([(2, None)], 32, "block 2 is missing and later ones are there"),
        ([(4, None)], 64, "the tail of 6 tokens is missing"),
        ([(n, None) for n in (3, 4)], 48, "block 3 was never saved"),
        ([(n, None) for n in range(5)], 0, "not even the first block is there"),
    ],
)
def test_the_end_of_the_run_has_its_reason(missing, num_tokens, why):
    cover = covered(*missing)
    assert cover.num_tokens == num_tokens
    assert cover.why().startswith(why)
