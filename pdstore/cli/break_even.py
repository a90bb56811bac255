"""Break-even: the bandwidth from which reading KV takes less time than computing it again.

T_c = F(p) / (GPUs * peak * MFU)      F(p) = 2 * N * p + layers * heads * (d_qk + d_v) * p^2
B*  = p * (KV bytes of a token) / T_c
"""

from __future__ import annotations

from typing import NamedTuple

from pdstore.cli.model_shape import ModelShape
from pdstore.errors import ConfigError

PEAK_TFLOPS = {
    **{"A100": 312, "A800": 312, "A10": 125, "L4": 121, "L40S": 362, "4090": 165},
    **{"H20": 148, "H100": 989, "H800": 989, "H200": 989, "GH200": 989, "B200": 2250},
}
"""Dense bf16 operations, from the makers' data sheets."""
DEFAULT_MFU = 0.5


class BreakEven(NamedTuple):
    """Reading against computing, for a prompt alone on its GPUs.

    compute_s: of a prefill. bytes_per_s: what a store must deliver to be as fast.
    """

    num_tokens: int
    kv_bytes: int
    compute_s: float
    bytes_per_s: float


class Machine(NamedTuple):
    """The GPUs of an instance, and the share of their peak that a prefill reaches."""

    gpu: str
    num_gpus: int = 1
    mfu: float = DEFAULT_MFU

    @property
    def flops(self) -> float:
        """Operations per second. Raises ConfigError for an unknown GPU."""
        peak = PEAK_TFLOPS.get(self.gpu.upper().removeprefix("RTX"))
        if peak is None:
            raise ConfigError(f"--gpu {self.gpu}: known are {', '.join(PEAK_TFLOPS)}")
        return peak * 1e12 * self.num_gpus * self.mfu


def break_even(
    shape: ModelShape, machine: Machine, num_tokens: int, element_bytes: int | None = None
) -> BreakEven:
    """Returns when reading the KV of so many tokens beats computing it."""
    kv_bytes = num_tokens * shape.kv_bytes(element_bytes)
    compute_s = shape.prefill_flops(num_tokens) / machine.flops
    return BreakEven(num_tokens, kv_bytes, compute_s, kv_bytes / compute_s)
