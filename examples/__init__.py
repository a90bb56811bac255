"""Small programs that use pdstore for real."""
