"""`pdstore doctor`: tries all that P and D need, and says for each finding what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdstore.cli.answer import Answer, answer_of, busy
from pdstore.cli.host import check_host, check_settings
from pdstore.cli.peers import check_peers
from pdstore.cli.store_check import ENGINE_BLOCK, check_store
from pdstore.settings import read_settings
from pdstore.sizing import Machine, ModelShape


@dataclass(frozen=True)
class Asked:
    """Options of the doctor.

    peers: URLs of P's and D's status.
    model: a config.json, for the layout, the break-even and the room; machine: with it.
    """

    url: str | None = None
    peers: tuple[str, ...] = ()
    model: str | None = None
    machine: Machine = field(default_factory=lambda: Machine("H100"))
    engine_block: int = ENGINE_BLOCK


def doctor(asked: Asked, count_gpus: Callable[[], int] = torch.cuda.device_count) -> Answer:
    """Checks settings, host, store and peers. Status 1 if something does not work.

    Raises ConfigError for settings or a URL that cannot be used.
    """
    logging.getLogger("pdstore").addHandler(logging.NullHandler())  # the findings say it
    settings = read_settings(**({"store": asked.url} if asked.url else {}))
    shape = ModelShape.of_config(asked.model) if asked.model else None
    arguments = frozenset({"store"} if asked.url else ())
    longest = shape.longest_prompt if shape else None
    findings = [*check_settings(settings, arguments, asked.engine_block, longest)]
    with busy("looking at this host"):
        num_gpus = count_gpus()
        findings += check_host(settings, num_gpus)
    with busy("trying the store"):
        findings += check_store(settings, shape, asked.machine, num_gpus)
    if asked.peers:
        with busy("asking P and D"):
            findings += check_peers(asked.peers)
    return answer_of(findings)
