"""Status: what an instance does now, as JSON and as a page, for people; off by default."""
