"""Contents: the digests that a request's keys need, and the names that must not be trusted.

vLLM's own caches of KV and of encoders' outputs go by names: an image's uuid, which a client may
choose, and a LoRA adapter's number and path. A key has a digest of what stands behind the name. A
name that had two contents may stand for either in vLLM's caches, so requests with it bypass the
pool from then on. Reading and digesting take time, so threads do it while the request waits.
"""

# Decision: docs/decisions/044-contents.md
from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from pdstore.adapters.vllm.digests import AdapterDigests, ItemDigests, NotAtHand
from pdstore.format.keys import MultimodalItem
from pdstore.threads import Deadline, Worker

log = logging.getLogger("vllm.pdstore")
T = TypeVar("T")

MAX_NAMES = 1 << 20
"""Names that are remembered, with about 130 bytes each."""
_DIGEST_TIMEOUT_S = 5.0  # from the moment when vLLM would compute the request
_FRESH_S = 0.2
_MAX_ADAPTER_NAMES = 1 << 14
_DISTRUSTED = 0

_REASONS = {
    "two": "one name (a client's uuid) stands for two different ones: requests with that name",
    "late": f"their digests took longer than {_DIGEST_TIMEOUT_S:g} s: requests with those",
    "elsewhere": "vLLM does not give pdstore their data: requests with those",
    "full": f"there were {MAX_NAMES:,} names since the start: requests with new ones",
}
"""Ends of a warning about images, sounds and videos."""


@dataclass(frozen=True)
class Content:
    """Digests that a request's keys need beside its tokens.

    is_known: False while a thread still makes them.
    may_share: False if the request must bypass the pool.
    lora, items: as `PromptKeys` takes them.
    """

    is_known: bool = True
    may_share: bool = True
    lora: bytes = b""
    items: tuple[MultimodalItem, ...] = ()


PLAIN = Content()
_BYPASS = Content(may_share=False)
_UNKNOWN = Content(is_known=False, may_share=False)


