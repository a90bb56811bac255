"""Scripted: a store that answers as it is told to."""

from __future__ import annotations

from pdstore.store.base import Store


class Scripted(Store):
    """Answers as the script says: a number, or an exception."""

    label = "scripted://"

    def __init__(self, *script):
        self.script, self.num_calls = list(script), 0

    def match(self, keys):
        self.num_calls += 1
        answer = self.script.pop(0) if self.script else 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get(self, keys, slots):
        return self.match(keys)

    def put(self, keys, slots):
        return self.match(keys)

    def remove(self, keys):
        self.match(keys)

    def clear(self, namespace):
        self.match([namespace])

    def close(self):
        pass
