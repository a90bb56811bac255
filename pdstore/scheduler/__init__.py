"""The scheduler process's half: keys and lookups, no tensors."""
