"""Adapters: they make pdstore a plugin of an engine. Only an adapter imports its engine."""
