"""TraceRequest: one line of a request trace in the form of the Mooncake release."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TRACE_BLOCK = 512
"""Tokens that one id of a trace stands for."""


class TraceRequest(NamedTuple):
    """A request: when it came, and the shared prefixes of its prompt.

    at_s: seconds from the trace's start.
    num_tokens: of the prompt.
    blocks: one id for each 512 tokens; equal ids are equal tokens after equal tokens.
    """

    at_s: float
    num_tokens: int
    num_decoded: int
    blocks: list[int]

    @property
    def token_ids(self) -> array[int]:
        """Returns token ids; two prompts share exactly as many as their blocks say."""
        ids = array("i")
        for block in self.blocks:
            ids.extend(array("i", [block]) * TRACE_BLOCK)
        return ids[: self.num_tokens]


def read_trace(file: Path) -> Iterator[TraceRequest]:
    """Yields a trace's requests in order of arrival.

    Raises ValueError with the line's number for a line that is no request.
    """
    with file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
                yield TraceRequest(
                    at_s=found["timestamp"] / 1000,
                    num_tokens=found["input_length"],
                    num_decoded=found["output_length"],
                    blocks=found["hash_ids"],
                )
            except (KeyError, TypeError, ValueError) as error:  # noqa: PERF203 - it names the line
                raise ValueError(f"{file}:{number}: no request: {error!r}") from error
