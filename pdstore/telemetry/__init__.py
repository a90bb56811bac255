"""Telemetry: the words of each reason, warnings, and the record of each request."""
