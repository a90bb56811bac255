"""python -m examples.mini_engine --model DIR ..."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from examples.mini_engine.config import Config, parse
from pdstore import PDStoreError


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)  # until uvicorn takes over, and when it hands back
    signal.signal(signal.SIGINT, _leave)
    try:
        serve(parse())
    except PDStoreError as error:
        print(f"mini_engine: {error}", file=sys.stderr)
        sys.exit(2)


def serve(config: Config) -> None:
    """Serves until a signal comes. Raises PDStoreError for what cannot be served."""
    # Here, so that --help and a bad command line need not wait for transformers.
    from examples.mini_engine.engine import Engine
    from examples.mini_engine.server import HttpServer

    HttpServer(Engine(config)).run()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
