"""`ls`, `du`, `inspect` and `clear`, and how they read a pool."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from pdstore.cli import listing as module
from pdstore.cli.explained import explain
from pdstore.cli.listing import StoredKey, inspect, ls, open_pool
from pdstore.cli.purging import clear
from pdstore.cli.usage import du
from pdstore.errors import ConfigError
from pdstore.format.block import HEADER_BYTES, Header, seal
from pdstore.format.keys import BlockKey, Kind, Part, PromptKeys, kind_of
from pdstore.settings import read_settings
from pdstore.store import StoreURL, open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import StoredValue
from pdstore.store.seal import seal_store
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import get, put
from tests.cli.conftest import MOONCAKE_BYTES
from tests.support.command import namespace_of, namespaces, run, run_json, save


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


@pytest.fixture
def keys(prompts):
    return prompts[0].store_keys(prompts[0].namespace.parts)


def replant(url, key, data):
    store = open_store(url, read_settings())
    store.remove([key])
    put(store, [key], [data])
    store.close()


def raw(url, key):
    store = open_store(url, read_settings())
    [data] = get(store, [key], [1064])
    store.close()
    return data


def test_a_right_value_shows_its_header(filled, prompts, keys):
    answer = inspect(filled, keys[2])
    assert answer.status == 0
    assert answer.document["verdict"] == "right"
    assert answer.document["bytes"] >= 1064
    assert answer.document["num_tokens"] == 8
    assert answer.document["prefix_hash"] == prompts[0].hash_of(2).hex()
    assert answer.document["namespace"] == prompts[0].namespace.hex


def test_a_piece_that_only_one_key_has_is_enough(filled_file, prompts, keys):
    assert inspect(filled_file, prompts[0].hash_of(1).hex()[:10]).document["key"] == keys[1]
    with pytest.raises(ConfigError, match="6 keys have 'pds1'"):
        inspect(filled_file, "pds1")


@pytest.mark.parametrize("verdict", ["damaged", "foreign"])
def test_a_damaged_value_and_one_of_another_key_are_told(filled_file, keys, verdict):
    values = [raw(filled_file, key) for key in keys[:2]]
    replant(filled_file, keys[0], values[1] if verdict == "foreign" else values[0][:-1] + b"?")
    answer = inspect(filled_file, keys[0])
    assert answer.status == 1
    assert answer.document["verdict"].startswith(verdict)


def test_a_value_of_absurd_length_is_told_and_not_read(filled_file, prompts, keys):
    place = Path(StoreURL.of(filled_file).path)
    [path] = [path for path in place.rglob("*") if path.name == keys[0]]
    with path.open("r+b") as file:
        file.truncate(1 << 41)  # of zeros, which take no room
    said = inspect(filled_file, keys[0])
    assert said.status == 1
    assert "damaged: it is 2.0TiB long" in said.document["verdict"]
    ids = ",".join("1" * 3)
    ran = run("explain", "--ids", ids, "--store", filled_file)
    assert (ran.status, "Traceback" in ran.err) == (1, False)


class Aged(MemoryStore):
    """Lists values of given ages; a store that tells whole seconds has many of 0."""

    def stored_values(self, prefix=""):
        for number, age_s in enumerate((3.0, 0.0, 7, None, 0)):
            yield StoredValue(BlockKey(f"pds1:{'c' * 32}:0:0:{number:032x}"), 200, age_s)


def test_an_age_of_0_is_the_youngest_and_not_an_unknown_one(monkeypatch):
    monkeypatch.setattr(module, "open_store", lambda url, settings: Aged())
    shown = [value["age_s"] for value in ls("memory://", "", 0).document["values"]]
    assert shown == [0.0, 0, 3.0, 7, None]
    assert [v["age_s"] for v in ls("memory://", "", 2).document["values"]] == [0.0, 0]
    [use] = du("memory://").document["namespaces"]
    assert (use["youngest_s"], use["oldest_s"]) == (0.0, 7)


def test_a_sealed_value_is_read_with_its_key_and_with_no_other(file_url, prompts, keys, tmp_path):
    mine, other = (str(tmp_path / name) for name in ("mine", "other"))
    for path, digit in ((mine, "1"), (other, "2")):
        Path(path).write_text(digit * 64 + "\n")
        Path(path).chmod(0o600)
    settings = read_settings(seal_key_file=mine)
    store = seal_store(open_store(file_url, settings), settings)
    save(store, prompts[0])
    store.close()
    for path, verdict in ((mine, "right"), (other, "sealed with a key that is not")):
        ran = run("inspect", keys[0], "--store", file_url, PDSTORE_SEAL_KEY_FILE=path)
        assert verdict in ran.out, ran.err


@pytest.mark.redis
@pytest.mark.parametrize("name", ["long" * 30_000, "\x1b]0;title\x07", b"\xff\xfe", "9" * 5000])
def test_a_key_that_nobody_of_ours_made_harms_no_command(redis_server, prompts, name):
    server = redis_server()
    hostile = [b"pds1:" + (name if isinstance(name, bytes) else name.encode())]
    hostile.append(f"pds1:{'a' * 32}:{'9' * 5000}:0:{'b' * 32}".encode())
    with server.client() as raw:
        for key in hostile:
            raw.set(key, b"x")
    ran = run("inspect", hostile[0].decode("ascii", "replace")[:40], "--store", server.url)
    assert (ran.status, ran.err.startswith("pdstore: ")) == (2, True)
    assert "\x1b" not in ran.out + ran.err
    listed = run("ls", "--store", server.url)
    assert (listed.status, "\x1b" in listed.out) == (0, False)
    assert run("du", "--store", server.url).status == 0


PLUGIN = Path(__file__).parents[2] / "examples" / "store_plugin"


def test_one_namespace_goes_and_the_other_stays(filled, prompts):
    gone, kept = (keys.namespace.hex for keys in prompts)
    document = run_json("purge", "--namespace", gone[:8], "--yes", "--store", filled)
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
        clear(filled_file, beginning, is_rehearsal=False, is_agreed=True)
    assert len(namespaces(filled_file)) == 2


@pytest.fixture
def sqlite(tmp_path, monkeypatch):
    """The URL of an installed plug-in's store, which has `clear` and cannot list its values."""
    info = tmp_path / "pdstore_sqlite-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdstore-sqlite\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[pdstore.stores]\nsqlite = pdstore_sqlite:SQLiteStore\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(PLUGIN)
    return f"sqlite://{tmp_path}/pool.db"


