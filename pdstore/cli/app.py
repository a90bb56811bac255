"""The commands of `pdstore` and their options. A command's code is imported when it is run."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

app = typer.Typer(
    name="pdstore",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's help pages take 0.2 s to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look into a KV pool, and check P and D. Exit status: 0: all is well,"
    " 1: something is wrong, 2: the command could not run.",
)

Store = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="The pool. Default: PDSTORE_STORE.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _run(name: str, is_json: bool, *arguments: object, **options: object) -> None:
    """Runs the function `name` ("package.module.function") and emits its answer."""
    module_name, _, function_name = name.rpartition(".")
    answers = importlib.import_module("pdstore.cli.answer")
    with importlib.import_module("pdstore.cli.progress").working():  # importing torch takes a while
        function = getattr(importlib.import_module(module_name), function_name)
        answer = function(*arguments, **options)
    answers.emit(answer, is_json=is_json)
    raise typer.Exit(answer.status)


def _show_version(wanted: bool) -> None:
    if wanted:
        from pdstore import __version__
        from pdstore.format.keys import FORMAT_VERSION

        print(f"pdstore {__version__}, stored format {FORMAT_VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command()
def ls(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="A namespace, or the beginning of keys.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="The most lines to show; 0 for all.")] = 20,
    store: Store = None,
    json: AsJson = False,
) -> None:
    """List values, those used last first."""
    _run("pdstore.cli.listing.ls", json, store, prefix, limit)


@app.command()
def du(store: Store = None, json: AsJson = False) -> None:
    """Count values and bytes by namespace."""
    _run("pdstore.cli.usage.du", json, store)


@app.command()
def inspect(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key, or a text that no other key contains.")
    ],
    store: Store = None,
    json: AsJson = False,
) -> None:
    """Read one value; show its header, and whether it is right."""
    _run("pdstore.cli.listing.inspect", json, store, key)


@app.command("purge")
def clear(
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="First hex digits, as `pdstore du` shows.")
    ] = "",
    older_than: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Only values that nothing used for so long: 7d."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count values.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: Store = None,
    json: AsJson = False,
) -> None:
    """Forget a namespace, or what was not used for long."""
    options = {"is_rehearsal": dry_run, "is_agreed": yes}
    _run("pdstore.cli.purging.clear", json, store, namespace, older_than, **options)


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="URL of P; repeat it for D.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="config.json of the model to try KV of.")
    ] = None,
    engine_block: Annotated[int, typer.Option(min=1, help="Tokens of the engine's block.")] = 16,
    store: Store = None,
    json: AsJson = False,
) -> None:
    """Check all that P and D need, and say what to change."""
    _run("pdstore.cli.doctor.doctor", json, store, peer or (), model, engine_block)


@app.command()
def explain(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; needs --model.")
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="1,2,3, or what vLLM's /tokenize gives, or a file of it."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Has the PROMPT's tokenizer.")
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON: messages, or a request's body; needs --model."),
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="A request that is over; needs --log.")
    ] = None,
    log: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="The log of P; repeat it for D.")
    ] = None,
    namespace: Annotated[
        str,
        typer.Option(metavar="HEX", help="First digits. Default: the one with most of the prompt."),
    ] = "",
    cache_salt: Annotated[str, typer.Option(metavar="SALT", help="The request's cache_salt.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Status page of D: also what its requests lost."),
    ] = None,
    store: Store = None,
    json: AsJson = False,
) -> None:
    """Say how much of a prompt the pool has, and why it has no more."""
    if request is not None or log:
        _run("pdstore.cli.logged.explain_request", json, store, request, log or ())
    asked = (prompt, model, ids, chat, namespace, cache_salt, peer or ())
    _run("pdstore.cli.explained.explain", json, store, *asked)


@app.command()
def bench(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each size.")] = 15,
    store: Store = None,
    json: AsJson = False,
) -> None:
    """Measure a store beside the plain calls that it stands on."""
    _run("pdstore.cli.bench.stores.bench", json, store, rounds)


@app.command(
    "size",
    add_help_option=False,  # the words go to a parser of its own, which needs no pool
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
def compute_sizes(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[config.json] [OPTIONS]", help="See --help.")
    ] = None,
) -> None:
    """Size a model's KV; say what reads it faster than computing."""
    raise typer.Exit(importlib.import_module("pdstore.sizing").main(words or []))
