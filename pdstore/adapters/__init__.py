"""Engines that pdstore is a plugin of. Each adapter imports its engine; nothing else does."""
