"""Command line of the demo: `python -m examples.demo`.

Runs one instance alone, then P and D with a pool between them, then P and D without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo import report
from examples.demo.engines import ENGINES
from examples.demo.fleet import Fleet
from examples.demo.pools import choose, open_pool
from examples.demo.processes import LOGS, ROOT, DemoError, Processes, stop_on_signals, tail_of
from examples.demo.prompts import make_prompts
from examples.demo.row import Json
from examples.demo.status import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the hand-off did what it promises, 1 if it did not, 130 if stopped."""
    given = _parser().parse_args(arguments)
    stop_on_signals()
    try:
        _try_to_write(given.json)
        return _run(given)
    except DemoError as error:
        say(f"FAILED: {error}")
        _write(given, {"ok": False, "problems": [str(error).splitlines()[0]], "requests": []})
        return 1
    except KeyboardInterrupt:
        say("stopped")
        return 130


def _run(given: argparse.Namespace) -> int:
    chosen = choose(given.store, os.environ)
    given.store = chosen.store
    say(f"pool        {chosen}")
    model = _existing(given.model) if given.model else _make_checkpoint()
    say(f"checkpoint  {model}")
    prompts = make_prompts(model)
    with Processes() as processes, open_pool(given.store, processes) as pool:
        runs = Fleet(processes, ENGINES[given.engine], model, pool).run(prompts)
    problems = report.problems_of(runs)
    _write(given, report.as_json(runs, problems))
    say("", report.table(runs.on.rows), "", *report.lines(runs))
    if problems:
        say(*problems, *(tail_of(LOGS / f"{name}.log") for name in ("prefill", "decode")))
    say(report.verdict(runs.on, problems))
    return 1 if problems else 0


def _try_to_write(file: Path | None) -> None:
    """Ends the program before it has worked for a file of `--json` that cannot be written."""
    try:
        if file:
            file.open("a").close()
    except OSError as error:
        sys.exit(f"--json: cannot write {file}: {error.strerror}")


def _write(given: argparse.Namespace, result: Json) -> None:
    """Writes the file of `--json`; it names the store without its address and password."""
    if given.json:
        head = {"store": (given.store or "").split(":")[0], "engine": given.engine}
        given.json.write_text(json.dumps(head | result, indent=2) + "\n")


def _existing(model: Path) -> Path:
    if not (model / "tokenizer.json").is_file():
        raise DemoError(f"no checkpoint in {model} (no tokenizer.json there)")
    return model.resolve()


def _make_checkpoint() -> Path:
    """Returns the tiny checkpoint; trains it if needed, with a progress bar on the terminal."""
    env = dict(os.environ)
    if not sys.stderr.isatty():
        env.setdefault("TQDM_MININTERVAL", "10")  # a log needs no moving bar
    command = [sys.executable, "-m", "examples.make_checkpoint"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DemoError(f"the checkpoint could not be made: status {done.returncode}")
    return Path(done.stdout.splitlines()[-1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples/run_pd_storage.sh",
        description="Starts a prefill and a decode instance with a pool between them, and checks"
        " that every answer is that of one instance alone while D computes one token of each"
        " prompt.",
    )
    add = parser.add_argument
    add(
        "--store",
        help="file, redis or mooncake: a fresh one. Or the URL of a pool. Default: PDSTORE_STORE,"
        " else the pool of MOONCAKE_MASTER or MOONCAKE_CONFIG_PATH, else file",
    )
    add("--engine", choices=sorted(ENGINES), default="mini", help="default: %(default)s")
    add("--model", type=Path, help="a checkpoint; else a tiny one is trained, once, in a minute")
    add("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
