"""Several stores as one pool, the fastest first: what `PDSTORE_STORE` with several URLs opens."""
