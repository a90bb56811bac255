"""One request, from its prompt to its last token."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class State(enum.Enum):
    """Where a request is. Its blocks are held from LOADING or PREFILL until nothing uses them."""

    WAITING = "waiting"
    LOOKING_UP = "looking up"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Token(NamedTuple):
    """One token of an answer. `top`: the most likely ids with their logprobs, if asked for."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class Finish(NamedTuple):
    """The end of an answer. `reason`: `stop`, `length`, `abort`, or `error` with the error."""

    reason: str
    error: str | None = None


@dataclass(eq=False)
class Request:
    """What a client asked for, and how far it is: written by the engine's thread only.

    sink: takes every Token and at last the Finish, in the engine's thread; must not block.
    kv_transfer_params: as the client or router sent them.
    """

    prompt: list[int]
    max_tokens: int
    sink: Callable[[Token | Finish], None]
    ignore_eos: bool = False
    num_logprobs: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    state: State = State.WAITING
    is_aborted: bool = False
    token_ids: list[int] = field(init=False)  # the prompt and the answer so far
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # leading tokens whose KV is in the cache, computed here or loaded
    num_loaded: int = 0  # of these, loaded from the pool
    num_fed: int = 0  # prompt tokens that went through the model here
    miss_reason: str | None = None  # why not more was loaded
    answer_params: dict[str, Any] | None = None  # kv_transfer_params of the answer

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt) :]
