"""RequestTracker: keys of what was decoded are those of the next turn's prompt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstore import Layout
from pdstore.adapters.vllm.request import RequestTracker, is_keyed, keys_of
from pdstore.format.keys import PromptKeys
from tests.support.instances import instance as instance
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


def test_images_that_vllm_only_numbers_have_no_keys(instance):
    image = SimpleNamespace(
        mm_position=SimpleNamespace(offset=0, length=2), identifier="renderer0-mm-1-image-0"
    )
    cache, pictured = instance().cache, request(mm_features=[image])
    assert keys_of(pictured, cache, hashes_items=True) is not None
    assert keys_of(pictured, cache, hashes_items=False) is None
    assert keys_of(request(mm_features=[]), cache, hashes_items=False) is not None


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


def adapter(directory, weights):
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_int_id=1, lora_name="mine", lora_path=str(directory))


def test_adapters_of_one_name_and_other_contents_never_share_a_block(instance, tmp_path):
    cache = instance().cache
    blocks = {
        tuple(keys_of(request(lora_request=lora), cache).store_keys(cache.namespace.parts))
        for lora in (
            None,
            adapter(tmp_path / "a" / "mine", b"first"),
            adapter(tmp_path / "b" / "mine", b"other"),
        )
    }
    assert len(blocks) == 3


def test_an_adapter_whose_files_are_gone_bypasses_the_pool(instance, tmp_path):
    gone = SimpleNamespace(lora_int_id=2, lora_name="mine", lora_path=str(tmp_path / "gone"))
    assert keys_of(request(lora_request=gone), instance().cache) is None
