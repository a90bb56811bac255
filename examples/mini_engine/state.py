"""StateCache: a layer that keeps one state for all of a prefix, beside the KV of each token.

It stands for the layers of hybrid models: Mamba, gated delta nets, short convolutions. The state is
a sum of the tokens' embeddings in which earlier tokens count less and less. It is computed token by
token, so its bits do not depend on how a prompt is cut into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from examples.mini_engine.request import Request
from pdstore import ConfigError

FORM = "mini_engine: a float32 sum of embeddings, of which each token leaves 0.9"
"""What the bytes of a state mean, for the namespace."""

_DECAY = 0.9


class StateCache:
    """The states of all requests: a tensor with a slot for each, and the list of its free slots.

    A request has one slot, in which each step overwrites the state with the state after its tokens.
    `keep` leaves a state as it is, for a job that reads it: the request then goes on in a copy.

    rows: [num_slots, width]. A request keeps at most one state for each of its blocks and has one
      more, so twice as many slots as blocks are always enough.
    """

    def __init__(self, num_slots: int, width: int, device: str) -> None:
        try:
            self.rows = torch.zeros(num_slots, width, device=device)
        except RuntimeError as error:
            raise ConfigError(f"--state: {num_slots} states of {width} floats: {error}") from error
        self._free = list(reversed(range(num_slots)))

    @property
    def num_used(self) -> int:
        return len(self.rows) - len(self._free)

    def admit(self, request: Request) -> None:
        """Gives a request its slot."""
        request.slot = self._free.pop()

    def give_back(self, request: Request) -> None:
        """Takes all slots of a request back. The caller makes sure that no job uses them."""
        self._free.extend({request.slot, *request.states.values()})
        request.states = {}

    def keep(self, request: Request, num_tokens: int) -> None:
        """Keeps the state after so many tokens, which the request has or has with its next step."""
        self._leave_kept(request)
        request.states[num_tokens] = request.slot

    def drop(self, request: Request, num_tokens: int) -> None:
        """Takes back the slot of a kept state that no job uses."""
        self._free.append(request.states.pop(num_tokens))

    def advance(self, request: Request, start: int, inputs: Tensor) -> Tensor:
        """Adds tokens to a request's state and returns it.

        start: how many tokens came before them. inputs: their embeddings, [tokens, width].
        """
        if request.states.get(start) == request.slot:
            self._leave_kept(request)
        state = self.rows[request.slot]
        if start == 0:
            state.zero_()  # a load that fell short may have written it
        for row in inputs.float():
            state.mul_(_DECAY).add_(row)
        return state

    def _leave_kept(self, request: Request) -> None:
        """Has a request go on in a copy of its state if that is kept."""
        if request.slot in request.states.values():
            kept = self.rows[request.slot]
            self.admit(request)
            self.rows[request.slot] = kept
