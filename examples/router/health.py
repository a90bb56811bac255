"""Health: what an instance's /health says about it."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from examples.router.bodies import parse


@dataclass(frozen=True)
class Health:
    """The state of one instance.

    error: why it cannot answer requests; None if it can.
    problem: why it answers without the pool, if it says so (the mini engine does).
    """

    error: str | None = None
    problem: str | None = None

    @classmethod
    def of(cls, answer: httpx.Response) -> Health:
        """Returns the state in an instance's answer; vLLM's is empty."""
        if not answer.is_success:
            return cls(error=f"HTTP {answer.status_code}")
        try:
            said = parse(answer.content)
        except ValueError:
            return cls()
        return cls(problem=str(said.get("reason")) if said.get("status") == "degraded" else None)

    def as_json(self) -> dict[str, object]:
        """Returns the state as the router's own /health shows it."""
        return {"ok": self.error is None, "error": self.error, "problem": self.problem}
