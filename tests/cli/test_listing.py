"""`pdstore ls` and `du` on real pools."""

from __future__ import annotations

import json

import pytest

from pdstore.cli.listing import du, ls
from tests.cli.conftest import fill
from tests.support.command import run, run_json
from tests.support.mooncake_cluster import Cluster


def test_du_counts_each_namespace(filled, prompts):
    document = run_json("du", "--store", filled)
    found = {use["namespace"]: use for use in document["namespaces"]}
    assert set(found) == {keys.namespace.hex for keys in prompts}
    for use in found.values():
        assert (use["blocks"], use["tails"], use["markers"], use["parts"]) == (2, 1, 0, [[0, 0]])
        assert use["bytes"] >= 3 * 1064
        assert 0 <= use["youngest_s"] <= use["oldest_s"] < 100
    assert document["room"]["used_bytes"] >= 6 * 1064


def test_ls_lists_one_namespace_and_no_more_than_asked(filled, prompts):
    keys = prompts[0]
    document = ls(filled, keys.namespace.hex, 0).document
    assert {v["key"] for v in document["values"]} == set(keys.store_keys(keys.namespace.parts))
    few = ls(filled, "", 4).document
    assert (len(few["values"]), few["num_values"]) == (4, 6)


def test_the_output_is_one_table(filled_file, prompts):
    ran = run("ls", "--store", filled_file)
    lines = ran.out.splitlines()
    assert ran.status == 0
    assert len(lines) == 2 + 6 + 1
    assert lines[0].split() == ["used", "size", "kind", "namespace", "group:shard:name"]
    assert lines[-1] == "6 values, 6.23 KiB"
    assert prompts[0].namespace.hex[:12] in ran.out


@pytest.mark.mooncake
def test_a_mooncake_pool_is_listed_by_its_masters_http_server(tmp_path, prompts):
    cluster = Cluster(tmp_path)
    try:
        url = fill(cluster.url, prompts)
        document = json.loads(json.dumps(du(url).document))
        listed = ls(url, "", 0).document["values"]
    finally:
        cluster.close()
    assert [use["blocks"] for use in document["namespaces"]] == [2, 2]
    assert document["room"]["capacity_bytes"] == 256 << 20
    assert {value["bytes"] for value in listed} == {1064}
    assert {value["age_s"] for value in listed} == {None}
