"""MasterHttp: the master's own listing; a server that is away is named with what to do."""

from __future__ import annotations

import pytest

from pdstore.errors import StoreUnavailable
from pdstore.store.mooncake.master_http import MasterHttp
from tests.support.mooncake_cluster import free_ports


def test_a_server_that_is_away_is_named_with_its_option():
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} does not answer.*metrics_port"):
        MasterHttp("mooncake://here", f"127.0.0.1:{port}").all_keys()
