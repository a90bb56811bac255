"""`pdstore explain`: says how much of a prompt a pool has, and why it has no more."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple, cast

from rich.console import RenderableType
from rich.text import Text

from pdstore.cli.answer import Answer, table
from pdstore.cli.listing import NamespaceUse, OpenPool, StoredKey, open_pool, survey
from pdstore.cli.output import age
from pdstore.cli.peers import losses_at
from pdstore.cli.prompts import Prompt
from pdstore.errors import BadValue, StoreError
from pdstore.format.keys import BlockKey, Json, Namespace, PromptKeys
from pdstore.store.base import Store, stored_among
from pdstore.store.optional import FindsKeys, StoredValue, num_evicted
from pdstore.store.tiers.promotion import Prospect, prospect_of

_ROWS = 12
_EMPTY = "this pool is empty: PDSTORE_STORE or --store must be the URL that P and D have"


class Cover(NamedTuple):
    """The blocks of one prompt in one namespace.

    blocks: for each block of the prompt, the parts of it that are stored.
    youngest_s: seconds since the last use of any value of the namespace; None if not known.
    how_gone: how a stored block may have gone from this pool, in words.
    drafts: for each draft model, the numbers of the blocks of which its KV is stored.
    tiers: for each block, the numbers of the tiers that have all its stored parts; empty for a pool
      of one store.
    promotions: for each block, whether the next load puts it into the first tier, in words; empty
      for a block that needs none or that no load reads, because an earlier one is missing.
    problems: which tiers did not answer, and why a purge forbids promotions.
    """

    keys: PromptKeys
    blocks: Sequence[Sequence[StoredValue]]
    youngest_s: float | None
    how_gone: str = "was evicted"
    drafts: Mapping[str, Collection[int]] = {}
    tiers: Sequence[Sequence[int]] = ()
    promotions: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def namespace(self) -> str:
        return self.keys.namespace.hex

    @property
    def num_parts(self) -> int:
        """The number of parts of a whole block, as far as the stored keys show."""
        return len(self.keys.namespace.parts)

    @property
    def num_run(self) -> int:
        """The number of leading blocks of which all parts are stored."""
        whole = takewhile(lambda parts: len(parts) == self.num_parts, self.blocks)
        return sum(1 for _ in whole)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the leading blocks of which all parts are stored."""
        return self.keys.end_of(self.num_run)

    def num_drafted(self, draft: str) -> int:
        """Returns the number of leading tokens, of those in whole blocks, with a draft's KV."""
        run = takewhile(self.drafts[draft].__contains__, range(self.num_run))
        return self.keys.end_of(sum(1 for _ in run))

    def why(self) -> str:
        """Returns why the whole leading blocks end where they do."""
        gap = self.num_run
        if gap == len(self.blocks):
            return "all of it is there"
        name = f"block {gap}"
        if self.blocks[gap]:
            return (
                f"{name} has {len(self.blocks[gap])} of {self.num_parts} parts: a rank of P did not"
                f" save its own, or it {self.how_gone}"
            )
        if any(self.blocks[gap:]):
            return (
                f"{name} is missing and later ones are there: it {self.how_gone}, or was damaged"
                " and removed"
            )
        if self.keys.tokens_of(gap) < self.keys.block_tokens:
            return (
                f"the tail of {self.keys.tokens_of(gap)} tokens is missing: P saved no prompt that"
                " ends there, or did so longer than PDSTORE_HANDOFF_TTL_S ago"
            )
        if gap:
            return (
                f"{name} was never saved, because the prompts differ from there on, or it"
                f" {self.how_gone}"
            )
        return (
            "not even the first block is there: P did not save this prompt here, or with other"
            f" token ids, salt or LoRA, or it {self.how_gone}; the namespace was used"
            f" {age(self.youngest_s)} ago"
        )


