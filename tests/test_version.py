"""The version, and what `import pdstore` brings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdstore

ROOT = Path(__file__).parent.parent


def test_the_build_reads_the_literal_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'input = "pdstore/__init__.py"' in project
    assert not re.search(r"^version\s*=", project, flags=re.MULTILINE)
    source = (ROOT / "pdstore" / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE) == [
        pdstore.__version__
    ]


def test_lmcaches_distribution_and_the_extra_are_of_this_version():
    """`pdstore[lmcache]` brings it, and neither works with another version of the other."""
    extra = re.findall(r'"pdstore-lmcache==(.+?)"', (ROOT / "pyproject.toml").read_text())
    project = (ROOT / "integrations" / "lmcache" / "pyproject.toml").read_text()
    own = re.findall(r'^version = "(.+?)"', project, flags=re.MULTILINE)
    needs = re.findall(r'^dependencies = \["pdstore==(.+?)"\]', project, flags=re.MULTILINE)
    assert extra == own == needs == [pdstore.__version__]


def test_the_changelog_begins_with_what_is_unreleased_and_then_names_this_version():
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert pdstore.__version__ in headings[1]


def test_a_wheel_has_no_extra_that_only_a_checkout_needs():
    """Those are dependency groups, which no index publishes; `make setup` installs them."""
    project = (ROOT / "pyproject.toml").read_text()
    extras, groups = project.split("[dependency-groups]")
    for name in ("examples", "proxies", "test", "bench", "docs", "dev", "release"):
        assert not re.search(rf"^{name} = \[", extras, flags=re.MULTILINE), name
        assert re.search(rf"^{name} = \[", groups, flags=re.MULTILINE), name
    makefile = (ROOT / "Makefile").read_text()
    for names in ("examples test dev docs", "proxies examples test"):
        assert f"$(addprefix --group ,{names})" in makefile


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


def test_ci_uses_a_wheels_public_names_and_not_only_those_of_the_checkout():
    """Runs README's Python block, which imports them, from an installed wheel."""
    root = Path(__file__).parent.parent
    assert "scripts/try_wheel.sh" in (root / ".ci/run").read_text()
    assert "README.md, its Python block" in (root / "scripts/try_wheel.sh").read_text()
    [code] = re.findall("```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert "pdstore.KVPool(" in code
