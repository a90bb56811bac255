"""Instances that draft tokens, and the share of their drafts that is accepted.

    with drafting(launcher, eagle(directory), f"file://{directory}/pool") as instances:
        p, d = instances.start("p", "prefill"), instances.start("d", "decode")
        plain = instances.start("plain", "decode", drafts=())
        instances.wait_ready()
        behind_p, one = relayed(p, d, prompts), by_itself(d, prompts)
        assert behind_p.ids == one.ids
        assert abs(behind_p.rate - one.rate) <= 0.02

`drafts` are the options that make an instance draft; `other_eagle` gives those of another draft
model for the same target. `COLD` makes a D load everything but its draft model's KV.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.adapters.vllm.asking import Answer, Since, alone, ask, at_once, new_prompt, prefill
from tests.adapters.vllm.conftest import switched_on
from tests.adapters.vllm.servers import Launcher, Server
from tests.support.vllm_draft import make_eagle, make_mtp, make_target

COLD = "--worker-cls=tests.support.vllm_cold_drafts.ColdDraftsWorker"
FIRST_S = 240.0  # for a first answer, while kernels compile on a busy machine
NUM_NEW = 24  # tokens of an answer: most of what they attend to is still the prompt
LENGTHS = (63, 64, 65, 150, 200, 255, 256, 257, 300, 900)  # around the ends of blocks and of chunks


@dataclass(frozen=True)
class Model:
    """A target's checkpoint, the options that it needs, and those that make it draft."""

    path: Path
    drafts: tuple[str, ...]
    options: tuple[str, ...] = ()


def _speculative(**config: str | int) -> tuple[str, ...]:
    return (f"--speculative-config={json.dumps(config)}",)


def eagle(directory: Path, num_drafted: int = 2, **config: int) -> Model:
    """Makes a Llama and its EAGLE draft model, whose speculative configuration has more fields."""
    target = make_target(directory / "llama")
    drafts = other_eagle(target, directory / "eagle", 0, num_drafted=num_drafted, **config)
    return Model(target, drafts)


def other_eagle(
    target: Path, directory: Path, seed: int = 1, *, num_drafted: int = 2, **config: int
) -> tuple[str, ...]:
    """Makes one more draft model of a target; returns the options of an instance that has it."""
    draft = str(make_eagle(target, directory, seed))
    config["num_speculative_tokens"] = num_drafted
    return _speculative(method="eagle", model=draft, **config)


def mtp(directory: Path) -> Model:
    """Makes a DeepSeek-V3 with a layer that predicts one token more (MTP)."""
    mla = ("--block-size=16", "--num-gpu-blocks-override=512", "--attention-backend=CPU_MLA")
    whole = "--max-num-batched-tokens=2048"  # with MTP vLLM begins no longer prompt of MLA
    drafts = _speculative(method="mtp", num_speculative_tokens=1)
    return Model(make_mtp(directory / "mtp"), drafts, (*mla, whole))


@dataclass
class Instances:
    """Instances of one model over one pool."""

    launcher: Launcher
    model: Model
    store: str
    servers: list[Server] = field(default_factory=list)

    def start(
        self, name: str, role: str, *more: str, drafts: Sequence[str] | None = None, **env: str
    ) -> Server:
        """Starts one; it drafts as the model does, or with these options, or with () not at all."""
        drafts = self.model.drafts if drafts is None else drafts
        given = switched_on(self.store, role) | env
        options = (*self.model.options, *drafts, *more)
        name = f"{self.model.path.name}-{name}"
        server = self.launcher.vllm(name, self.model.path, *options, env=given)
        self.servers.append(server)
        return server

    def wait_ready(self) -> None:
        """Waits until all have answered once: some kernels compile at a first prompt."""
        at_once([server.wait_ready for server in self.servers])
        first = partial(alone, timeout_s=FIRST_S)
        at_once([partial(first, server, new_prompt(40)) for server in self.servers])


@contextlib.contextmanager
def drafting(launcher: Launcher, model: Model, store: str) -> Iterator[Instances]:
    """Yields instances that are stopped at the end."""
    made = Instances(launcher, model, store)
    try:
        yield made
    finally:
        at_once([server.stop for server in made.servers])


@dataclass
class Answers:
    """What an instance has answered to some prompts, and what it has counted meanwhile.

    computed, loaded: tokens of the prompts; cold: the loaded ones without the draft model's KV.
    drafted, accepted: tokens of drafts.
    """

    answers: list[Answer] = field(default_factory=list)
    computed: float = 0.0
    loaded: float = 0.0
    cold: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0

    @property
    def ids(self) -> list[list[int]]:
        return [answer.ids for answer in self.answers]

    @property
    def rate(self) -> float:
        """The accepted share of the drafted tokens; there must be some."""
        return self.accepted / self.drafted

    def add(self, server: Server, ask_it: Callable[[], Answer]) -> None:
        """Asks, and adds what the server has counted.

        A step that computes one token of a prompt gets as many placeholders as an instance drafts
        tokens, so that all of vLLM's steps are of one size. vLLM counts them as drafted; they are
        never accepted, and are left out here.
        """
        since = Since(server)
        self.answers.append(ask_it())
        counts = since.all()
        computed = counts.get("vllm:prompt_tokens_by_source_total:local_compute", 0.0)
        self.computed += computed
        self.loaded += counts.get("pdstore_tokens_total:loaded", 0.0)
        self.cold += counts.get("pdstore_tokens_total:cold", 0.0)
        self.accepted += counts.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
        num_tokens = counts.get("vllm:spec_decode_num_draft_tokens_total", 0.0)
        if num_tokens and computed <= 1:
            num_tokens -= num_tokens / counts["vllm:spec_decode_num_drafts_total"]
        self.drafted += num_tokens


def relayed(p: Server, d: Server, prompts: Sequence[Sequence[int]]) -> Answers:
    """Returns what D answers behind P, prompt by prompt."""
    given = Answers()
    for prompt in prompts:
        params = prefill(p, prompt)
        given.add(d, partial(ask, d, prompt, NUM_NEW, kv_transfer_params=params))
    return given


def by_itself(server: Server, prompts: Sequence[Sequence[int]]) -> Answers:
    """Returns what one instance answers alone."""
    given = Answers()
    for prompt in prompts:
        given.add(server, partial(alone, server, prompt, NUM_NEW))
    return given
