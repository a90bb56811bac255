"""The command line: `python -m pdstore`."""
