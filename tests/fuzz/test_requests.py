"""Whatever a client or a user writes: it is understood, or refused by an error of our own.

And whatever an engine computes of prompts that share prefixes: what is saved can be found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import strategies as st

from pdstore import EngineRequest, PrefixCacheManager, SavePlan, Store
from pdstore.errors import ConfigError
from pdstore.format.handoff import Handoff
from pdstore.format.keys import BlockKey, Namespace, Part, PromptKeys
from pdstore.scheduler.lookup import find
from pdstore.settings import Settings, read_settings, variable_of
from pdstore.store import open_store
from pdstore.store.memory import MemoryStore
from pdstore.store.optional import FindsKeys
from pdstore.store.seal import read_seal_keys
from pdstore.store.url import StoreURL, without_secret
from pdstore.store.wrappers import WrapperStore
from pdstore.testing.values import put
from tests.fuzz.search import attempted, num_examples, search
from tests.support.kv import eventually

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.text("0123456789abcdef", min_size=32, max_size=32)
)
FIELDS = st.sampled_from(["attempt", "num_tokens", "namespace", "pool_id", "fields", "other"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=9), inner)
    ),
    max_leaves=12,
)
NAMESPACE = Namespace({"format": 1, "weights": "w", "salt": "s"}, (Part(0, 0),), 64)


@num_examples
def test_kv_transfer_params_are_a_hand_off_or_a_value_error(num_examples: int) -> None:
    def check(said: object) -> None:
        handoff, refusal = attempted(lambda: Handoff.of({"pdstore": said}), ValueError)
        assert not refusal or ("kv_transfer_params.pdstore" in refusal and len(refusal) < 200)
        if handoff is not None:
            assert Handoff.of(handoff.params()) == handoff
            lines = NAMESPACE.differences(handoff.fields)
            assert all(line.isprintable() and len(line) < 400 for line in lines)
            json.dumps(handoff.params(), allow_nan=False)

    search(num_examples, check, said=JSON | st.dictionaries(FIELDS, JSON))


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
SCHEMES = ["redis", "rediss", "redis+unix", "memory", "mooncake", "http", "faulty+memory", ""]
PARTS = TEXTS | st.text("/?#@:%&=[]0123456789.", max_size=12)
URLS = st.builds("{}://{}{}".format, st.sampled_from(SCHEMES), PARTS, PARTS) | PARTS


@pytest.fixture
def settings() -> Settings:
    return read_settings(store="memory://")


@num_examples
def test_a_store_url_opens_or_is_a_config_error(num_examples: int, settings: Settings) -> None:
    """Only schemes that make no file; the others share the parser."""

    def check(url: str) -> None:
        store, _ = attempted(lambda: open_store(url, settings), ConfigError)
        if store is not None:
            store.close()

    check("mooncake://\x80")
    search(num_examples, check, url=URLS)


@num_examples
def test_no_message_about_a_url_shows_its_password(num_examples: int, settings: Settings) -> None:
    def check(scheme: str, before: str, after: str) -> None:
        url = f"{scheme}://u:{before}hushhush{after}@host:1/{after}"
        parsed, refusal = attempted(lambda: StoreURL.of(url), ConfigError)
        said = [without_secret(url), refusal]
        said += [parsed.label, repr(parsed)] if parsed is not None else []
        store, refusal = attempted(lambda: open_store(url, settings), ConfigError)
        said += [refusal, repr(store), store.label if store is not None else ""]
        assert not any("hushhush" in text for text in said)

    words = st.text("/?#@:%[]a1", max_size=5)
    schemes = st.sampled_from(["redis", "rediss", "redis+unix", "mooncake", "http", "Re dis"])
    search(num_examples, check, scheme=schemes, before=words, after=words)


@num_examples
def test_a_setting_is_taken_or_is_a_config_error_with_its_name(
    num_examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    likely = st.sampled_from(["", "0", "1", "-1", "nan", "inf", "1e400", "1GiB", "9" * 400, "auto"])

    shown_in_any_case = repr(read_settings(salt="a salt"))

    def check(field: str, text: str) -> None:
        variable = variable_of(field)
        with monkeypatch.context() as environment:
            environment.setenv(variable, text)
            settings, refusal = attempted(read_settings, ConfigError)
        assert settings is not None or (variable in refusal and len(refusal) < 4000)
        if field in ("salt", "store") and text not in shown_in_any_case:
            assert text not in repr(settings)

    fields = st.sampled_from(list(Settings.model_fields))
    search(num_examples, check, field=fields, text=TEXTS | likely)


@num_examples
def test_a_key_file_has_keys_or_is_a_config_error(num_examples: int, tmp_path: Path) -> None:
    path = tmp_path / "seal.key"
    path.touch(0o600)
    line = st.binary(max_size=70) | st.text("0123456789abcdefABCDEF", max_size=66).map(str.encode)

    def check(lines: list[bytes]) -> None:
        path.write_bytes(b"\n".join(lines))
        keys, refusal = attempted(lambda: read_seal_keys(path), ConfigError)
        assert len(refusal) < 400
        assert keys is None or ({len(key) for key in keys} == {32} and len(keys) <= 2)

    search(num_examples, check, lines=st.lists(line, max_size=4))


STATE, WHOLE, WINDOW = 0, 1, 2
NEEDS = {STATE: 1, WINDOW: 100}


def namespace_of(*groups: int, num_shards: int = 1) -> Namespace:
    return Namespace(
        {"groups": [*groups], "shards": num_shards},
        tuple(Part(group, shard) for shard in range(num_shards) for group in groups),
        64,
        num_shards,
        needs={group: NEEDS[group] for group in groups if group in NEEDS},
        states=frozenset({STATE} & {*groups}),
    )


MODELS = [
    namespace_of(WHOLE),
    namespace_of(WHOLE, WINDOW),
    namespace_of(STATE, WHOLE, num_shards=2),
    namespace_of(STATE, WHOLE, WINDOW),
    namespace_of(STATE),
]
LENGTHS = st.integers(1, 400)
ENDS = st.sets(st.sampled_from(range(64, 512, 64)) | LENGTHS, max_size=6)


class CannotSearch(WrapperStore):
    def optional(self, protocol: type) -> object:
        return None if protocol is FindsKeys else super().optional(protocol)


def names_of(keys: PromptKeys, ends: set[int], first_block: int = 0) -> list[BlockKey]:
    """Returns the keys of a prompt's values, if it has a state after so many tokens."""
    return [
        key
        for part in keys.namespace.parts
        for number, key in enumerate(keys.store_keys([part], first_block), first_block)
        if part.group != STATE or keys.end_of(number + 1) in ends
    ]


