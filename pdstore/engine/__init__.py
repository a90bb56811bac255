"""What every engine's adapter does for a request, whatever the engine."""
