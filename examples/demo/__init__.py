"""Shows, and checks, that D answers from KV that P left in the pool: `python -m examples.demo`."""
