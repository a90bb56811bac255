"""libpdstore from Python: its interface, its build, its swap engine."""
