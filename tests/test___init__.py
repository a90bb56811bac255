"""The package: its public names are there when they are used, and cost nothing before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_ci_looks_at_a_wheels_public_names_and_not_only_at_the_package():
    root = Path(__file__).parent.parent
    assert (
        "import pdstore; print(pdstore.__file__, pdstore.KVPool)" in (root / ".ci/run").read_text()
    )