def store_all(store: Store, names: Sequence[BlockKey]) -> None:
    if names:
        put(store, names, [b"x"] * len(names))


def can_go_on(keys: PromptKeys, num_blocks: int, names: set[BlockKey]) -> bool:
    """The definition: all that each KV group needs there is stored."""
    continuation, end = keys.namespace.continuation, keys.end_of(num_blocks)
    return all(
        keys.store_keys([part], block, block + 1)[0] in names
        for part in keys.namespace.parts
        for block in continuation.blocks(part.group, end)
    )


def in_common(keys: PromptKeys, names: set[BlockKey]) -> int:
    """The tokens of the leading full blocks whose layers that need all tokens are stored."""
    whole = [part for part in keys.namespace.parts if part.group == WHOLE]
    num_blocks = keys.num_tokens // 64 if whole else 0
    stored = [names.issuperset(keys.store_keys(whole, n, n + 1)) for n in range(num_blocks)]
    return 64 * next((n for n, is_there in enumerate(stored) if not is_there), num_blocks)


@num_examples
def test_a_lookup_finds_the_last_end_at_which_an_engine_can_go_on(num_examples: int) -> None:
    def check(model: Namespace, length: int, ends: set[int], gaps: set[int], knows: bool) -> None:
        keys = PromptKeys(model).extend(range(length))
        names = names_of(keys, ends | {length})
        names = [name for n, name in enumerate(names) if n % 100 not in gaps]
        store = MemoryStore()
        store_all(store, names)
        found = find(store if knows else CannotSearch(store), keys)
        usable = [n for n in range(1, len(keys) + 1) if can_go_on(keys, n, {*names})]
        assert found.num_tokens in {0, *map(keys.end_of, usable)}
        if model.states:
            assert found.num_tokens == keys.end_of(max(usable, default=0)), "7 blocks at most"
            assert found.reason is None or found.num_shared == in_common(keys, {*names})

    gaps = st.sets(st.integers(0, 40), max_size=4)
    drawn = {"length": LENGTHS, "ends": ENDS, "gaps": gaps, "knows": st.booleans()}
    search(num_examples, check, model=st.sampled_from(MODELS), **drawn)


