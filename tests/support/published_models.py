"""Numbers of the configurations of published models, as far as KV and prefill follow from them."""

from __future__ import annotations


def _dense(layers, hidden, heads, kv_heads, inner, vocabulary, **more):
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **more,
    }


MODELS = {
    "Llama-3.1-8B": _dense(32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": _dense(80, 8192, 64, 8, 28672, 128256),
    "Qwen3-32B": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "DeepSeek-V3": {
        **_dense(61, 7168, 128, 128, 18432, 129280),
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128, "q_lora_rank": 1536, "n_routed_experts": 256},
        **{"n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"first_k_dense_replace": 3},
    },
}
