"""Runs `python -m pdstore.sizing`."""

from pdstore.sizing.command import main

if __name__ == "__main__":
    raise SystemExit(main())
