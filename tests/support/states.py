"""A model whose layers keep states, a window and KV of all tokens, and instances of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdstore import EngineRequest, LayerSpec, SavePlan, Store
from tests.support.kv import Instance, settings_of

BLOCK = 64
ENTRIES = (None, None, 16, BLOCK)
"""The tokens of an entry of each block table: blocks of a window are given back one by one."""
STATES = (0, 1)
"""The block tables of states come first, as in vLLM; then tables of KV and of the window's KV."""
LAYERS = (
    LayerSpec.state(96, "float32 a", table=0),
    LayerSpec(2, 8, table=2),
    LayerSpec.state(40, "float32 b", table=1),
    LayerSpec(2, 8, window=100, table=3),
)
NO_WINDOW = LAYERS[:3]


def slot_of(num_tokens: int) -> int:
    """The number of the state after so many tokens, in the cache of the instance that saves it."""
    return num_tokens // 16 % 24


class StateInstance(Instance):
    """Both halves over one store. Its engine has 24 blocks of 64 tokens, and as many states."""

    def __init__(
        self,
        store: Store,
        layers: Sequence[LayerSpec] = NO_WINDOW,
        *,
        block: int = BLOCK,
        **changes: object,
    ) -> None:
        entries = ENTRIES[: 1 + max(spec.table for spec in layers)]
        super().__init__(
            store,
            layers=layers,
            engine_block_tokens=entries,
            num_blocks=[24 if size is None else 24 * BLOCK // size for size in entries],
            boundary_tokens=block,
            **{
                "lookup_timeout_s": 10.0,
                **changes,
            },  # a busy machine is slow
        )

    def tables(self, num_tokens: int, states: dict[int, int], first: int = 0) -> list:
        """Returns the block tables of a prompt in the engine's blocks from number `first` on."""
        sizes = self.layout.geometry.tables
        start = first * BLOCK
        return [
            states if size is None else range(start // size, start // size - (-num_tokens // size))
            for size in sizes
        ]

    def saved(self, plan: SavePlan, state_ends: Collection[int]):
        """Saves what a request has planned; the state after n tokens is number `slot_of(n)`."""
        ends = [at for at in state_ends if plan.first_token < at <= plan.keys.num_tokens]
        states = {at: slot_of(at) for at in ends}
        save = self.pool.begin_save(plan, self.tables(plan.keys.num_tokens, states))
        save.layers_done(len(self.layout.held_layers))
        return save.job.wait(20)

    def put(self, tokens, *state_ends: int, handoff=None):
        """Saves a prompt with its states, as instances of earlier requests have."""
        keys = self.cache.keys(tokens)
        return self.saved(SavePlan(keys, handoff=handoff), {*state_ends, len(tokens)})

    def request(self, tokens, params=None, *, may_load=True, **changes) -> EngineRequest:
        settings, keys = settings_of(**changes), self.cache.keys(tokens)
        return EngineRequest(self.cache, settings, keys, params, may_load=may_load)
