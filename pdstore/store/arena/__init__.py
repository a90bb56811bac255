"""The arena store: P and D of one host share memory that both their GPUs copy to and from."""
