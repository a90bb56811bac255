"""log_once: a line comes once from a process, whoever says it again."""

from __future__ import annotations

import logging

from pdstore.store import open_store
from pdstore.store.base import log_once
from tests.support.kv import settings_of

log = logging.getLogger(__name__)


def test_another_line_and_another_logger_are_heard(caplog):
    caplog.set_level(logging.INFO)
    for logger, line in ((log, "one"), (log, "two"), (log.getChild("child"), "one"), (log, "one")):
        log_once(logger, line)
    assert caplog.messages == ["one", "two", "one"]


def test_a_store_that_both_halves_open_says_once_where_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "shm").mkdir()
    for url in (f"file://{tmp_path}/pool", f"shm://pool?size=2MiB&dir={tmp_path}/shm"):
        for _ in range(2):
            open_store(url, settings_of()).close()
    assert sum(message.startswith("pool in ") for message in caplog.messages) == 2
