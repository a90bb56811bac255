"""The package that SGLang is pointed to: the backend by its name, and SGLang not before it."""

from __future__ import annotations

import pytest

from pdstore.adapters import sglang


def test_any_other_name_is_missing_as_in_every_module():
    with pytest.raises(AttributeError, match=r"pdstore\.adapters\.sglang.*no attribute 'Backend'"):
        _ = sglang.Backend


def test_the_backend_is_found_by_its_name():
    import tests.support.sglang_wheel  # noqa: F401 - makes SGLang importable, or skips
    from pdstore.adapters.sglang.backend import PDStoreHiCache

    assert sglang.PDStoreHiCache is PDStoreHiCache
