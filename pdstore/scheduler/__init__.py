"""The half of pdstore in an engine's scheduler process: keys and lookups, no tensors."""