class Drawn(NamedTuple):
    """A request: its prompt begins as the one before it does. It may be preempted once."""

    num_shared: int
    num_new: int
    stops: set[int]
    ends: set[int]
    is_prefill: bool
    num_before_preemption: int
    answer_stop: int


class Engine:
    """Computes drawn requests of one model, and stores what they plan to save at once."""

    def __init__(self, store: Store, model: Namespace, settings: Settings) -> None:
        self.store, self.settings, self.has_states = store, settings, bool(model.states)
        self.cache = PrefixCacheManager(settings, model, store=store)

    def run(self, drawn: Drawn, tokens: list[int]) -> None:
        params = {"do_remote_decode": drawn.is_prefill}
        request = EngineRequest(self.cache, self.settings, self.cache.keys(tokens), params)
        eventually(request.poll)
        present = request.find(0, len(tokens))
        assert present <= len(tokens) - self.has_states
        assert request.junction % 64 == 0
        start = min(present, len(tokens) - 1)
        stops = [*sorted(stop for stop in drawn.stops if start < stop < len(tokens)), len(tokens)]
        published = self._compute(request, start, stops[: drawn.num_before_preemption], drawn.ends)
        published += self._compute(request, start, stops, drawn.ends)
        published += self._save_answer(request, drawn, tokens)
        assert published == [request.handoff] * (request.end() is None and drawn.is_prefill)

    def _compute(
        self, request: EngineRequest, start: int, stops: list[int], ends: set[int]
    ) -> list[object]:
        plans = []
        for stop in stops:
            request.begin_step(start, stop)
            left = {end for end in ends if start < end <= stop}
            plan = request.plan_save(start, stop, left)
            if plan is not None:
                self._store(plan, left)
                plans.append(plan)
            if self.has_states and request.handoff is None:
                kept = {end for end in left if end % 64 == 0}
                assert all(self._finds(request.keys.prefix(end)) for end in kept)
            start = stop
        return [plan.handoff for plan in plans if plan.handoff is not None]

    def _save_answer(self, request: EngineRequest, drawn: Drawn, tokens: list[int]) -> list[object]:
        """Also publishes a hand-off whose end is the last state that the answer has left."""
        request.end_prompt()
        assert request.is_settled
        stop = len(tokens) + drawn.answer_stop
        plan = request.plan_answer_save(stop, [*tokens, *range(drawn.answer_stop)])
        if plan is None:
            return []
        assert stop % 64 == 0 or not self.has_states
        self._store(plan, {plan.keys.num_tokens})
        return [plan.handoff] if plan.handoff is not None else []

    def _store(self, plan: SavePlan, left: set[int]) -> None:
        """Stores what a worker stores, and asserts that a lookup finds it then."""
        left = {end for end in left if plan.first_token < end}
        store_all(self.store, names_of(plan.keys, left, plan.first_token // 64))
        if plan.handoff is not None or not plan.is_awaited:
            assert self._finds(plan.keys)

    def _finds(self, keys: PromptKeys) -> bool:
        return find(self.store, keys).num_tokens == keys.num_tokens


@num_examples
def test_what_a_request_saves_can_be_found_up_to_its_end(num_examples: int) -> None:
    settings = read_settings(store="memory://", load="always")

    def check(model: Namespace, requests: list[Drawn]) -> None:
        store, tokens = MemoryStore(), []
        engine = Engine(store, model, settings)
        try:
            for number, drawn in enumerate(requests, 1):
                first = 1000 * number
                tokens = [*tokens[: drawn.num_shared], *range(first, first + drawn.num_new)]
                engine.run(drawn, tokens)
        finally:
            engine.cache.close()

    request = st.builds(
        Drawn,
        num_shared=LENGTHS,
        num_new=st.integers(1, 100),
        stops=st.sets(LENGTHS, max_size=5),
        ends=ENDS,
        is_prefill=st.booleans(),
        num_before_preemption=st.integers(0, 3),
        answer_stop=st.integers(0, 130),
    )
    requests = st.lists(request, min_size=1, max_size=3)
    search(num_examples, check, model=st.sampled_from(MODELS), requests=requests)
