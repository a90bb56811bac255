"""Another thread at every moment: a function interrupted before its lines."""

from __future__ import annotations