def test_a_store_that_cannot_list_is_cleared_by_the_whole_name(sqlite, prompts):
    with contextlib.closing(open_store(sqlite, read_settings())) as store:
        for keys in prompts:
            save(store, keys)
        gone, kept = (keys.namespace.hex for keys in prompts)
        ran = run("purge", "--namespace", gone, "--yes", "--store", sqlite)
        assert (ran.status, ran.out) == (0, f"forgot all of {gone} in {store.label}\n"), ran.err
        found = [
            store.match(keys.store_keys(keys.namespace.parts, 0, len(keys))) for keys in prompts
        ]
        assert found == [0, len(prompts[1])]
        document = run_json("purge", "--namespace", kept, "--dry-run", "--store", sqlite)
        assert (document["num_values"], document["cleared"]) == (None, False)


KEY = BlockKey("pds1:" + "a" * 32 + ":0:0:" + "b" * 32)


@pytest.mark.misconfiguration("`du`, `ls`, `explain` with the URL of a pool that is not there")
@pytest.mark.parametrize("name", ["file://{}/pool", "shm://pool?dir={}"])
def test_looking_makes_no_pool(name, tmp_path):
    url = name.format(tmp_path)
    with pytest.raises(ConfigError, match="there is no pool in"), open_pool(url):
        pass
    assert not [*tmp_path.iterdir()]
    open_store(f"{url}{'&size=8MiB' if url.startswith('shm') else ''}", read_settings()).close()
    with open_pool(url) as pool:
        assert pool.read(KEY) is None


