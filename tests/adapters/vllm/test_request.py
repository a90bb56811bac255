"""RequestTracker: keys of what was decoded are those of the next turn's prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore import Layout
from pdstore.adapters.vllm.request import RequestTracker, is_keyed
from pdstore.format.keys import PromptKeys
from tests.support.kv import LAYERS, settings_of

BLOCK = 64


@pytest.fixture(scope="module")
def namespace():
    settings = settings_of()
    layout = Layout.of(settings, dtype="float32", layers=LAYERS, engine_block_tokens=64, rope="")
    return layout.namespace(settings, weights="w")


@pytest.mark.parametrize("num_prompt", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 200])
@pytest.mark.parametrize("stride", [1, 63, 64, 200])
def test_decoded_blocks_have_the_keys_of_the_next_turns_prompt(namespace, num_prompt, stride):
    tokens = list(range(1, 501))
    prompt = PromptKeys(namespace).extend(tokens[:num_prompt])
    tracker = RequestTracker(SimpleNamespace(all_token_ids=tokens), prompt)
    whole = PromptKeys(namespace).extend(tokens)
    for num_tokens in range(num_prompt, len(tokens), stride):
        keys = tracker.decoded_until(num_tokens)
        end = max(num_tokens, keys.num_tokens) // BLOCK * BLOCK
        assert keys.num_tokens == end
        assert keys.store_keys(namespace.parts) == whole.prefix(end).store_keys(namespace.parts)
    assert tracker.keys.num_tokens == num_prompt


def request(**changes):
    return SimpleNamespace(
        **{
            "prompt_token_ids": [1, 2],
            "prompt_embeds": None,
            "pooling_params": None,
            "lora_request": None,
            "cache_salt": None,
            "kv_transfer_params": None,
            **changes,
        }
    )


def test_a_prompt_of_tokens_is_keyed():
    assert is_keyed(request(), has_pages=True)
    assert is_keyed(request(cache_salt="mine"), has_pages=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"resumable": True},
        {"lora_request": SimpleNamespace(load_inplace=True)},
        {"cache_salt": "mine"},
    ],
)
def test_what_tokens_do_not_name_is_not_keyed(changes):
    assert not is_keyed(request(**changes), has_pages=True)
