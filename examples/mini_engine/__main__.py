"""Command line of the mini engine: `python -m examples.mini_engine --model DIR ...`."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from examples.mini_engine.config import Config, parse
from pdstore import PDStoreError


def main() -> None:
    signal.signal(signal.SIGTERM, _leave)  # before uvicorn takes over, and after it
    signal.signal(signal.SIGINT, _leave)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        serve(parse())
    except PDStoreError as error:
        print(f"mini_engine: {error}", file=sys.stderr)
        sys.exit(2)


def serve(config: Config) -> None:
    """Serves until a signal comes. Raises PDStoreError for a config that cannot be served."""
    # Imported here: --help and a bad command line need not wait for transformers.
    from examples.mini_engine.engine import Engine
    from examples.mini_engine.server import HttpServer

    engine = Engine(config)
    server = HttpServer(engine)
    engine.ready()
    server.run()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
