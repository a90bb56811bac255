"""Block copies between the paged cache and staging slots."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from pdstore.format.block import checksum
from pdstore.format.namespace import Part
from pdstore.threads import DeviceApi


class BlockCopy(NamedTuple):
    """One value of one block: where it is in the paged cache, and its payload in a slot.

    block_ids: the engine blocks that hold the pool block's tokens, in order.
    num_tokens: tokens of the block; the payload has exactly these. A page counts as one.
    first_token: of a scatter: tokens before it are not written; a multiple of the engine's block.
    payload: the slot's bytes behind the header.
    """

    part: Part
    block_ids: Sequence[int]
    num_tokens: int
    first_token: int
    payload: memoryview


class BlockCopyPlan(NamedTuple):
    """The path of payloads of a part with this many tokens, and the reason for it."""

    part: Part
    num_tokens: int
    path: str
    why: str


class Registrar(Protocol):
    """Pins host memory for a device's copies."""

    def populate(self, address: int, num_bytes: int) -> None:
        """Makes the memory present, so that registering it is quick."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pins a span of memory; a payload must lie within one. Raises SwapError."""

    def unregister(self, address: int) -> None:
        """Unpins the span that begins here. Raises SwapError."""


class ReadyEvent(Protocol):
    """Says when the paged cache may be copied; a `torch.cuda.Event` fits."""

    def synchronize(self) -> None: ...


class Swap(ABC):
    """Copies KV between an engine's paged cache and host slots; blocks until the bytes are there.

    What the model has still to write or read in these blocks is done before the call, or before the
    event that the copy follows: one that `to_follow` returned.
    `NativeSwap` is for speed; `TorchSwap` is the reference, and for machines without the library.
    """

    device: torch.device
    num_blocks: int
    device_api: DeviceApi | None = None
    """How threads that copy are put on the device; None: the usual way."""

    def to_follow(self, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Returns `ready` if copies can wait on it; else blocks until it fires and returns None."""
        if ready is not None:
            ready.synchronize()
        return None

    @abstractmethod
    def gather(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        """Paged cache -> slots."""

    @abstractmethod
    def scatter(self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None) -> None:
        """Slots -> paged cache; engine blocks that lie before `first_token` are not touched."""

    def start_scatter(
        self, copies: Sequence[BlockCopy], ready: ReadyEvent | None = None
    ) -> Callable[[], None]:
        """Starts a scatter. The returned function waits for its end and raises its error.

        It must be called once; until it returns, slots and paged cache must stay as they are.
        """
        self.scatter(copies, ready)
        return _nothing

    def checksums(self, values: Sequence[memoryview]) -> list[int]:
        """Returns the `block.checksum` of each value; each has at least 64 bytes."""
        return [checksum(value) for value in values]

    @property
    def registrar(self) -> Registrar | None:
        """Pins the memory that payloads lie in; None if payloads may lie in any memory."""
        return None

    @abstractmethod
    def plan(self) -> list[BlockCopyPlan]:
        """Which path each part's blocks take, and why."""

    def relaxed(self) -> AbstractContextManager[None]:
        """While it lasts, the calling thread disturbs no other thread's graph capture."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Frees what the copies need; nothing may be copied any more. Twice is fine."""


def _nothing() -> None:
    """The wait for a copy that is over."""
