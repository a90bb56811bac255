"""degrades: keeps exceptions of the connector's hooks from the engine, and a job's from others."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

from pdstore.outcome import Reason

log = logging.getLogger("vllm.pdstore")

P = ParamSpec("P")
R = TypeVar("R")


def degrades(instead: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a hook log an exception, count a miss and return `instead()`.

    An exception that leaves a hook would end the running engine.
    """

    def decorate(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:  # the border to the engine
                log.exception("pdstore failed in %s; the engine continues", hook.__name__)
                connector: Any = args[0]
                connector.metrics.miss(Reason.FAULT)
                return cast("R", instead())

        return guarded

    return decorate


@contextlib.contextmanager
def kept_to_itself(request_id: str) -> Iterator[None]:
    """Logs why a request's job could not begin: the others of its step begin all the same."""
    try:
        yield
    except Exception:
        log.exception("a job of request %s could not begin", request_id)
