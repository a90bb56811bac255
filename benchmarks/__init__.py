"""Measurements of pdstore and its peers: each module is a program, `python -m benchmarks.keys`."""
