"""Block copies, staging, and the way to move values over get and put of any store."""
