"""Work: what a job does, in shares that several workers can carry at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdstore.outcome import Reason

if TYPE_CHECKING:
    from pdstore.worker.child_job import ChildJob

Share = Callable[["ChildJob"], Reason | None]
"""Moves some blocks on a worker thread. Returns why not all of them, or None; may raise."""


class Shortfall(NamedTuple):
    """Why a job did less than all of its work, and the exception behind the reason."""

    reason: Reason
    error: Exception | None = None


class Work:
    """The work of one job. `JobRun` takes its shares, and calls `finish` once after the last.

    After a shortfall no further share is begun. This class has no shares: all is in `finish`.
    """

    @property
    def progress(self) -> int:
        """Leading tokens of the prompt that are where they should be by now."""
        return 0

    @property
    def num_ready(self) -> int:
        """Shares that can be begun now."""
        return 0

    @property
    def is_at_end(self) -> bool:
        """True if all shares are taken and no more will become ready: one answer, read at once.

        The run asks under its lock; but shares may become ready at any instruction.
        """
        return True

    def take(self) -> Share:
        """Returns the next of the shares that are ready. The run calls it, under its lock."""
        raise NotImplementedError

    def finish(self, child: ChildJob, shortfall: Shortfall | None) -> Shortfall | None:
        """Does what follows the last share. Returns why the job did less than all, or None.

        shortfall: the first one, if there was one: then shares are left, and the work may be open
          still. May raise as a share may.
        """
        return shortfall
