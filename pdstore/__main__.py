"""Runs the command line for `python -m pdstore`."""

from pdstore.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