def test_a_store_that_cannot_list_is_refused(monkeypatch):
    monkeypatch.setattr(module, "open_store", lambda url, settings: WrapperStore(MemoryStore()))
    with pytest.raises(ConfigError, match="cannot list"):
        ls("memory://", "", 0)


NAMESPACE = namespace_of("any", parts=(Part(2, 3),))


def test_blocks_and_tails_are_read_back():
    keys = PromptKeys(NAMESPACE).extend(range(20))
    block, tail = map(StoredKey.parsed, keys.store_keys(NAMESPACE.parts))
    hashes = [keys.hash_of(number).hex() for number in (0, 1)]
    assert block == (Kind.BLOCK, NAMESPACE.hex, 2, 3, hashes[0], None, "")
    assert tail == (Kind.TAIL, NAMESPACE.hex, 2, 3, hashes[1], 4, "")


def test_a_draft_is_no_part_of_a_block_and_is_counted_apart(tmp_path):
    parts = (Part(0, 0), Part(1, 0))
    plain = namespace_of("drafts", parts=parts[:1])
    drafting = replace(namespace_of("drafts", parts=parts), drafts={1: "d" * 16})
    assert plain.hex == drafting.hex
    url = f"file://{tmp_path / 'pool'}"
    store = open_store(url, read_settings())
    for namespace, stop in ((plain, 3), (drafting, 1)):
        save(store, PromptKeys(namespace).extend(range(40)), stop=stop)
    store.close()
    [use] = du(url).document["namespaces"]
    assert (use["parts"], use["drafts"], use["blocks"]) == ([[0, 0]], {"d" * 16: 1}, 3)
    ids = ",".join(map(str, range(40)))
    said = explain(url, ids=ids)
    assert (said.document["found_tokens"], said.document["drafts"]) == (40, {"d" * 16: 16})
    assert "of 16 of these tokens" in str(said.shown[-1])
    [name] = PromptKeys(drafting).extend(range(40)).store_keys(parts[1:], 0, 1)
    assert inspect(url, name).document["verdict"] == "right"
    assert name in [value["key"] for value in ls(url, "", 0).document["values"]]
    store = open_store(url, read_settings())
    header = Header(0, 1, 0, 1, 16, 0, plain.digest, bytes.fromhex(name.split(":")[4]))
    value = memoryview(bytearray(HEADER_BYTES))
    seal(value, header)
    store.remove([name])
    put(store, [name], [bytes(value)])
    store.close()
    assert inspect(url, name).document["verdict"].startswith("foreign"), "a block's header"
    clear(url, plain.hex, is_rehearsal=False, is_agreed=True)
    assert ls(url, "", 0).document["values"] == []


def test_a_draft_s_key_begins_as_no_other_key_does():
    namespace = replace(namespace_of("any"), drafts={1: "d" * 16, 11: "e" * 16})
    keys = PromptKeys(namespace).extend(range(20))
    of = {n: keys.store_keys([Part(n, 0)]) for n in (0, 1, 10, 11)}
    names = [name for listed in of.values() for name in listed]
    starts = {n: namespace.key_prefix(Part(n, 0)) for n in of}
    for number, start in starts.items():
        assert [name for name in names if name.startswith(start)] == of[number]
    assert [StoredKey.parsed(name).draft for name in of[11]] == ["e" * 16] * 2
    assert [kind_of(name) for name in of[1]] == [Kind.BLOCK, Kind.TAIL]


@pytest.mark.parametrize(
    "text",
    [
        *("", "pds1:", "pds1:doctor:00", f"pds1:{'a' * 32}:0:0:short"),
        *(f"pds1:{'a' * 32}:{number}:0:{'b' * 32}" for number in ("9" * 5000, "\u0661", "-1")),
        f"pds1:{'a' * 32}:0:0:{'b' * 32}:partial:{'9' * 5000}",
        *(f"pds1:{'a' * 32}:1{draft}:0:{'b' * 32}" for draft in (".", ".d", f".{'D' * 16}")),
        f"pds1:{'a' * 32}:handoff:{'b' * 32}:0:d\u00f6ne",
    ],
)
def test_other_texts_are_no_keys(text):
    assert StoredKey.parsed(text) is None
