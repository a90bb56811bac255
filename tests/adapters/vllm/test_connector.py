"""PDStoreConnector: a hook that fails is a counted miss, and the engine continues."""

from __future__ import annotations

import pytest

from pdstore.adapters.vllm import PDStoreConnector
from pdstore.adapters.vllm.connector import degrades
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


def test_every_hook_of_a_running_engine_is_guarded():
    """Hooks that only pass a call on to a guarded one, or cannot fail, need no guard."""
    hooks = """on_new_request get_num_new_matched_tokens update_connector_output request_finished
        has_pending_push_work has_pending_block_frees reset_cache start_load_kv wait_for_save
        get_finished get_block_ids_with_load_errors build_connector_worker_meta
        get_kv_connector_stats take_events shutdown _load _add_saves _save_layer"""
    for name in hooks.split():
        assert hasattr(getattr(PDStoreConnector, name), "__wrapped__"), name


def test_sleep_mode_is_not_supported():
    assert PDStoreConnector.supports_sleep_mode() is False
