"""log_start: a pool's first line has what an operator compares between two instances."""

from __future__ import annotations

import logging

import pytest

from pdstore.store import open_store
from tests.support.kv import Instance, settings_of


@pytest.mark.parametrize(
    ("empty", "more"),
    [
        ([], ""),
        (
            ["PDSTORE_SALT", "PDSTORE_ROLE", "PDSTORE_WEIGHTS"],
            "; empty, so as if not set: PDSTORE_WEIGHTS, PDSTORE_SALT",  # the role is an argument
        ),
    ],
)
def test_a_pool_says_with_what_it_starts_and_which_settings_are_empty(
    caplog, monkeypatch, empty, more
):
    for name in empty:
        monkeypatch.setenv(name, "")
    caplog.set_level(logging.INFO)
    store = open_store("memory://", settings_of())
    instance = Instance(store, role="prefill", workers=4, staging="8MiB", native="off")
    instance.close()
    store.close()
    line = next(r.getMessage() for r in caplog.records if "block copies by" in r.getMessage())
    assert line == (
        f"pool memory://, namespace {instance.cache.namespace.hex}, role prefill,"
        f" block copies by TORCH, 7 MiB of host memory, 4 workers{more}"
    )
