"""Trains the tiny checkpoint: a byte-level BPE tokenizer and a small Llama."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
SEED = 7
VOCABULARY = 1024
WINDOWS = (64, 128, 256, 512)
STEP_TOKENS = 1024
LEARNING_RATE = 4e-3


def train_tokenizer(documents: list[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer: any text has tokens, any list of tokens has a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


def train_model(
    tokenizer: PreTrainedTokenizerFast, documents: list[str], steps: int
) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order: the same checkpoint on every machine of a kind
    model: LlamaForCausalLM = LlamaForCausalLM(
        _config(len(tokenizer), tokenizer.eos_token_id)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    tokens = torch.tensor(tokenizer(END.join(documents))["input_ids"])
    with tqdm(total=steps, desc="training a tiny checkpoint", unit="step") as progress:
        for batch in _batches(tokens, steps):
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
            progress.update()
    torch.set_num_threads(threads)
    model.eval()
    return model


def _config(vocabulary: int, end: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
    )


def _batches(tokens: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Yields batches of random windows: of one length in a batch, of about STEP_TOKENS in all."""
    choose = random.Random(SEED)
    for _ in range(steps):
        window = min(choose.choice(WINDOWS), len(tokens) - 1)
        starts = [choose.randrange(len(tokens) - window) for _ in range(STEP_TOKENS // window)]
        yield torch.stack([tokens[start : start + window] for start in starts])


def _rate(step: int, steps: int) -> float:
    """Returns the learning rate's factor: a short warm-up, then a cosine down to a twentieth."""
    warm = min(1.0, (step + 1) / min(20, steps))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
