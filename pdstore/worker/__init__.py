"""The half of pdstore that runs in an engine's worker processes: it loads and saves blocks."""
