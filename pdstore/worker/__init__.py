"""The worker process's half: moves KV blocks between the paged cache and the store."""
