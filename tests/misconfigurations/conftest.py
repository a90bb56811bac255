"""Both halves of an instance, over a store that a test chooses."""

from tests.support.instances import instance as instance
from tests.support.instances import store as store
