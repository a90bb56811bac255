"""degrades: a hook that fails is a counted miss, and the engine continues."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm.degrades import degrades, kept_to_itself
from pdstore.adapters.vllm.stats import StepMetrics


class Connector:
    """One hook that fails, and what `degrades` needs of a connector."""

    def __init__(self) -> None:
        self.metrics = StepMetrics()

    @degrades(lambda: (0, False))
    def hook(self, error: BaseException | None) -> tuple[int, bool]:
        """A hook's docstring."""
        if error is not None:
            raise error
        return 7, True


def test_a_hook_that_fails_answers_as_a_miss_and_is_counted():
    connector = Connector()
    assert connector.hook(None) == (7, True)
    assert connector.hook(ValueError("a bug")) == (0, False)
    assert connector.metrics.take().data["counters"] == {"misses|fault": 1}
    assert connector.hook.__doc__ == "A hook's docstring."


def test_an_interrupt_is_not_a_fault():
    with pytest.raises(KeyboardInterrupt):
        Connector().hook(KeyboardInterrupt())


def test_a_job_that_cannot_begin_is_told_with_its_request(caplog):
    with kept_to_itself("request-7"):
        raise ValueError("a bug")
    assert "request-7" in caplog.text
    assert "a bug" in caplog.text
