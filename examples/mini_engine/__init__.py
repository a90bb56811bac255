"""A small engine with continuous batching and a paged KV cache, which uses pdstore for P -> D.

`adapter.py` shows how an engine is integrated; the other files are the engine.
"""
