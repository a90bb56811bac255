"""The half of pdstore in an engine's worker processes: moves blocks from and to the store."""