def cover_of(
    keys: PromptKeys,
    stored: Mapping[BlockKey, StoredValue],
    use: NamespaceUse,
    how_gone: str = "was evicted",
) -> Cover:
    """Returns which blocks of a prompt are stored. how_gone: as in `Cover`."""
    blocks = []
    for number in range(len(keys)):
        names = keys.store_keys(keys.namespace.parts, number, number + 1)
        blocks.append([stored[name] for name in names if name in stored])
    return Cover(keys, blocks, use.youngest_s, how_gone, _drafts_of(keys, stored, use))


def _drafts_of(
    keys: PromptKeys, stored: Mapping[BlockKey, StoredValue], use: NamespaceUse
) -> dict[str, set[int]]:
    """Returns, for each draft model, the blocks of a prompt that have its KV in the store."""
    numbers = {keys.hash_of(number).hex(): number for number in range(len(keys))}
    drafts: dict[str, set[int]] = {name: set() for name in use.drafts}
    for key in map(StoredKey.parsed, stored) if drafts else ():
        if key is not None and key.draft in drafts and key.namespace == use.hex:
            number = numbers.get(key.name)
            if number is not None:
                drafts[key.draft].add(number)
    return drafts


def how_gone(store: Store) -> str:
    """Returns why a block that was stored may be missing: it has expired, or it was evicted."""
    if not store.expires_blocks:
        return "was evicted"
    expired = "has expired (nothing used it for PDSTORE_BLOCK_TTL_S of the instance that saved it)"
    if num_evicted(store) == 0:
        return f"{expired}: this server has evicted nothing"
    return f"{expired} or was evicted"


def explain(
    url: str | None,
    prompt: str | None = None,
    model: str | None = None,
    ids: str | None = None,
    chat: str | None = None,
    namespace: str = "",
    cache_salt: str = "",
    peers: Sequence[str] = (),
) -> Answer:
    """Compares a prompt's keys with the stored values. Status 1 unless the whole prompt is stored.

    All namespaces of the pool are tried, because P may have saved the prompt in another than D's.

    prompt, model, ids, chat: as the fields of `Prompt`.
    namespace: first digits of the namespace to look in; empty takes the namespace that has most of
      the prompt.
    peers: URLs of the status pages of instances, whose requests that lost what they had found are
      told: what is in the pool now need not be what it had when a request was served.
    Raises ConfigError for an invalid prompt or a URL without such a page, and StoreError.
    """
    token_ids = Prompt(prompt, model, ids, chat).token_ids()
    with open_pool(url) as pool:
        label = pool.store.label
        stored = {value.key: value for value in pool.listed_values()}
        gone = how_gone(pool.store)
        covers = []
        for namespace_use in survey(stored.values()):
            keys = _keys_of(pool, namespace_use, cache_salt).extend(token_ids)
            covers.append(cover_of(keys, stored, namespace_use, gone))
        named = [cover for cover in covers if cover.namespace.startswith(namespace)]
        best = max(named, key=lambda c: (c.num_tokens, sum(map(len, c.blocks))), default=None)
        names = _tier_names(pool.tiers)
        meant = _placed(best, pool.tiers, names) if best is not None else None
        silent = [*pool.silent.values()]
    if meant is None:
        why = "this pool has no such namespace" if namespace else _EMPTY
        return _with_losses(_nothing_found(label, len(token_ids), why, silent), peers)
    meant = meant._replace(problems=[*silent, *meant.problems])
    answer = _answer(label, meant, [cover for cover in covers if cover is not best], names)
    return _with_losses(answer, peers)


def _nothing_found(label: str, num_tokens: int, why: str, silent: Sequence[str]) -> Answer:
    document: Json = {
        "store": label,
        "prompt_tokens": num_tokens,
        "found_tokens": 0,
        "why": why,
        "problems": [*silent],
    }
    shown: list[RenderableType] = [f"0 of {num_tokens:,} tokens: {why} ({label})", *silent]
    return Answer(document, shown, status=1)


