"""MooncakeStore keeps the contract in each topology, on a real master."""

from __future__ import annotations

import contextlib

import pytest

from pdstore.errors import StoreClosed
from pdstore.format.keys import BlockKey
from pdstore.testing import StoreTests
from pdstore.testing.values import filled_slots
from tests.support.mooncake_cluster import (
    SEGMENT,
    Cluster,
    master_of,
    put_bare,
    wait_until_it_serves,
)
from tests.support.same_arguments import SameArguments

pytestmark = pytest.mark.mooncake

BALLAST = [BlockKey(f"ballast:{i}") for i in range(13)]
SMALL_FLAGS = ["--eviction_high_watermark_ratio=0.95", "--eviction_ratio=0.02"]


@pytest.fixture(scope="module")
def small_cluster(tmp_path_factory):
    """A pool of 16 MiB, the least there is, of which 13 are taken for good."""
    directory = tmp_path_factory.mktemp("small")
    with contextlib.closing(Cluster(directory, segment=16 << 20, flags=SMALL_FLAGS)) as cluster:
        with cluster.open() as store:
            fill_13_mib(store)
        yield cluster


@pytest.fixture(scope="module")
def small_lonely_store(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small-lonely")
    with (
        contextlib.closing(Cluster(directory, segment=0, flags=SMALL_FLAGS)) as cluster,
        cluster.open(f"{cluster.url}&topology=embedded&segment=16MB") as store,
    ):
        fill_13_mib(store)
        yield store


def fill_13_mib(store):
    wait_until_it_serves(store)
    slots = filled_slots([bytes(1 << 20)] * len(BALLAST))
    put_bare(store, BALLAST, slots, is_pinned=True)
    assert store.match(BALLAST) == len(BALLAST)


def emptied(store):
    with master_of(store) as raw:
        raw.remove_by_regex("^pds1", True)
    return store


@pytest.fixture(scope="module")
def lonely_master(tmp_path_factory):
    with contextlib.closing(Cluster(tmp_path_factory.mktemp("lonely"), segment=0)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def opened(cluster, small_cluster, lonely_master):
    """Opens stores: a test gets one that the tests before it used, unless they closed it."""
    stores = {}

    def get(cluster, url, name="store"):
        with contextlib.suppress(KeyError, StoreClosed):
            stores[url, name].match([])
            return stores[url, name]
        store = stores[url, name] = cluster.connect(url)
        return store

    yield get
    for store in stores.values():
        store.close()


class Topology(StoreTests):
    clears_under_readers = True  # rule 12

    def write_raw(self, store, key, data):
        put_bare(store, [key], filled_slots([data]))

    @pytest.mark.parametrize("length", [1, 4095, 4097])
    def test_a_planted_value_of_another_length_raises_wrong_length(self, store, length):
        """Without 0: Mooncake cannot store an empty value."""
        super().test_a_planted_value_of_another_length_raises_wrong_length(store, length)


class TestHolder(Topology):
    """The memory belongs to a process of its own: production."""

    @pytest.fixture
    def store(self, cluster, opened):
        return opened(cluster, f"{cluster.url}&connections=2")

    @pytest.fixture
    def peer(self, cluster, opened):
        return opened(cluster, cluster.url, "peer")

    @pytest.fixture
    def small_store(self, small_cluster, opened):
        return emptied(opened(small_cluster, small_cluster.url))


class TestEmbedded(SameArguments, Topology):
    """This process lends the memory."""

    @pytest.fixture
    def store(self, lonely_master, opened):
        url = f"{lonely_master.url}&topology=embedded&segment={SEGMENT}"
        return opened(lonely_master, url)

    @pytest.fixture
    def peer(self, lonely_master, opened):
        return opened(lonely_master, lonely_master.url)

    @pytest.fixture
    def small_store(self, small_lonely_store):
        return emptied(small_lonely_store)
