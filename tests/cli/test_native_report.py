"""`pdstore native` reports both forms of the library."""

from __future__ import annotations

import pytest

from pdstore.cli import native_report as module
from pdstore.cli.native_report import native
from pdstore.errors import NativeError
from tests.support import native_kit


def test_both_forms_are_reported(monkeypatch):
    path = native_kit.open_library().path
    asked = []
    monkeypatch.setattr(
        module, "find_library", lambda *, with_cuda: asked.append(with_cuda) or path
    )
    libraries = native().document["libraries"]
    assert [each["for"] for each in libraries] == ["host tensors", "GPU tensors"]
    assert [each["file"] for each in libraries] == [str(path)] * 2
    assert asked == [False, True]


def test_without_a_library_it_is_an_error(monkeypatch):
    def missing(*, with_cuda):
        raise NativeError("there is no compiler")

    monkeypatch.setattr(module, "find_library", missing)
    with pytest.raises(NativeError, match="no compiler"):
        native()
