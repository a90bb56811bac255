"""Plans: by them the scheduler tells every worker what one load or save of a prompt does.

`EngineRequest` makes them, `KVPool.begin_load` and `begin_save` take them as they are. An adapter
whose two halves are different processes pickles them, and adds only what the worker must know
beside them: block tables, and its own names of the request and of the save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdstore.format.handoff import HandoffId
from pdstore.format.keys import PromptKeys


@dataclass(frozen=True)
class LoadPlan:
    """One load of a prompt's blocks.

    keys: what is loaded (`Match.keys`), from the prompt's first token on.
    first_token: the tokens before it are in the paged cache already. Their engine blocks may be
      shared and are not written. It is a multiple of the engine's block size.
    num_tokens: leading tokens that the engine relies on. A load that brings fewer has failed.
    follow: a hand-off that P is still saving (`Match.follow`). Each block is loaded as soon as it
      is stored. The load ends when all blocks are loaded. It ends with fewer blocks if P fails,
      dies, or stores nothing for PDSTORE_HANDOFF_WAIT_S.
    waited_s: the time from the prompt's first lookup to this plan.
    """

    keys: PromptKeys
    first_token: int
    num_tokens: int
    follow: HandoffId | None = None
    waited_s: float = 0.0


class PromptSave(NamedTuple):
    """The first save of a prompt, which the plans of all its saves name.

    first_token: the tokens before it were stored already, or another prompt's save had them.
    began: when it was planned, in seconds of the monotonic clock of this host.
    """

    first_token: int
    began: float


class Announcement(NamedTuple):
    """A hand-off that D may follow while P saves it. num_tokens: the tokens of its whole prompt."""

    handoff: HandoffId
    num_tokens: int


@dataclass(frozen=True)
class SavePlan:
    """One save of a prompt's blocks.

    keys: the prompt up to the last token that is saved.
    first_token: the tokens before it are stored already or are being saved.
    handoff: publishes the whole prompt under this id: D is told when all of it is durable.
    announce: the hand-off of which D is told, when the save of the first layers begins, that it may
      follow it; None if D was told, or was not asked at the same time as P.
    is_awaited: True if a hand-off will publish these blocks, so that the save may always evict. A
      plan with `handoff` need not say it.
    first_save: the prompt's first save; None: not known, so blocks that D has read are leased
      again, and the admission takes the save for a later one of its prompt.
    waited_s: as in `LoadPlan`.
    ends_prompt: True for a prompt's last save; one of its answer may follow.
    drafts_from: the tokens before it may have rows of earlier requests in a draft's cache, so
      drafts are saved only of blocks that begin at this token or later.
    """

    keys: PromptKeys
    first_token: int = 0
    handoff: HandoffId | None = None
    announce: Announcement | None = None
    is_awaited: bool = False
    first_save: PromptSave | None = None
    waited_s: float = 0.0
    ends_prompt: bool = False
    drafts_from: int = 0

    @property
    def is_handed_off(self) -> bool:
        """True if a hand-off publishes these blocks, with this save or with a later one."""
        return self.is_awaited or self.handoff is not None

    @property
    def first_read(self) -> int:
        """The first token of the blocks that the save may read.

        A save that publishes a hand-off saves again any block of the prompt that the store lost.
        """
        if self.handoff is not None:
            return 0
        return self.first_token - self.first_token % self.keys.block_tokens
