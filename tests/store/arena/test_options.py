"""ArenaOptions: read from a URL, and refused where no arena can have them."""

from __future__ import annotations

import pytest

from pdstore.errors import ConfigError
from pdstore.store.arena.options import DEFAULT_DIRECTORY, DEFAULT_LEASE_S, ArenaOptions
from pdstore.store.url import StoreURL


def options_of(url):
    return ArenaOptions.of(StoreURL.of(url))


def test_what_a_url_leaves_out_has_a_default(tmp_path):
    plain = ArenaOptions("pool", DEFAULT_DIRECTORY, None, None, DEFAULT_LEASE_S)
    assert options_of("shm://") == plain
    url = f"shm://a?size=1MiB&slab=64KiB&lease=3&dir={tmp_path}"
    assert options_of(url) == ("a", tmp_path, 1 << 20, 1 << 16, 3.0)


@pytest.mark.parametrize("url", ["shm://-a", "shm://a?dir=/not/there", "shm://a?lease=4000"])
def test_what_no_arena_can_have_is_refused(url):
    options = options_of(url)
    with pytest.raises(ConfigError, match=f"shm://{options.name}: "):
        options.check()
