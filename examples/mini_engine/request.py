"""Request: one request, from its prompt to its last token."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdstore import TransferParams


class State(enum.Enum):
    """The state of a request. It holds blocks from LOADING or PREFILL until no job uses them."""

    WAITING = "waiting"
    LOOKING_UP = "looking up"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Token(NamedTuple):
    """One token of an answer. `top`: the likeliest ids with their logprobs, if asked for."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


class Finish(NamedTuple):
    """The end of an answer. `reason`: `stop`, `length`, `abort`, or `error` with the error.

    code: the reason of a hand-off that fell short, if that is the error.
    """

    reason: str
    error: str | None = None
    code: str | None = None


@dataclass(eq=False)
class Request:
    """A client's request and its progress, which only the engine's thread writes.

    token_ids: of the prompt, and then of the answer so far.
    sink: called in the engine's thread with every Token and then the Finish; must not block.
    kv_transfer_params: as the client or the router sent them. asked: what pdstore reads in them.
    id, traceparent: from the headers `x-request-id` and `traceparent`.
    """

    token_ids: list[int]
    max_tokens: int
    sink: Callable[[Token | Finish], None]
    ignore_eos: bool = False
    num_logprobs: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    asked: TransferParams | None = None
    id: str = ""
    traceparent: str | None = None

    withheld: list[int] = field(default_factory=list)  # the end of a prompt that only D computes
    state: State = State.WAITING
    is_aborted: bool = False
    num_prompt: int = field(init=False)  # tokens of the prompt
    block_ids: list[int] = field(default_factory=list)
    slot: int = -1  # of its state, with --state
    states: dict[int, int] = field(default_factory=dict)  # slots of kept states, by their tokens
    chunk_ends: set[int] = field(default_factory=set)  # tokens at which a step must end
    num_computed: int = 0  # leading tokens whose KV is in the cache, computed here or loaded
    num_loaded: int = 0  # of these, loaded from the pool
    num_prefill_tokens: int = 0  # prompt tokens that the model computed here
    miss_reason: str | None = None  # the reason of tokens that were not loaded
    decided: dict[str, Any] = field(default_factory=dict)  # `EngineRequest.decided`
    answer_params: dict[str, Any] | None = None  # kv_transfer_params of the answer

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt = len(self.token_ids)

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt] + self.withheld

    def withhold_last_token(self) -> None:
        """Leaves the prompt's last token to D; the answer is one token, which nobody reads."""
        self.withheld.append(self.token_ids.pop())
        self.num_prompt -= 1
        self.max_tokens = 1

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]
