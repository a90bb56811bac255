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
MODELS["DeepSeek-V3.2"] = {
    **MODELS["DeepSeek-V3"],
    **{"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
}


def _gated_delta(model, interval=4, **more):
    """A config with gated delta nets in all layers but each `interval`th."""
    layers = model["num_hidden_layers"]
    return model | {
        "layer_types": [
            "linear_attention" if n % interval else "full_attention" for n in range(1, layers + 1)
        ],
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
        **more,
    }


def _nemotron_h(model, num_heads, pattern):
    return model | {
        **{"hybrid_override_pattern": pattern, "mamba_num_heads": num_heads},
        **{"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    }


HYBRIDS = {
    "Qwen3-Next-80B": _gated_delta(
        _dense(48, 2048, 16, 2, 5632, 151936, head_dim=256),
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
    ),
    "Qwen3.5-4B": _gated_delta(
        _dense(32, 2560, 16, 4, 9216, 248320, head_dim=256), mamba_ssm_dtype="float32"
    ),
    "Nemotron-H-8B": _nemotron_h(
        _dense(52, 4096, 32, 8, 21504, 131072, head_dim=128),
        128,
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    ),
    "Nemotron-3-Nano-30B": _nemotron_h(
        _dense(52, 2688, 32, 2, 1856, 131072, head_dim=128)
        | {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
        | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 3712},
        64,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "Kimi-Linear-48B": {
        **_dense(27, 2304, 32, 32, 9216, 163840),
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
        **{"v_head_dim": 128, "q_lora_rank": None, "num_experts": 256},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 1024, "first_k_dense_replace": 1},
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, 27) if n % 4],
            **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
        },
    },
    "Granite-4-H-Tiny": {
        **_dense(40, 1536, 12, 4, 512, 100352),
        "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)],
        **{"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
        **{"mamba_d_conv": 4, "num_local_experts": 64, "num_experts_per_tok": 6},
    },
    "LFM2-1.2B": {
        **_dense(16, 2048, 32, 8, 8192, 65536, conv_L_cache=3),
        "layer_types": [
            "full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)
        ],
    },
}
"""Models with states, in the numbers that fix their states and their KV."""
