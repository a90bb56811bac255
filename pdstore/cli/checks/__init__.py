"""The checks of `pdstore doctor`, each about one thing."""
