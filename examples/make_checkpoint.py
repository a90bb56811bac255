"""Makes a tiny Llama checkpoint of this repository's own words, once, and caches it.

    python -m examples.make_checkpoint [--out DIR] [--steps N]

Nothing is downloaded. The result is an ordinary Hugging Face directory whose greedy answers are
words and whose logit margins are real, so that a wrong KV byte shows. The last line of stdout is
its path.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
DOCS = ("README.md", "DESIGN.md", "CHANGELOG.md")
CACHE = ROOT / ".cache" / "checkpoint"
STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.make_checkpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="directory to write (default: a cache)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (%(default)s)")
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.out, arguments.steps))


def make_checkpoint(out: Path | None = None, steps: int = STEPS) -> Path:
    """Returns the directory of the trained checkpoint; trains it if it does not exist.

    It appears whole or not at all: an interrupted training leaves nothing behind. Of several
    processes one trains, and the others wait for it.
    """
    out = out or CACHE / _digest(steps)
    if (out / "config.json").exists():
        return out
    for directory in (CACHE, out.parent):
        directory.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        _take(lock)
        if not (out / "config.json").exists():
            _train(out, steps)
    return out


def _take(lock: TextIO) -> None:
    """Takes a lock that another process may hold for as long as it trains; says so."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for the process that trains the checkpoint", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _train(out: Path, steps: int) -> None:
    # Imported here: a checkpoint that exists is found without waiting for torch.
    from transformers.utils.logging import disable_progress_bar

    from examples.train_checkpoint import train_model, train_tokenizer

    disable_progress_bar()  # for saving one file; the training shows its own
    documents = documents_of_repository()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".training-") as scratch:
        unfinished = Path(scratch) / "checkpoint"
        tokenizer = train_tokenizer(documents)
        tokenizer.save_pretrained(unfinished)
        train_model(tokenizer, documents, steps).save_pretrained(unfinished)
        unfinished.rename(out)


def documents_of_repository() -> list[str]:
    """Returns the docs and the package's sources, one text a file."""
    paths = [ROOT / name for name in DOCS if (ROOT / name).exists()]
    paths += sorted((ROOT / "pdstore").rglob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


def _digest(steps: int) -> str:
    """Names what is trained; sources are left out, or each code change would cost a minute."""
    digest = hashlib.sha256(str(steps).encode())
    scripts = ("examples/make_checkpoint.py", "examples/train_checkpoint.py")
    for name in (*scripts, *DOCS):
        if (ROOT / name).exists():
            digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
