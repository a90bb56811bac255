"""The smallest honest engine: continuous batching over a paged KV cache, with pdstore for P -> D.

Read `adapter.py` to see how an engine is integrated; the other files are the engine.
"""
