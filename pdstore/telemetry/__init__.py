"""Telemetry: what each reason means, warnings in the log, request records and their spans."""
