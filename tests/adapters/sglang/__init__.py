"""Tests of the SGLang adapter against SGLang's own classes, from its wheel; no server runs."""
