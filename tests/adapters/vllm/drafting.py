"""Instances that draft tokens, and the share of their drafts that is accepted.

    with drafting(launcher, eagle(directory), f"file://{directory}/pool") as instances:
        p, d = instances.start("p", "prefill"), instances.start("d", "decode")
        plain = instances.start("plain", "decode", drafts=())
        instances.wait_ready()
        relayed, by_itself = answers(p, d)

`drafts` are the options that make an instance draft; `other_eagle` gives those of another draft
model for the same target. `COLD` makes a D load everything but its draft model's KV.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.adapters.vllm.asking import Answer, Since, alone, ask, at_once, new_prompt, prefill
from tests.adapters.vllm.conftest import switched_on
from tests.adapters.vllm.servers import Launcher, Server
from tests.support.vllm_draft import make_eagle, make_mtp, make_target

COLD = "--worker-cls=tests.support.vllm_cold_drafts.ColdDraftsWorker"
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


def eagle(directory: Path, num_drafted: int = 2) -> Model:
    """Makes a Llama and its EAGLE draft model."""
    target = make_target(directory / "llama")
    return Model(target, other_eagle(target, directory / "eagle", seed=0, num_drafted=num_drafted))


def other_eagle(
    target: Path, directory: Path, seed: int = 1, num_drafted: int = 2
) -> tuple[str, ...]:
    """Makes one more draft model of a target; returns the options of an instance that has it."""
    draft = make_eagle(target, directory, seed)
    return _speculative(method="eagle", model=str(draft), num_speculative_tokens=num_drafted)


def mtp(directory: Path) -> Model:
    """Makes a DeepSeek-V3 with a layer that predicts one token more (MTP)."""
    mla = ("--block-size=16", "--num-gpu-blocks-override=512", "--attention-backend=CPU_MLA")
    drafts = _speculative(method="mtp", num_speculative_tokens=1)
    return Model(make_mtp(directory / "mtp"), drafts, mla)


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
        at_once([partial(alone, server, new_prompt(40)) for server in self.servers])


@contextlib.contextmanager
def drafting(launcher: Launcher, model: Model, store: str) -> Iterator[Instances]:
    """Yields instances that are stopped at the end."""
    made = Instances(launcher, model, store)
    try:
        yield made
    finally:
        at_once([server.stop for server in made.servers])


class Acceptance:
    """Counts the tokens that an instance drafts, and how many of them its target accepts."""

    def __init__(self, server: Server) -> None:
        self._since = Since(server)

    @property
    def drafted(self) -> int:
        return int(self._since["vllm:spec_decode_num_draft_tokens_total"])

    @property
    def rate(self) -> float:
        """The accepted share of the drafted tokens; there must be some."""
        counts = self._since.all()
        accepted = counts.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
        return accepted / counts["vllm:spec_decode_num_draft_tokens_total"]


@dataclass(frozen=True)
class Answers:
    """What an instance has answered to some prompts."""

    answers: list[Answer]
    rate: float | None  # of its drafts; None if it drafts nothing
    computed: float  # of the prompts' tokens
    loaded: float

    @property
    def ids(self) -> list[list[int]]:
        return [answer.ids for answer in self.answers]


def _counted(server: Server, answers: Iterator[Answer]) -> Answers:
    since, acceptance = Since(server), Acceptance(server)
    given = list(answers)
    rate = acceptance.rate if acceptance.drafted else None
    return Answers(given, rate, since.computed, since.loaded)


def relayed(p: Server, d: Server, prompts: Sequence[Sequence[int]]) -> Answers:
    """Returns what D answers behind P, prompt by prompt."""
    handed = [(prompt, prefill(p, prompt)) for prompt in prompts]
    return _counted(
        d, (ask(d, prompt, NUM_NEW, kv_transfer_params=params) for prompt, params in handed)
    )


def by_itself(server: Server, prompts: Sequence[Sequence[int]]) -> Answers:
    """Returns what one instance answers alone."""
    return _counted(server, (alone(server, prompt, NUM_NEW) for prompt in prompts))
