"""Sizing: the size of a model's KV, and the bandwidth above which loading it beats computing it."""

from pdstore.sizing.command import main
from pdstore.sizing.shape import ModelShape

__all__ = ["ModelShape", "main"]
