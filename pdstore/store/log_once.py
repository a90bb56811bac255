"""log_once: logs a line at its first time in a process."""

from __future__ import annotations

import functools
import logging


@functools.lru_cache(maxsize=64)
def log_once(log: logging.Logger, line: str) -> None:
    """Logs a line for information; does nothing if this logger was given it lately.

    For what stores say when they open: both halves of an instance open the same store.
    """
    log.info("%s", line)
