"""The package: its public names are there when they are used, and cost nothing before."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pdstore


def test_importing_the_package_loads_no_torch():
    code = "import pdstore, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_star_import_gives_the_public_names():
    names: dict[str, object] = {}
    exec("from pdstore import *", names)
    assert set(names) - {"__builtins__"} == set(pdstore.__all__) <= set(dir(pdstore))


def test_a_name_that_is_not_public_is_an_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pdstore.Nothing  # noqa: B018
