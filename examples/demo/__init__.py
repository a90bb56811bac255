"""The demo: shows and checks that D answers from KV that P left in the pool."""
