"""Break-even: the bandwidth above which loading KV is quicker than computing it, by model."""

from __future__ import annotations

from typing import NamedTuple

from pdstore.errors import ConfigError
from pdstore.sizing.shape import Indexer, ModelShape

PEAK_TFLOPS = {
    **{"A100": 312, "A800": 312, "A10": 125, "L4": 121, "L40S": 362, "4090": 165},
    **{"H20": 148, "H100": 989, "H800": 989, "H200": 989, "GH200": 989, "B200": 2250},
}
"""Dense bf16 operations in TFLOPS, from the makers' data sheets."""
DEFAULT_MFU = 0.5


class Comparison(NamedTuple):
    """A comparison of reading a prompt's KV with computing it on GPUs that do nothing else.

    compute_s: the time of the prefill. bytes_per_s: the rate at which reading the KV from a store
      takes as long as the prefill.
    """

    num_tokens: int
    kv_bytes: int
    compute_s: float
    bytes_per_s: float


class Machine(NamedTuple):
    """The GPUs of an instance, and `mfu`, the part of their peak rate that a prefill reaches.

    tokens_per_s: the rate of a prefill, where it was measured; None: it follows from the others.
    """

    gpu: str
    num_gpus: int = 1
    mfu: float = DEFAULT_MFU
    tokens_per_s: float | None = None

    @property
    def flops(self) -> float:
        """Operations per second. Raises ConfigError for an unknown GPU."""
        peak = PEAK_TFLOPS.get(self.gpu.upper().removeprefix("RTX"))
        if peak is None:
            raise ConfigError(f"--gpu {self.gpu}: known are {', '.join(PEAK_TFLOPS)}")
        return peak * 1e12 * self.num_gpus * self.mfu


def break_even(
    shape: ModelShape, machine: Machine, num_tokens: int, element_bytes: int | None = None
) -> Comparison:
    """Compares reading the KV of `num_tokens` tokens, with the states, with computing it."""
    kv_bytes = num_tokens * shape.kv_bytes(element_bytes) + shape.state_bytes
    compute_s = shape.prefill_flops(num_tokens) / machine.flops
    if machine.tokens_per_s is not None:
        compute_s = num_tokens / machine.tokens_per_s
    return Comparison(num_tokens, kv_bytes, compute_s, kv_bytes / compute_s)


DISK_RATES = (1, 2, 4, 8, 16)
"""GB/s at which a disk is read for one GPU, in the table of tiers."""
MARGIN = 1.25
"""Within this factor of break-even a tier is `even`: no rate of a prefill is known better."""


def verdict_of(gb_per_s: float, at: Comparison) -> str:
    """Returns whether a tier that is read at this rate `pays`, `loses`, or is `even`."""
    ratio = gb_per_s * 1e9 / at.bytes_per_s
    if ratio >= MARGIN:
        return "pays"
    return "even" if ratio > 1 / MARGIN else "loses"


def _shape(
    name: str,
    layers: int,
    heads: int,
    kv_elements: int,
    dims: tuple[int, int],
    params: float,
    *,
    states: tuple[int, int] = (0, 0),
    indexer: Indexer | None = None,
) -> ModelShape:
    """Describes a published model. dims: of Q and V, per head. states: their layers and bytes."""
    return ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_elements=kv_elements,
        qk_dim=dims[0],
        v_dim=dims[1],
        active_params=params,
        dtype="bfloat16",
        kv_heads=1 if dims[0] != dims[1] else kv_elements // (2 * dims[0]),
        is_mla=dims[0] != dims[1],
        state_layers=states[0],
        state_bytes=states[1],
        indexer=indexer,
    )


_GROUPED = (128, 128)
_LATENT = (192, 128)
KNOWN_MODELS = (
    _shape("Llama-3.1-8B", 32, 32, 2048, _GROUPED, 7_504_658_432),
    _shape("Qwen3-32B", 64, 64, 2048, _GROUPED, 31_983_534_080),
    _shape("Llama-3.1-70B", 80, 64, 2048, _GROUPED, 69_501_714_432),
    _shape("DeepSeek-V3", 61, 128, 576, _LATENT, 36_624_596_992),
    _shape("DeepSeek-V3.2", 61, 128, 576, _LATENT, 37_476_106_240, indexer=Indexer(64, 128, 2048)),
    _shape("Qwen3.5-4B", 8, 16, 2048, (256, 256), 4_120_903_680, states=(24, 51_511_296)),
    _shape("Qwen3-Next-80B", 12, 16, 1024, (256, 256), 3_310_616_576, states=(36, 39_518_208)),
    _shape("Nemotron-H-8B", 4, 32, 2048, _GROUPED, 7_562_330_112, states=(24, 102_137_856)),
    _shape("Nemotron-3-Nano-30B", 6, 32, 512, _GROUPED, 3_226_804_224, states=(23, 49_082_368)),
    _shape("Kimi-Linear-48B", 7, 32, 576, _LATENT, 2_921_742_336, states=(20, 43_417_600)),
)
"""Published models, as `ModelShape.of_config` reads their config.json."""