def _placed(cover: Cover, tiers: Sequence[Store], names: Sequence[str]) -> Cover:
    """Adds where the blocks are in several tiers, and whether the next load promotes them."""
    if len(tiers) == 1:
        return cover
    cover = cover._replace(tiers=_tiers_of_blocks(tiers, cover.blocks))
    promotions = [""] * len(cover.blocks)
    problems: list[str] = []
    for number, tier in enumerate(tiers[1:], start=1):
        here = [i for i in range(cover.num_run) if [*cover.tiers[i][:1]] == [number]]
        parts = [part for i in here for part in cover.blocks[i]]
        keys = [part.key for part in parts]
        prospect = None
        with contextlib.suppress(StoreError):  # of a tier that fails nothing is known
            prospect = prospect_of(tiers[0], tier, keys, [part.num_bytes for part in parts])
        if parts and prospect is not None:
            for i in here:
                promotions[i] = _said_of(prospect, names[0])
            problems += [prospect.forbidden] if prospect.forbidden else []
    return cover._replace(promotions=promotions, problems=problems)


def _said_of(prospect: Prospect, first: str) -> str:
    if prospect.forbidden:
        return "not promoted, because of a purge"
    if prospect.oldest_s is None:
        return "promoted at the next load"
    oldest = f"the oldest block of {first}, unused for {age(prospect.oldest_s)}"
    return f"promoted at the next load if it is worth more than {oldest}"


def _tiers_of_blocks(
    tiers: Sequence[Store], blocks: Sequence[Sequence[StoredValue]]
) -> list[list[int]]:
    """Returns for each block the numbers of the tiers that have all its stored parts.

    A tier that fails, or that cannot be searched, has nothing.
    """
    keys = [part.key for parts in blocks for part in parts]
    found: list[list[int]] = [[] for _ in blocks]
    for number, tier in enumerate(tiers):
        finder = tier.optional(FindsKeys)
        has: set[BlockKey] = set()
        with contextlib.suppress(StoreError):
            has = stored_among(finder.which_stored(keys), keys, tier) if finder and keys else has
        for block, parts in enumerate(blocks):
            if parts and has.issuperset(part.key for part in parts):
                found[block].append(number)
    return found


def _tier_names(tiers: Sequence[Store]) -> list[str]:
    """Returns what each tier is called: its scheme, or its label if two have the same scheme."""
    schemes = [f"{tier.label.partition('://')[0]}://" for tier in tiers]
    if len(set(schemes)) == len(schemes):
        return schemes
    return [tier.label for tier in tiers]


def _places_of(cover: Cover, names: Sequence[str]) -> list[str]:
    """Returns in which tiers the blocks are, by runs: `blocks 0-11: in shm://`."""
    shown = []
    first = 0
    places = zip(cover.tiers, cover.promotions, strict=True)
    for (numbers, promotion), run in groupby(places):
        last = first + sum(1 for _ in run) - 1
        what = f"block {first}" if first == last else f"blocks {first}-{last}"
        if numbers:
            place = " and ".join(names[number] for number in numbers)
            shown.append(", ".join(filter(None, [f"{what}: in {place}", promotion])))
        elif any(cover.blocks[first : last + 1]):
            shown.append(f"{what}: in no tier whole")
        first = last + 1
    return shown


def _keys_of(pool: OpenPool, use: NamespaceUse, cache_salt: str) -> PromptKeys:
    """Returns the keys of an empty prompt in a namespace.

    The block size is taken from a block that is stored; if none is stored, from the settings.
    """
    header = None
    with contextlib.suppress(BadValue):
        header = pool.read(use.sample.key) if use.sample else None
    num_told = header.num_tokens if header else 0  # a value in a pool may say 0
    parts = tuple(sorted(use.parts))
    block_tokens = num_told or pool.settings.block_tokens
    namespace = Namespace({}, parts, block_tokens, digest=bytes.fromhex(use.hex))
    return PromptKeys(namespace, cache_salt=cache_salt.encode())


