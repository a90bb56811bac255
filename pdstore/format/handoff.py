"""Hand-offs from P to D: their ids, markers and fields in P's answer, and the beats of P.

The client waits for P's answer. So the answer has only fields that P knows without asking a store
or reading a file: for example the prefix hash of the last block, how P's last save ended, and a
digest of the files of P's weights that a thread computed earlier.

While an instance saves hand-offs it stores a beat every BEAT_INTERVAL_S, to show that it is alive:
beat n under key n modulo NUM_BEAT_KEYS. It then removes all beats that are older than beat n - 1.
"""

# Decision: docs/decisions/011-markers.md
from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdstore.format.block import FLAG_MARKER, Header
from pdstore.format.keys import HASH_BYTES, HEX_ID, BlockKey, Json, Namespace, PromptKeys
from pdstore.telemetry.request_record import plain

_MAX_FIELDS = 64
_NAME = "pdstore"
_ID = "attempt"  # the name of the hand-off's id in `kv_transfer_params`
NUM_BEAT_KEYS = 4
BEAT_INTERVAL_S = 1.0
"""Seconds between two beats. Most hand-offs that are saved in less time cost no beat."""
BEAT_TIMEOUT_S = 1.35
"""Seconds without a beat after which an instance counts as dead."""
_MAX_ASK_INTERVAL_S = 0.6
"""Maximum time between two answers of the store that may count as an instance's silence."""


class HandoffId(NamedTuple):
    """The random 128-bit name of one hand-off; not a request's id, which may be used twice.

    instance: the random id of the instance that saves the hand-off; it is in the keys of that
      instance's beats (`beat_key`). None if the instance is not known or does not beat.
    last_save_failed: True if the instance could not store all of its last save. For such a hand-off
      it stores the marker `started`.
    """

    hex: str
    instance: str | None = None
    last_save_failed: bool = False

    @classmethod
    def new(cls, instance: str | None = None) -> HandoffId:
        """Returns a new random name for a hand-off that `instance` saves."""
        return cls(new_id(), instance)

    def started(self, namespace: Namespace) -> BlockKey:
        """Returns the key of the marker that P stores when it begins to save the prompt."""
        return BlockKey(f"pds1:{namespace.hex}:handoff:{self.hex}:0:started")

    def done(self, namespace: Namespace, shard: int) -> BlockKey:
        """Returns the key of the marker that P stores when a shard of the prompt is durable."""
        return BlockKey(f"pds1:{namespace.hex}:handoff:{self.hex}:{shard}:done")

    def stage_done(self, namespace: Namespace, shard: int, stage: int) -> BlockKey:
        """Returns the key of the marker that P stores when one stage of a shard is durable.

        Only P's own stages read this marker. A stage that finds those of all stages stores `done`.
        """
        return BlockKey(f"pds1:{namespace.hex}:handoff:{self.hex}:{shard}:stage{stage}")

    def failed(self, namespace: Namespace) -> BlockKey:
        """Returns the key of the marker that P stores when a shard will not be saved."""
        return BlockKey(f"pds1:{namespace.hex}:handoff:{self.hex}:0:failed")

    def started_marker(self, namespace: Namespace, num_shards: int, num_tokens: int) -> Header:
        """Returns the header to store under `started`; D reads from it the id of P's instance."""
        return HandoffId(self.instance or self.hex).marker(namespace, 0, num_shards, num_tokens)

    def instance_of(self, started: Header) -> str | None:
        """Returns the id of the instance that stored `started`; None if it stores no beats."""
        named = started.prefix_hash.hex()
        return None if named == self.hex else named

    def marker(self, namespace: Namespace, shard: int, num_shards: int, num_tokens: int) -> Header:
        """Returns the header that is the whole value of a `done`, `stage` or `failed` marker."""
        return Header(
            flags=FLAG_MARKER,
            group=0,
            shard=shard,
            num_shards=num_shards,
            num_tokens=num_tokens,
            payload_bytes=0,
            namespace=namespace.digest,
            prefix_hash=bytes.fromhex(self.hex),
        )


def new_id() -> str:
    """Returns a random 128-bit id in hex, for a hand-off or for an instance."""
    return secrets.token_hex(HASH_BYTES)


