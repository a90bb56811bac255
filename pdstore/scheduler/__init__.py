"""The code that pdstore runs in an engine's scheduler process: keys and lookups, no tensors."""
