"""search: looks for input that breaks a promise; few examples in each run, many every night."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

import hypothesis
import pytest
from hypothesis.strategies import SearchStrategy

R = TypeVar("R")

FEW, MANY = 30, 20_000
MAX_BYTES = 16 << 20
MAX_S = 10.0

num_examples = pytest.mark.parametrize(
    "num_examples",
    [FEW, pytest.param(MANY, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)


def search(num_examples: int, check: Callable[..., None], **strategies: SearchStrategy) -> None:
    """Calls `check` with examples of the strategies, each bounded in time and in memory.

    Few examples are the same ones in each run, so that a run says something about a change; many
    are new ones.
    """

    @hypothesis.settings(
        max_examples=num_examples,
        deadline=timedelta(seconds=MAX_S),
        database=None,
        derandomize=num_examples <= FEW,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(**strategies)
    def example(**values: object) -> None:
        with bounded():
            check(**values)

    example()


def attempted(call: Callable[[], R], refusal: type[Exception]) -> tuple[R | None, str]:
    """Returns the call's answer, or None and the words of the error that it may raise."""
    try:
        return call(), ""
    except refusal as error:
        return None, f"{error} {error.__cause__!r} {error.__context__!r}"


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fails if Python allocates more inside than any of our inputs is worth."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES, f"{peak} bytes"