@dataclass(frozen=True)
class Handoff:
    """The content of `kv_transfer_params["pdstore"]`.

    P's answer has all fields that P knows. A router that asks P and D at once sends only the id.

    num_tokens: the number of tokens of P's prompt.
    namespace: P's namespace, as `Namespace.hex`.
    pool_id: the id of the pool that P saves to, in hex.
    fields: P's `Namespace.described`, with which D's log can name each difference.
    last_block: the prefix hash of the prompt's last block, in hex; it identifies the whole prompt.
    last_save: why P could not store all of its last save; then D waits for `started` as well.
      None if P stored all of it.
    weights_files: a digest of the files of P's weights; None unless P has PDSTORE_WEIGHTS.
    weights_update: a digest of P's weights, in hex; None unless they were written in place.
    is_exact: True if D can go on only after all of these tokens (`Continuation.is_exact`). A router
      with a prompt that is no longer than these tokens needs another hand-off.
    """

    id: HandoffId
    num_tokens: int | None = None
    namespace: str | None = None
    pool_id: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    last_block: str | None = None
    last_save: str | None = None
    weights_files: str | None = None
    weights_update: str | None = None
    is_exact: bool = False

    @classmethod
    def of(cls, params: Mapping[str, Json] | None) -> Handoff | None:
        """Returns the hand-off in a request's `kv_transfer_params`; None if they have none.

        Raises ValueError with the field's name for a malformed hand-off: clients may send anything.
        """
        given = (params or {}).get(_NAME)
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ValueError(f"kv_transfer_params.{_NAME} must be an object")
        if given.get(_ID) is None:
            raise ValueError(f"kv_transfer_params.{_NAME}.{_ID} is missing")

        def checked(name: str, rule: Callable[[Any], bool], must_be: str) -> Any:  # noqa: ANN401
            value = given.get(name)
            if value is not None and not rule(value):
                raise ValueError(f"kv_transfer_params.{_NAME}.{name} must be {must_be}")
            return value

        hexes = {
            name: checked(name, _is_hex, f"{2 * HASH_BYTES} lower-case hex digits")
            for name in (_ID, "instance", "namespace", "pool_id", "last_block", "weights_update")
        }
        texts = {
            name: plain(text) if (text := checked(name, _is_text, "a text")) is not None else None
            for name in ("last_save", "weights_files")
        }
        fields = checked("fields", _is_fields, "a small object of texts")
        return cls(
            id=HandoffId(hexes.pop(_ID), hexes.pop("instance")),
            num_tokens=checked("num_tokens", _is_count, "a count"),
            fields={
                plain(name): plain(text)
                for name, text in (fields or {}).items()
                if text is not None
            },
            is_exact=bool(checked("is_exact", _is_flag, "true or false")),
            **texts,
            **hexes,
        )

    def is_of(self, keys: PromptKeys) -> bool:
        """Returns whether P's prompt is the prompt of `keys`, as far as P's answer tells."""
        last = keys.hash_of(len(keys) - 1).hex() if len(keys) else None
        return self.num_tokens in (None, keys.num_tokens) and self.last_block in (None, last)

    def params(self) -> dict[str, Json]:
        """Returns `kv_transfer_params` that hold this hand-off."""
        params: dict[str, Json] = {
            _ID: self.id.hex,
            "instance": self.id.instance,
            "num_tokens": self.num_tokens,
            "namespace": self.namespace,
            "pool_id": self.pool_id,
            "fields": dict(self.fields) or None,
            "last_block": self.last_block,
            "last_save": self.last_save,
            "weights_files": self.weights_files,
            "weights_update": self.weights_update,
            "is_exact": self.is_exact or None,
        }
        return {_NAME: {name: value for name, value in params.items() if value is not None}}


@dataclass(frozen=True)
class TransferParams:
    """The parts of a request's `kv_transfer_params` that pdstore uses, parsed once a request.

    handoff: the hand-off in them, if there is one.
    asks_prefill: True if they ask this instance to hand the prompt off (`do_remote_decode`).
    keeps_last_token: True if D's prompt will go on behind this one, with P's token. So P's hand-off
      covers the whole prompt, also where D would else need the state before its last token.
    """

    handoff: Handoff | None = None
    asks_prefill: bool = False
    keeps_last_token: bool = False

    @classmethod
    def parse(cls, params: Mapping[str, Json] | TransferParams | None) -> TransferParams:
        """Returns a request's parsed `kv_transfer_params`; what is parsed already as it is.

        Raises ValueError as `Handoff.of` does.
        """
        if isinstance(params, TransferParams):
            return params
        given = params or {}
        return cls(
            Handoff.of(params),
            asks_prefill=given.get("do_remote_decode") is True,
            keeps_last_token=given.get("keeps_last_token") is True,
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_fields(value: object) -> bool:
    """Returns whether a value is a small flat object: what is nested may be too deep to print.

    A null in it counts as absent, as everywhere in a hand-off.
    """
    if not isinstance(value, Mapping) or len(value) > _MAX_FIELDS:
        return False
    return all(isinstance(name, str) for name in value) and all(
        text is None or isinstance(text, str) for text in value.values()
    )


def _is_hex(value: object) -> bool:
    return isinstance(value, str) and HEX_ID.fullmatch(value) is not None


def beat_key(namespace: Namespace, instance: str, number: int) -> BlockKey:
    """Returns the key of an instance's beat `number`; the instance's id has 32 hex digits."""
    return BlockKey(f"pds1:{namespace.hex}:handoff:{instance}:{number % NUM_BEAT_KEYS}:beat")


class Pulse:
    """Finds out from answers of the store whether another instance still beats.

    Only one thread may call it. `asked_at` is the time, by `clock`, at which the store was asked.

    instance: the other instance's id; None, which is never silent, if unknown or without beats.
    beat_keys: the keys of the instance's beats; the caller asks the store which of them are stored.
    """

    def __init__(
        self,
        namespace: Namespace,
        instance: str | None,
        *,
        timeout_s: float = BEAT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.beat_keys: list[BlockKey] = []
        if instance is not None:
            self.beat_keys = [beat_key(namespace, instance, n) for n in range(NUM_BEAT_KEYS)]
        self._timeout_s = timeout_s
        self._seen: set[BlockKey] = set()
        self._beat_at = self._asked_at = clock()

    def update(self, stored: AbstractSet[BlockKey], asked_at: float) -> None:
        """Compares the keys that are stored now with those that were stored at the last call.

        If any of the beat keys has come or gone, the instance has beaten. The beats that a dead
        instance left in the store never change. Time between two calls counts as the instance's
        silence only if it is at most 0.6 s.
        """
        seen = {key for key in self.beat_keys if key in stored}
        if seen != self._seen or asked_at - self._asked_at > _MAX_ASK_INTERVAL_S:
            self._beat_at = asked_at
        self._seen = seen
        self._asked_at = asked_at

    def add_beat(self, asked_at: float) -> None:
        """Counts one beat, because the instance has stored something else than a beat."""
        self._beat_at = max(self._beat_at, asked_at)

    def is_silent(self) -> bool:
        """Returns whether the last beat was over `timeout_s` old when the store was asked last."""
        return bool(self.beat_keys) and self._asked_at - self._beat_at > self._timeout_s
