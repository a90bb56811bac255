"""Status: shows people what an instance does now, as a page and as JSON. It is off by default."""
