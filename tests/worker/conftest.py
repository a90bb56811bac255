"""Fixtures of the native library."""

from __future__ import annotations

from tests.support.native_kit import library as library
from tests.support.native_kit import mended as mended
