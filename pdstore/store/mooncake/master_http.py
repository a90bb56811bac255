"""MasterHttp: the HTTP server of Mooncake's master, which alone can list a pool's values."""

from __future__ import annotations

import http.client
import re
import urllib.request
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from pydantic import BaseModel, NonNegativeInt, ValidationError

from pdstore.errors import StoreUnavailable

_TIMEOUT_S = 5.0
MOST_BYTES = 4 << 20
"""Of an answer; the master's /metrics has a hundredth of it."""
_MOST_KEY_BYTES = 1 << 30  # 14 million keys
_BATCH = 64
_SHOWN = 80  # of an answer that is not understood
_GAUGE = re.compile(r"^(\w+) (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE | re.ASCII)


class _Replica(BaseModel):
    size_: NonNegativeInt


class _Value(BaseModel):
    """A value; without replicas it is not there, or not whole."""

    values: list[_Replica] | None = None


class _Listing(BaseModel):
    """The part of the answer to /batch_query_keys that is read."""

    data: dict[str, _Value]


class MasterHttp:
    """The server at the master's `--metrics_port`. It takes no password, so it often listens on its
    own host alone: then only that host can list.

    label: of the store, for messages.
    address: `host:port`.
    most_key_bytes: of the answer with all keys.
    """

    def __init__(self, label: str, address: str, most_key_bytes: int = _MOST_KEY_BYTES) -> None:
        self._label, self._address, self._most_key_bytes = label, address, most_key_bytes
        # the environment's proxies are for other networks
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def all_keys(self) -> list[str]:
        """Returns the keys of all values, half-written ones among them. Raises StoreUnavailable."""
        return self._read("/get_all_keys", self._most_key_bytes).split()

    def sizes(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yields key and length of each value that is there and whole; leases nothing.

        Raises StoreUnavailable.
        """
        for start in range(0, len(keys), _BATCH):
            names = ",".join(quote(key) for key in keys[start : start + _BATCH])
            for key, value in self._query(f"/batch_query_keys?keys={names}").items():
                if value.values:
                    yield key, sum(part.size_ for part in value.values)

    def gauges(self) -> dict[str, float]:
        """Returns the metrics that have no labels. Raises StoreUnavailable."""
        return {name: float(value) for name, value in _GAUGE.findall(self._read("/metrics"))}

    def _query(self, path: str) -> dict[str, _Value]:
        answer = self._read(path)
        try:
            return _Listing.model_validate_json(answer).data
        except ValidationError as error:
            raise StoreUnavailable(
                f"{self._label}: the HTTP server at {self._address} answers, but not as Mooncake's"
                f" master does ({answer[:_SHOWN]!r}): name the master's port by ?metrics_port="
            ) from error

    def _read(self, path: str, most_bytes: int = MOST_BYTES) -> str:
        try:
            with self._opener.open(f"http://{self._address}{path}", timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read(most_bytes + 1)
                if answer.length and len(body) <= most_bytes:  # the connection ended before
                    raise http.client.IncompleteRead(body, answer.length)
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", error)
            raise StoreUnavailable(
                f"{self._label}: only the master's HTTP server can list a pool, and the one at"
                f" {self._address} does not answer ({why}): name its port by ?metrics_port=, and"
                " ask on the master's host if it listens there alone"
            ) from error
        if len(body) > most_bytes:
            raise StoreUnavailable(
                f"{self._label}: the HTTP server at {self._address} answers with more than"
                f" {most_bytes} bytes: name the master's port by ?metrics_port="
            )
        return body.decode("utf-8", "replace")
