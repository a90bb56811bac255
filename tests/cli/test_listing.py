"""`pdstore ls` and `du` on real pools."""

from __future__ import annotations

from pdstore.cli.listing import ls
from pdstore.settings import read_settings
from pdstore.store import open_store
from pdstore.store.connect import read_pool_id
from tests.cli.conftest import MOONCAKE_BYTES
from tests.support.command import run, run_json


def test_du_counts_each_namespace(filled, prompts):
    document = run_json("du", "--store", filled)
    found = {use["namespace"]: use for use in document["namespaces"]}
    assert set(found) == {keys.namespace.hex for keys in prompts}
    for use in found.values():
        assert (use["blocks"], use["tails"], use["markers"], use["parts"]) == (2, 1, 0, [[0, 0]])
        assert use["bytes"] >= 3 * 1064
        if filled.startswith("mooncake"):  # it does not tell
            assert use["youngest_s"] is use["oldest_s"] is None
        else:
            assert 0 <= use["youngest_s"] <= use["oldest_s"] < 100
    assert document["room"]["used_bytes"] >= 6 * 1064
    if filled.startswith("mooncake"):
        assert document["room"]["capacity_bytes"] == MOONCAKE_BYTES


def test_ls_lists_one_namespace_and_no_more_than_asked(filled, prompts):
    keys = prompts[0]
    document = ls(filled, keys.namespace.hex, 0).document
    assert {v["key"] for v in document["values"]} == set(keys.store_keys(keys.namespace.parts))
    few, all_of_it = (ls(filled, "", limit).document for limit in (4, 0))
    assert (len(few["values"]), few["num_values"]) == (4, len(all_of_it["values"]))
    assert {v["key"] for v in all_of_it["values"]} >= {v["key"] for v in few["values"]}


def test_the_output_is_one_table(filled_file, prompts):
    ran = run("ls", "--store", filled_file)
    lines = ran.out.splitlines()
    assert ran.status == 0
    assert len(lines) == 2 + 6 + 1
    assert lines[0].split() == ["used", "size", "kind", "namespace", "group:shard:name"]
    assert lines[-1] == "6 values, 6.23 KiB"
    assert prompts[0].namespace.hex[:12] in ran.out


def test_the_pools_own_id_is_a_line_too(file_url):
    store = open_store(file_url, read_settings())
    read_pool_id(store)
    store.close()
    lines = run("ls", "--store", file_url).out.splitlines()
    assert lines[-2].split()[-2:] == ["pool", "pool"]  # its kind and its name
    assert lines[-1].startswith("1 value, ")
