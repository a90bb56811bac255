"""Tests of the LMCache adapter against LMCache's own classes, from its wheel; no engine runs."""
