"""Telemetry: the table of the metrics, the words of each reason, warnings, request records."""