def _answer(label: str, meant: Cover, others: Sequence[Cover], tier_names: Sequence[str]) -> Answer:
    elsewhere: dict[str, Json] = {c.namespace: c.num_tokens for c in others if c.num_tokens}
    blocks = [_block(meant, number) for number in range(len(meant.blocks))]
    document: Json = {
        "store": label,
        "namespace": meant.namespace,
        "block_tokens": meant.keys.block_tokens,
        "prompt_tokens": meant.keys.num_tokens,
        "found_tokens": meant.num_tokens,
        "why": meant.why(),
        "blocks": [*blocks],
        "tiers": [*tier_names] if meant.tiers else [],
        "problems": [*meant.problems],
        "drafts": {draft: meant.num_drafted(draft) for draft in meant.drafts},
        "other_namespaces": elsewhere,
    }
    # show only blocks near the first missing block: all others look alike
    begin = max(0, min(meant.num_run - _ROWS // 2, len(blocks) - _ROWS))
    rows = [_row(block, meant.num_parts) for block in blocks[begin : begin + _ROWS]]
    title = f"{meant.num_tokens:,} of {meant.keys.num_tokens:,} tokens in namespace"
    shown: list[RenderableType] = [
        Text(f"{title} {meant.namespace[:12]} of {label}", "bold"),
        table(["block", "tokens", "hash", "parts", ">used"], rows),
        f"→ {meant.why()}",
    ]
    if places := _places_of(meant, tier_names):
        shown.append(f"→ {'; '.join(places)}")
    shown += [f"→ {problem}" for problem in meant.problems]
    shown += [
        f"→ the KV of draft model {draft} is there of {num:,} of these tokens; without it, an"
        " instance with this draft model has fewer of its drafted tokens accepted"
        for draft in meant.drafts
        if (num := meant.num_drafted(draft)) < meant.num_tokens
    ]
    for name, tokens in elsewhere.items():
        shown.append(
            f"→ namespace {name[:12]} has {tokens} tokens of the same prompt: if P and D should"
            " agree, `pdstore doctor --peer P --peer D` names the fields that differ"
        )
    return Answer(document, shown, status=int(meant.num_tokens < meant.keys.num_tokens))


def _with_losses(answer: Answer, peers: Sequence[str]) -> Answer:
    """Adds what the last requests of these instances have lost."""
    losses: dict[str, Json] = {peer: [*losses_at(peer)] for peer in peers}
    if not losses:
        return answer
    told = [f"→ {peer}: {each}" for peer in peers for each in cast("list[str]", losses[peer])]
    document = {**cast("dict[str, Json]", answer.document), "losses": losses}
    return Answer(document, [*answer.shown, *told], answer.status)


def _block(cover: Cover, number: int) -> dict[str, Any]:
    ages = [part.age_s for part in cover.blocks[number] if part.age_s is not None]
    return {
        "number": number,
        "first_token": number * cover.keys.block_tokens,
        "num_tokens": cover.keys.tokens_of(number),
        "hash": cover.keys.hash_of(number).hex(),
        "num_parts": len(cover.blocks[number]),
        "tiers": list(cover.tiers[number]) if cover.tiers else [],
        "promotion": (cover.promotions[number] if cover.promotions else "") or None,
        "age_s": max(ages, default=None),
    }


def _row(block: dict[str, Any], num_parts: int) -> list[RenderableType]:
    first = block["first_token"]
    num_tokens = block["num_tokens"]
    colour = "green" if block["num_parts"] == num_parts else "red"
    return [
        str(block["number"]),
        f"{first}-{first + num_tokens - 1}",
        block["hash"][:12],
        Text(f"{block['num_parts']} of {num_parts}", colour),
        age(block["age_s"]),
    ]
