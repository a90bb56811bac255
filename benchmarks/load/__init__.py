"""Load over HTTP: an engine with each KV connector, side by side."""
