"""The arena store: P and D of one host share memory; the GPUs of P and of D copy to and from it."""
