"""libpdstore from Python: its structs, its calls, its build."""
