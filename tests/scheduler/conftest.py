"""Instances of both halves over one store."""

from __future__ import annotations

from tests.support.instances import instance as instance
from tests.support.instances import store as store
