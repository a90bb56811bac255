"""The command line, which `pdstore` and `python -m pdstore` start."""
