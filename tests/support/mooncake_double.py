"""A double of Mooncake's library and of its servers, to give MooncakeStore any answer."""

from __future__ import annotations

import threading

from pdstore.errors import StoreError
from pdstore.store.mooncake.library import MooncakeConfig
from pdstore.store.mooncake.store import MooncakeStore


class RawDouble:
    """The library's object: answers from dicts of sizes, or with the codes of a script.

    values: sizes of what can be read. sizes: what `get_size` answers in their place.
    hidden: keys that `batch_is_exist` does not show.
    script: (verb, codes) of the next calls of that verb; a 0 stands for the usual answer.
    gate: calls wait here.
    """

    def __init__(self):
        self.values, self.sizes, self.hidden, self.script = {}, {}, set(), []
        self.calls, self.moved, self.buffers = [], [], []
        self.is_closed = False
        self.gate = threading.Event()
        self.gate.set()

    def _answer(self, verb, keys, usual):
        assert not self.is_closed, "the library would crash"
        self.calls.append((verb, list(keys)))
        self.gate.wait(30)
        if self.script and self.script[0][0] == verb:
            codes = self.script.pop(0)[1]
            return [code if code else usual(i) for i, code in enumerate(codes)]
        return [usual(i) for i in range(len(keys))]

    def batch_put_from(self, keys, addresses, sizes, config):
        self.moved += zip(keys, addresses, sizes, [config] * len(keys), strict=True)

        def usual(i):
            self.values.setdefault(keys[i], sizes[i])
            return 0

        return self._answer("put", keys, usual)

    def batch_get_into(self, keys, addresses, sizes):
        return self._answer("get", keys, lambda i: self.values.get(keys[i], -704))

    def batch_is_exist(self, keys):
        return self._answer("exist", keys, lambda i: int(keys[i] in {*self.values} - self.hidden))

    def batch_remove(self, keys, force):
        assert force
        return self._answer("remove", keys, lambda i: 0 if self.values.pop(keys[i], 0) else -704)

    def remove_by_regex(self, pattern, force):
        assert force
        [code] = self._answer("clear", [pattern], lambda _: 1)
        return code

    def get_size(self, key):
        return self.sizes.get(key, self.values.get(key, -704))

    def register_buffer(self, address, size):
        self.buffers.append((address, size))
        return 0

    def unregister_buffer(self, address):
        self.buffers = [buffer for buffer in self.buffers if buffer[0] != address]
        return 0

    def close(self):
        self.is_closed = True
        return 0

    def count(self, verb):
        return sum(call[0] == verb for call in self.calls)


class LibraryDouble:
    """Hands out the objects that it was given, one after the other, then always the last one."""

    def __init__(self, *raws):
        self._raws, self.firsts = list(raws), []

    def connect_data(self, *, is_first=True):
        self.firsts.append(is_first)
        return self._raws.pop(0) if len(self._raws) > 1 else self._raws[0]

    def connect_lookup(self):
        return self._raws[0]

    def put_config(self, *, is_pinned):
        return is_pinned


class ServerDouble:
    """Every server of a store. problem: what it raises; None: it answers."""

    def __init__(self):
        self.problem: StoreError | None = None

    def __call__(self, label, address):
        return self

    def require(self):
        if self.problem is not None:
            raise self.problem


def double_store(library, server, **fields) -> MooncakeStore:
    """Returns a store on doubles; `fields` are MooncakeConfig's."""
    config = MooncakeConfig(**{"master": "m:1"} | fields)
    return MooncakeStore("mooncake://m:1", config, library, server)
