"""Block copies between a GPU's paged cache and pinned host memory, measured."""
