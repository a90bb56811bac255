"""The package that vLLM is pointed to: the connector by its name, and vLLM not before it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdstore.adapters import vllm


def test_vllm_is_not_imported_before_the_connector_is_asked_for():
    """vLLM loads plugins before its own modules, some of which read the environment."""
    program = "import sys, pdstore.adapters.vllm; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_connector_is_found_by_its_name():
    from pdstore.adapters.vllm.connector import PDStoreConnector

    assert vllm.PDStoreConnector is PDStoreConnector


def test_any_other_name_is_missing_as_in_every_module():
    with pytest.raises(AttributeError, match=r"pdstore\.adapters\.vllm.*no attribute 'Connector'"):
        _ = vllm.Connector
