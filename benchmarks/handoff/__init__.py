"""The hand-off as a client waits for it: `python -m benchmarks.handoff`."""
