"""Refusal: an answer of the router's own, in OpenAI's form of an error."""

from __future__ import annotations

import json


class Refusal(Exception):
    """Ends a request with this answer instead of one of D's."""

    def __init__(self, status: int, body: bytes, media_type: str = "application/json") -> None:
        super().__init__(status)
        self.status, self.body, self.media_type = status, body, media_type

    @classmethod
    def of(cls, status: int, message: str) -> Refusal:
        """Returns a refusal with an error object: the client's fault below 500, else upstream's."""
        kind = "invalid_request_error" if status < 500 else "upstream_error"
        error = {"message": message, "type": kind, "param": None, "code": status}
        return cls(status, json.dumps({"error": error}).encode())
