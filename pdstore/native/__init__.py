"""The native library libpdstore in Python: its C interface, build, swap engine and arena."""
