"""`pdstore purge` forgets one namespace and nothing else, and a rehearsal forgets nothing."""

from __future__ import annotations

import pytest

from pdstore.cli.clearing import clear
from pdstore.errors import ConfigError
from tests.support.command import namespaces, run, run_json


def test_one_namespace_goes_and_the_other_stays(filled, prompts):
    gone, kept = (keys.namespace.hex for keys in prompts)
    document = run_json("purge", "--namespace", gone[:8], "--store", filled)
    assert (document["namespace"], document["num_values"], document["cleared"]) == (gone, 3, True)
    assert namespaces(filled) == {kept}


def test_a_rehearsal_forgets_nothing(filled, prompts):
    name = prompts[0].namespace.hex
    ran = run("purge", "--namespace", name, "--dry-run", "--store", filled)
    assert ran.out.startswith("would forget 3 values")
    assert namespaces(filled) == {keys.namespace.hex for keys in prompts}


@pytest.mark.parametrize("beginning", ["", "xyz", "g" * 32])
def test_no_namespace_or_several_are_refused(filled_file, prompts, beginning):
    with pytest.raises(ConfigError, match="namespace"):
        clear(filled_file, beginning, is_rehearsal=False)
    assert len(namespaces(filled_file)) == 2