class Contents:
    """Finds what stands behind the names in requests. Only the scheduler's thread calls it.

    hashes_items: False if all requests with images, sounds or videos must bypass the pool.
    tells_paths_apart: True if vLLM's prefix cache tells adapters of one name apart by their paths.
    timeout_s: seconds that a request waits for its digests, at most, before it bypasses the pool.
    fresh_s: seconds for which an adapter's files count as seen just now.
    most_names: names of images, sounds and videos that are remembered; requests with further ones
      bypass the pool.
    items: makes the digests of items.
    """

    def __init__(
        self,
        *,
        hashes_items: bool = True,
        tells_paths_apart: bool = False,
        timeout_s: float = _DIGEST_TIMEOUT_S,
        fresh_s: float = _FRESH_S,
        most_names: int = MAX_NAMES,
        items: ItemDigests | None = None,
    ) -> None:
        self._hashes_items = hashes_items
        self._tells_paths_apart = tells_paths_apart
        self._timeout_s = timeout_s
        self._fresh_s = fresh_s
        self._item_names = Names(most_names)
        self._adapter_names = Names(_MAX_ADAPTER_NAMES)
        self._items = items or ItemDigests()
        self._adapters = AdapterDigests()
        self._item_thread = _Thread("pdstore-items")
        self._adapter_thread = _Thread("pdstore-adapters")
        self._asked: dict[str, _Asked] = {}
        self._distrusted: list[str] = []
        self._warned: set[str] = set()

    def content_of(
        self, request: Any, timeout_s: float | None = None, *, must_decide: bool = False
    ) -> Content:
        """Returns a request's digests if they are known. The first call asks threads for them.

        timeout_s: seconds to wait for them; None if vLLM would not compute the request yet. The
          request's timeout begins when vLLM would. Then the files of its adapter are also looked at
          again, unless that was just now.
        must_decide: True if vLLM computes the request in any case: it bypasses the pool then.
        """
        features, lora = getattr(request, "mm_features", None) or (), request.lora_request
        if features and not self._hashes_items:
            return _BYPASS
        if not features and lora is None:
            return PLAIN
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = self._ask(features, lora)
        if timeout_s is not None:
            if asked.is_outdated(self._fresh_s):
                self._ask_again(asked)
            if not asked.content.is_known:
                self._settle(
                    asked, timeout_s, digest_timeout_s=0.0 if must_decide else self._timeout_s
                )
        return asked.content

    def pop_distrusted(self) -> list[str]:
        """Returns the ids of requests that must leave the pool: a name of theirs turned out bad."""
        distrusted, self._distrusted = self._distrusted, []
        return distrusted

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended; digests that nobody began to make are not made."""
        asked = self._asked.pop(request_id, None)
        for question in asked.questions() if asked else ():
            question.drop()

    def close(self) -> None:
        """Ends the threads."""
        self._item_thread.close()
        self._adapter_thread.close()

    def _ask(self, features: Sequence[Any], lora: Any) -> _Asked:
        asked = _Asked([_Item.of_feature(feature) for feature in features])
        if features:
            asked.digests = self._item_thread.ask(partial(_digests_of, self._items, list(features)))
        if lora is not None:
            asked.path = lora.lora_path
            asked.names = [b"number %d" % lora.lora_int_id, b"path " + asked.path.encode()]
            if not self._tells_paths_apart:
                asked.names.append(b"name " + lora.lora_name.encode())
            self._ask_again(asked)
        return asked

    def _ask_again(self, asked: _Asked) -> None:
        """Asks for an adapter's digest; only its files' state is read if it was asked before."""
        asked.adapter = self._adapter_thread.ask(partial(self._adapters.digest_of, asked.path))
        asked.content = _UNKNOWN

    def _settle(self, asked: _Asked, timeout_s: float, digest_timeout_s: float) -> None:
        """Decides on a request whose digests are there, or whose deadline has passed."""
        asked.deadline = asked.deadline or Deadline(digest_timeout_s)
        is_late = not asked.have_ended(timeout_s)
        if is_late and not asked.deadline.is_over():
            return
        asked.deadline = None
        lora = asked.adapter.answer if asked.adapter is not None else b""
        is_trusted = lora is not None
        if asked.adapter is not None and asked.adapter.has_ended.is_set():
            is_trusted = all([self._adapter_names.trust(each, lora) for each in asked.names])
        digests = (asked.digests and asked.digests.answer) or [None] * len(asked.items)
        for item, digest in zip(asked.items, digests, strict=True):
            content = digest
            if item.is_of_adapter:  # the encoder has the adapter, too
                content = digest and lora and hashlib.sha256(digest + lora).digest()
            if not self._item_names.trust(item.name, content):
                is_trusted = False
                self._warn_about(item, digest, is_late=is_late)
        asked.content = _BYPASS
        if is_trusted:
            named = (item.named(each) for item, each in zip(asked.items, digests, strict=True))
            asked.content = Content(lora=lora or b"", items=tuple(sorted(named)))
        self._spread()

    def _spread(self) -> None:
        """Takes requests out of the pool that have a name which turned out bad just now."""
        items, adapters = self._item_names.pop_spoilt(), self._adapter_names.pop_spoilt()
        for request_id, asked in self._asked.items() if items or adapters else ():
            is_bad = not adapters.isdisjoint(asked.names)
            is_bad |= not items.isdisjoint(item.name for item in asked.items)
            if is_bad and asked.content.may_share:
                asked.content = _BYPASS
                self._distrusted.append(request_id)

    def _warn_about(self, item: _Item, digest: bytes | None, *, is_late: bool) -> None:
        """Warns for the first time that an item is not trusted for a reason."""
        if digest is None:
            why = "late" if is_late else "elsewhere"
        elif item.name in self._item_names.spoilt:
            why = "two"
        elif self._item_names.is_full:
            why = "full"
        else:  # its name was warned of before
            return
        if why not in self._warned:
            self._warned.add(why)
            words = "images, sounds and videos: %s bypass the pool until this instance restarts"
            log.warning(words, _REASONS[why])


class Names:
    """Remembers, for the process's life, which content each name had.

    A client chooses names and contents. So both are hashed with a key that this process has alone:
    nobody can look for two that collide.

    spoilt: the names that are not trusted any more since the last `pop_spoilt`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._key = os.urandom(32)
        self._contents: dict[int, int] = {}
        self.spoilt: set[bytes] = set()

    @property
    def is_full(self) -> bool:
        return len(self._contents) >= self._most

    def trust(self, name: bytes, content: bytes | None) -> bool:
        """Returns whether a name has always had this content, and notes that it has it now.

        content: None if it is not known. The name is then never trusted again.
        Returns False for a new name if the table is full.
        """
        number = self._number(name)
        now = self._number(content) or 1 if content is not None else _DISTRUSTED
        known = self._contents.get(number)
        if known is None and self.is_full:
            return False
        if known is None:
            self._contents[number] = now
        elif known not in (now, _DISTRUSTED):
            self._contents[number] = now = _DISTRUSTED
            self.spoilt.add(name)
        return known in (None, now) and now != _DISTRUSTED

    def pop_spoilt(self) -> set[bytes]:
        """Returns and empties `spoilt`."""
        spoilt, self.spoilt = self.spoilt, set()
        return spoilt

    def _number(self, data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=self._key).digest(), "big")


