"""A tiny random BLIP-2 for tests with vLLM: a picture is IMAGE_TOKENS equal placeholders.

vLLM's CPU build comes without torchvision, which LLaVA, Qwen2-VL, Gemma 3 and PaliGemma import.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from tests.support.vllm_checkpoints import VOCABULARY, llama_config, make_tokenizer

IMAGE_TOKENS, PIXELS = 16, 56
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
_DEPTH = {"num_hidden_layers": 2, "initializer_range": 0.2}


def make_vision(directory: Path) -> Path:
    """Writes the checkpoint and its processor."""
    tokenizer = make_tokenizer()
    images = BlipImageProcessorPil(size={"height": PIXELS, "width": PIXELS})
    Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)
    text = llama_config(vocab_size=VOCABULARY + 1, architectures=["LlamaForCausalLM"])
    config = Blip2Config(
        vision_config=Blip2VisionConfig(image_size=PIXELS, patch_size=14, **_TOWER, **_DEPTH),
        qformer_config=Blip2QFormerConfig(encoder_hidden_size=64, **_TOWER, **_DEPTH),
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=VOCABULARY,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Blip2ForConditionalGeneration(config)
        torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(directory)
    return directory
