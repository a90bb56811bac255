"""The package that LMCache is pointed to: the adapter by its name, and LMCache not before it."""

from __future__ import annotations

import pytest

from pdstore.adapters import lmcache


def test_any_other_name_is_missing_as_in_every_module():
    with pytest.raises(AttributeError, match=r"pdstore\.adapters\.lmcache.*no attribute 'Other'"):
        _ = lmcache.Other


def test_the_adapter_is_found_by_its_name():
    import tests.support.lmcache_wheel  # noqa: F401 - makes LMCache importable, or skips
    from pdstore.adapters.lmcache.l2_adapter import PDStoreL2Adapter

    assert lmcache.PDStoreL2Adapter is PDStoreL2Adapter
