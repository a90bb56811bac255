"""MasterHttp: the master's own listing; a server that is away or another one is named."""

from __future__ import annotations

import socketserver

import pytest

from pdstore.cli.ports import free_ports
from pdstore.errors import StoreUnavailable
from pdstore.store.mooncake.master_http import MasterHttp
from pdstore.testing.threads import start_background


def test_a_server_that_is_away_is_named_with_its_option():
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} does not answer.*metrics_port"):
        MasterHttp("mooncake://here", f"127.0.0.1:{port}").all_keys()


class Other(socketserver.StreamRequestHandler):
    """A server that speaks no HTTP."""

    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"\x00\x01 who are you?\r\n\r\n")


def test_a_server_that_speaks_something_else_is_named_too():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        end = start_background(server.serve_forever)
        _, port = server.server_address
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port} does not answer"):
            MasterHttp("mooncake://here", f"127.0.0.1:{port}").gauges()
        server.shutdown()
        end(10)
