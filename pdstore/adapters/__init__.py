"""Adapters: each makes pdstore a plugin of one engine; no other code imports that engine."""
