"""Prompts that the pool has a part of, answered by vLLM and by transformers.

    python -m tests.support.vllm_against_transformers KIND DIRECTORY

A process of its own, as vLLM wants it. Prints a list of rows, as JSON: how many tokens of a prompt
were loaded, whether the answers have the same tokens, and by how much their logprobs differ.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.vllm_checkpoints import make_tiny

NUM_ANSWERED = 6
# vLLM's other backend for MLA, of CPUs with AMX, takes no float32.
MLA = {"block_size": 16, "attention_backend": "CPU_MLA"}
DEADLINE_S = 30
Answer = list[tuple[int, float]]


def make_prompts() -> list[list[int]]:
    """Returns a prompt, and others that part from it in a block or in its tail, or are equal."""
    choose = random.Random(1)
    first, other = ([choose.randrange(256) for _ in range(150)] for _ in range(2))
    return [first, first[:144] + other[:60], first[:70] + other[:9], first + other, first]


def by_transformers(model: PreTrainedModel, prompt: list[int]) -> Answer:
    tokens, answer = list(prompt), []
    for _ in range(NUM_ANSWERED):
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        best = int(logprobs.argmax())
        answer.append((best, float(logprobs[best])))
        tokens.append(best)
    return answer


def main(kind: str, directory: Path) -> None:
    from examples.vllm_serve import CPU_ENVIRONMENT, ENVIRONMENT

    pool = directory / "pool"
    os.environ.update(CPU_ENVIRONMENT | ENVIRONMENT | {"PDSTORE_STAGING": "64MiB"})
    os.environ.update({"PD_TRANSFER_VIA_STORAGE": "1", "PDSTORE_STORE": f"file://{pool}"})
    checkpoint = make_tiny(kind, directory / kind)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,  # what is not computed came from the pool
        disable_log_stats=False,  # else it counts no cached tokens
        **MLA if kind == "mla" else {"block_size": 32},
    )
    sampling = SamplingParams(temperature=0, max_tokens=NUM_ANSWERED, logprobs=1, ignore_eos=True)
    # Asked as P is, so that a marker says when the prompt is in the pool.
    sampling.extra_args = {"kv_transfer_params": {"do_remote_decode": True}}
    rows = []
    for number, prompt in enumerate(make_prompts(), 1):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
        answer = [(i, those[i].logprob) for i, those in zip(ids, logprobs, strict=True)]
        rows.append(
            [output.num_cached_tokens, *compare(answer, by_transformers(reference, prompt))]
        )
        wait_for_markers(pool, number)
    print(json.dumps(rows))


def compare(some: Answer, others: Answer) -> tuple[bool, float]:
    pairs = list(zip(some, others, strict=True))
    return all(a[0] == b[0] for a, b in pairs), max(abs(a[1] - b[1]) for a, b in pairs)


def wait_for_markers(pool: Path, number: int) -> None:
    """Returns when `number` prompts are in the pool whole."""
    deadline = time.monotonic() + DEADLINE_S
    while len(list(pool.rglob("*:handoff:*:done"))) < number:
        assert time.monotonic() < deadline, "a prompt was not saved"
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
