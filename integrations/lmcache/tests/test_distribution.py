"""The distribution as pip installs it: LMCache's `module_path`, and LMCache not before its use."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import Distribution

import pytest

import pdstore
import pdstore_lmcache
from tests.docs.commands import ROOT


def test_pip_installs_the_package_for_this_version_alone(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", tmp_path]
    subprocess.run([*install, *options, ROOT / "integrations" / "lmcache"], check=True, timeout=100)
    [folder] = tmp_path.glob("*.dist-info")
    found = Distribution.at(folder)
    assert (found.metadata["Name"], found.version) == ("pdstore-lmcache", pdstore.__version__)
    assert found.requires == [f"pdstore=={pdstore.__version__}"]
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "pdstore_lmcache"}
    assert (tmp_path / "pdstore_lmcache" / "l2_adapter.py").exists()


def test_importing_it_imports_no_lmcache():
    code = "import pdstore_lmcache, sys; sys.exit('lmcache' in sys.modules)"
    folder = ROOT / "integrations" / "lmcache"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=100)


def test_any_other_name_is_missing_as_in_every_module():
    with pytest.raises(AttributeError, match=r"pdstore_lmcache.*no attribute 'Other'"):
        _ = pdstore_lmcache.Other
