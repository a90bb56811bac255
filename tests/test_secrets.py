"""The search for secrets after the suite finds one in a line, in a traceback and in a file."""

from __future__ import annotations

import logging
from urllib.parse import quote

import pytest

from tests.support.secret import KEY, PASSWORD, SecretSearch


@pytest.fixture
def log():
    """A logger that only a search listens to, and the search."""
    log, search = logging.Logger("apart"), SecretSearch()
    log.addHandler(search)
    return log, search


@pytest.mark.parametrize("form", [PASSWORD, quote(PASSWORD, safe=""), KEY, str(bytes.fromhex(KEY))])
def test_a_line_with_a_secret_is_found(log, form):
    logger, search = log
    logger.debug("connect to %s", f"redis://u:{form}@host")
    logger.debug("connect to %s", "redis://u:***@host")
    assert [line.startswith("apart: connect") for line in search.found] == [True]


def test_a_traceback_with_a_secret_is_found(log):
    logger, search = log
    try:
        raise ValueError(PASSWORD)
    except ValueError:
        logger.exception("failed")
    assert len(search.found) == 1


def test_a_file_with_a_secret_is_found(log, tmp_path):
    _, search = log
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"\xff all is well")
    bad.write_text(f"--user u >{PASSWORD}")
    search.search([good, bad])
    assert [line.startswith(str(bad)) for line in search.found] == [True]
