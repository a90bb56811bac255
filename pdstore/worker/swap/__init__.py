"""Block copies between an engine's paged cache and host memory, with or without a pool."""

from pdstore.worker.swap.base import BlockCopy, BlockCopyPlan, ReadyEvent, Registrar, Swap
from pdstore.worker.swap.open import open_swap

__all__ = ["BlockCopy", "BlockCopyPlan", "ReadyEvent", "Registrar", "Swap", "open_swap"]
