"""main: runs the command `pdstore`, and prints each error that a user can correct as one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from pdstore.cli.output import drop_output, printable
from pdstore.errors import PDStoreError

_OK = 0
_BAD_USE = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status.

    arguments: the words after `pdstore`; None takes them from the process's command line.
    Returns 0 if all is well; 1 if the command found something wrong; 2 for an error that the user
    can correct, after printing it as one line on stderr; 130 after Ctrl-C.
    """
    try:
        run: Callable[..., object] = importlib.import_module("pdstore.cli.app").app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        return _fail(
            f"the command line needs a package that is not installed ({error.name}):"
            " pip install 'pdstore[cli]'"
        )
    try:
        run(list(sys.argv[1:] if arguments is None else arguments), prog_name="pdstore")
    except PDStoreError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        drop_output()
        return _OK
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else _OK
    return _OK


def _fail(message: str) -> int:
    print(f"pdstore: {printable(message)}", file=sys.stderr)
    return _BAD_USE