@dataclass(frozen=True)
class _Item:
    """An image, sound or video of a request.

    name: the name in vLLM's caches of KV and of encoders' outputs.
    content_name: the name of its content, as vLLM or a client says.
    """

    offset: int
    length: int
    name: bytes
    content_name: bytes

    @classmethod
    def of_feature(cls, feature: Any) -> _Item:
        at, name = feature.mm_position, feature.identifier.encode()
        content_name = (getattr(feature, "mm_hash", None) or feature.identifier).encode()
        return cls(at.offset, at.length, b"item " + name, content_name)

    @property
    def is_of_adapter(self) -> bool:
        """True if the name has an adapter's name in it, because the encoder has that adapter."""
        return self.name != b"item " + self.content_name

    def named(self, digest: bytes | None) -> MultimodalItem:
        assert digest is not None, "an item without a digest is not trusted"
        return MultimodalItem(self.offset, self.length, digest + self.content_name)


@dataclass(eq=False)
class _Asked:
    """Questions to threads about one request, and their outcome.

    digests: of its items, in their order.
    adapter: of its LoRA adapter. path, names: of the adapter.
    deadline: when it stops to wait; None while vLLM does not wait for an answer.
    """

    items: list[_Item]
    digests: _Question[list[bytes | None]] | None = None
    adapter: _Question[bytes | None] | None = None
    path: str = ""
    names: list[bytes] = field(default_factory=list)
    content: Content = _UNKNOWN
    deadline: Deadline | None = None

    def questions(self) -> Iterator[_Question[Any]]:
        yield from (each for each in (self.digests, self.adapter) if each is not None)

    def is_outdated(self, fresh_s: float) -> bool:
        """Returns whether the adapter's files must be looked at again before vLLM computes.

        False while vLLM waits for such a look: its answer is taken whenever it comes.
        """
        if self.adapter is None or self.deadline is not None or self.content is _BYPASS:
            return False
        ended_at = self.adapter.ended_at
        return ended_at is not None and time.monotonic() - ended_at > fresh_s

    def have_ended(self, timeout_s: float) -> bool:
        """Waits for the answers; returns whether all are there."""
        end = Deadline(timeout_s)
        return all(each.has_ended.wait(end.remaining_s()) for each in self.questions())


class _Question(Generic[T]):
    """A function that a thread calls, and its answer; None if it failed or is not there yet."""

    def __init__(self, find: Callable[[], T]) -> None:
        self.has_ended = threading.Event()
        self.ended_at: float | None = None
        self.answer: T | None = None
        self._find: Callable[[], T] | None = find

    def drop(self) -> None:
        """Makes the thread skip the function if it has not begun."""
        self._find = None

    def run(self) -> None:
        find, self._find = self._find, None
        if find is not None:
            self.answer = find()
        self._end()

    def fail(self, error: Exception) -> None:
        log.warning("a digest of a request's content failed: %r", error)
        self._end()

    def _end(self) -> None:
        self.ended_at = time.monotonic()
        self.has_ended.set()


class _Thread:
    """A thread that answers questions one after the other. It starts with the first question."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._questions: SimpleQueue[_Question[Any] | None] = SimpleQueue()
        self._worker: Worker | None = None

    def ask(self, find: Callable[[], T]) -> _Question[T]:
        question = _Question(find)
        if self._worker is None:
            self._worker = Worker(self._name, self._questions.get)
        self._questions.put(question)
        return question

    def close(self) -> None:
        if self._worker is not None:
            self._questions.put(None)
            self._worker.join(1.0)


def _digests_of(digests: ItemDigests, features: Sequence[Any]) -> list[bytes | None]:
    """Returns a digest for each item; None for an item whose data is not at hand."""

    def digest_of(feature: Any) -> bytes | None:
        try:
            return digests.digest_of(feature)
        except NotAtHand as error:
            log.debug("%.80r: %s", feature.identifier, error)
            return None

    return [digest_of(feature) for feature in features]
