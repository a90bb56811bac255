"""Tests of the vLLM adapter with the real engine: `vllm serve` in processes, asked over HTTP."""
