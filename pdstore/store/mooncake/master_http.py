"""MasterHttp: the HTTP server of Mooncake's master, which alone can list a pool's values."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from pdstore.errors import StoreUnavailable

_TIMEOUT_S = 5.0
_BATCH = 64
_GAUGE = re.compile(r"^(\w+) ([0-9.e+]+)$", re.MULTILINE)


class MasterHttp:
    """The server at the master's `--metrics_port`. It takes no password, so it often listens on its
    own host alone: then only that host can list.

    label: of the store, for messages.
    address: `host:port`.
    """

    def __init__(self, label: str, address: str) -> None:
        self._label, self._address = label, address
        # the environment's proxies are for other networks
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def all_keys(self) -> list[str]:
        """Returns the keys of all values, half-written ones among them. Raises StoreUnavailable."""
        return self._read("/get_all_keys").split()

    def sizes(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yields key and length of each value that is there and whole; leases nothing.

        Raises StoreUnavailable.
        """
        for start in range(0, len(keys), _BATCH):
            names = ",".join(quote(key) for key in keys[start : start + _BATCH])
            answer = json.loads(self._read(f"/batch_query_keys?keys={names}"))
            for key, found in answer.get("data", {}).items():
                if found.get("values"):
                    yield key, sum(part["size_"] for part in found["values"])

    def gauges(self) -> dict[str, float]:
        """Returns the metrics that have no labels. Raises StoreUnavailable."""
        return {name: float(value) for name, value in _GAUGE.findall(self._read("/metrics"))}

    def _read(self, path: str) -> str:
        try:
            with self._opener.open(f"http://{self._address}{path}", timeout=_TIMEOUT_S) as answer:
                text: str = answer.read().decode("utf-8", "replace")
                return text
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(
                f"{self._label}: only the master's HTTP server can list a pool, and the one at"
                f" {self._address} does not answer ({error}): name its port by ?metrics_port=, and"
                " ask on the master's host if it listens there alone"
            ) from error
