"""Models that are served with dummy weights: shapes by name, or a directory with a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pdstore.sizing import ModelShape

_COMMON = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
_COMMON |= {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_8B: dict[str, Any] = {
    **_COMMON,
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
}
_DELTA_NET = {
    **_COMMON,
    **{"num_attention_heads": 16, "head_dim": 256, "partial_rotary_factor": 0.25},
    **{"rope_theta": 10000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"full_attention_interval": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
_EXPERTS = {"decoder_sparse_step": 1, "num_experts": 512, "num_experts_per_tok": 10}
_EXPERTS |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_EXPERTS_OF_SIGMOID = {  # in one layer behind three dense ones; 32 of the 256 experts
    **_COMMON,
    **{"num_hidden_layers": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1},
    **{"n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 2048, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu"},
    **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": False},
    **{"bos_token_id": 0, "eos_token_id": 1},
}
_DEEPSEEK = {  # 4 of the 61 layers of DeepSeek-V3
    **_EXPERTS_OF_SIGMOID,
    **{"hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280},
    **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536},
    **{"qk_nope_head_dim": 128, "v_head_dim": 128, "rms_norm_eps": 1e-6},
    **{"n_group": 8, "topk_group": 4, "max_position_embeddings": 163840, "rope_theta": 10000.0},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "gemma-3-4b": {  # of every six layers, five see a window
        **_COMMON,
        **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"vocab_size": 262208, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
        **{"query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6},
        **{"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "qwen3-next": {  # 4 of the 48 layers of Qwen3-Next-80B-A3B
        **_DELTA_NET,
        **{"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 2},
        **{"num_hidden_layers": 4, "vocab_size": 151936, "mlp_only_layers": []},
        **{**_EXPERTS, "norm_topk_prob": True},
    },
    "qwen3.5-4b": {
        **_DELTA_NET,
        **{"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
        **{"hidden_size": 2560, "intermediate_size": 9216, "num_key_value_heads": 4},
        **{"num_hidden_layers": 32, "vocab_size": 248320, "mamba_ssm_dtype": "float32"},
    },
    "kimi-linear": {  # 4 of the 27 layers of Kimi-Linear-48B-A3B
        **_COMMON,
        **{"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"},
        **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72},
        **{"vocab_size": 163840, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True},
        **{"num_experts": 256, "num_experts_per_token": 8, "num_experts_per_tok": 8},
        **{"num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1},
        **{"moe_renormalize": True, "routed_scaling_factor": 2.446, "use_grouped_topk": True},
        "linear_attn_config": {
            **{"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
            **{"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
        },
    },
    "deepseek-v3": {
        **_DEEPSEEK,
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    },
    "deepseek-v3.2": {
        **_DEEPSEEK,
        **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
        **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    },
    "glm-5": {  # 4 of the 78 layers of GLM-5
        **_EXPERTS_OF_SIGMOID,
        **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
        **{"hidden_size": 6144, "intermediate_size": 12288, "vocab_size": 154880},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048},
        **{"qk_nope_head_dim": 192, "v_head_dim": 256, "head_dim": 64},
        **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32},
        **{"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 202752, "indexer_rope_interleave": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
_SPARE_STATES = 64  # so many requests at once, or earlier states that are kept


class Model(NamedTuple):
    """A model to serve. sizes: of its KV and of its states."""

    path: Path
    sizes: ModelShape

    @classmethod
    def open(cls, name: str, directory: Path, **changes: Any) -> Model:
        """Opens a checkpoint by its directory, or writes a shape's config with these changes.

        name: a directory, or a key of SHAPES, whose config goes to `directory`.
        """
        path = Path(name).resolve()
        if name in SHAPES:
            path = directory.resolve()
            path.mkdir()
            (path / "config.json").write_text(json.dumps(SHAPES[name] | changes))
        return cls(path, ModelShape.of_config(str(path)))

    @property
    def has_states(self) -> bool:
        return self.sizes.state_layers > 0

    @property
    def is_mla(self) -> bool:
        return self.sizes.is_mla

    @property
    def load_format(self) -> str:
        """vLLM's word: weights are made up where the directory has none."""
        return "auto" if any(self.path.glob("*.safetensors")) else "dummy"

    def num_bytes(self, num_tokens: int) -> int:
        """The bytes that a hand-off of a prompt moves to D."""
        return num_tokens * self.sizes.kv_bytes() + self.sizes.state_bytes

    def cache_bytes(self, num_tokens: int) -> int:
        """The bytes of an engine's own cache with room for so many tokens."""
        return num_tokens * self.sizes.kv_bytes() + _SPARE_STATES * self.sizes.state_bytes

    def like(self, other: Model, num_tokens: int) -> int:
        """Returns how long a prompt moves as many bytes as one of another model."""
        num_bytes = other.num_bytes(num_tokens) - self.sizes.state_bytes
        return max(1, num_bytes // self.sizes.kv_bytes())
