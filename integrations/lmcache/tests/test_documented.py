"""The distribution and its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution

import pytest

import lmcache_server as kit
import lmcache_wheel as wheel
import pdstore
import pdstore_lmcache
from tests.docs.commands import ROOT

PAGE = (ROOT / "docs" / "lmcache.md").read_text()


def test_the_flags_of_the_page_are_lmcaches():
    commands = re.findall(r"^lmcache .*?(?=\n```|\nlmcache)", PAGE, re.MULTILINE | re.DOTALL)
    with zipfile.ZipFile(wheel.WHEEL) as opened:
        sources = "".join(
            opened.read(name).decode() for name in opened.namelist() if name.endswith(".py")
        )
    flags = [flag for command in commands for flag in re.findall(r"--[a-z0-9-]+", command)]
    assert len(flags) > 2
    given = [flag.replace("--no-", "--") for flag in flags]  # a switch may be turned off
    assert not [flag for flag in given if f'"{flag}"' not in sources]


def test_the_configuration_of_the_page_opens_the_adapter():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(text) == kit.PLUGIN | {"adapter_params": {}}


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
