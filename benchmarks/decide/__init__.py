"""Compares loading, computing and deciding, over stores of many speeds."""
