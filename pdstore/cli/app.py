"""The commands of `pdstore` and their options. What a command does is imported when it is run."""

from __future__ import annotations

import enum
import importlib
from typing import Annotated

import typer

app = typer.Typer(
    name="pdstore",
    no_args_is_help=True,
    rich_markup_mode=None,  # its pages take 0.2 s to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look into a KV pool, check P and D, and plan for them. Exit status: 0 fine,"
    " 1 something was found, 2 the command could not run.",
)

Store = Annotated[
    str | None, typer.Option("--store", metavar="URL", help="The pool. Default: PDSTORE_STORE.")
]
Gpu = Annotated[
    str, typer.Option(metavar="NAME", help="With a model: H100, H200, H20, A100, L40S, B200, ...")
]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write JSON there instead; - is standard output."),
]


class Pool(enum.Enum):
    """Pools that can be started here."""

    REDIS = "redis"
    MOONCAKE = "mooncake"


def _run(name: str, json_target: str | None, *arguments: object, **options: object) -> None:
    """Runs the function `name` ("module.function") and emits its answer."""
    module_name, _, function_name = name.rpartition(".")
    answers = importlib.import_module("pdstore.cli.answer")
    output = answers.Output(json_target)
    with answers.busy("loading"):  # torch alone takes a second or more
        function = getattr(importlib.import_module(f"pdstore.cli.{module_name}"), function_name)
    answer = function(*arguments, **options)
    output.emit(answer)
    raise typer.Exit(answer.status)


def _show_version(wanted: bool) -> None:
    if wanted:
        from pdstore import __version__
        from pdstore.format.namespace import FORMAT_VERSION

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
        str, typer.Argument(metavar="PREFIX", help="Namespace, or a longer beginning of keys.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most lines; 0 for all.")] = 20,
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """List values, those used last first."""
    _run("listing.ls", json, store, prefix, limit)


@app.command()
def du(store: Store = None, json: JsonTarget = None) -> None:
    """Count values and bytes by namespace."""
    _run("listing.du", json, store)


@app.command()
def inspect(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A key, or a piece of it that no other has.")
    ],
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """Read one value: its header, and whether it is right."""
    _run("inspection.inspect", json, store, key)


@app.command("purge")
def clear(
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Its first hex digits, as in `pdstore du`.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """Forget all that the pool has of one namespace."""
    _run("clearing.clear", json, store, namespace, is_rehearsal=dry_run)


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="P's or D's; again for the other.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="config.json, for the break-even.")
    ] = None,
    gpu: Gpu = "H100",
    gpus: Annotated[int, typer.Option(min=1, help="With --model.")] = 1,
    engine_block: Annotated[int, typer.Option(min=1, help="Tokens of the engine's block.")] = 16,
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """Try all that P and D need, and say what to do."""
    from pdstore.cli.break_even import Machine
    from pdstore.cli.doctor import Asked

    asked = Asked(store, tuple(peer or ()), model, Machine(gpu, gpus), engine_block)
    _run("doctor.doctor", json, asked)


@app.command()
def native(json: JsonTarget = None) -> None:
    """Build or find the native library, and say what it is."""
    _run("native_report.native", json)


@app.command()
def calc(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A model's config.json, or its directory.")
    ],
    gpu: Gpu = "H100",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the prefill instance.")] = 1,
    mfu: Annotated[
        float, typer.Option(min=0.01, max=1, help="The prefill's share of the GPU's peak.")
    ] = 0.5,
    prompt: Annotated[
        list[int] | None, typer.Option(min=1, help="A prompt's tokens; repeatable.")
    ] = None,
    kv_element_bytes: Annotated[int | None, typer.Option(min=1, max=4, help="1: fp8.")] = None,
    params: Annotated[
        float | None, typer.Option(min=1, help="Active parameters, such as 37e9.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1e-6, help="The store's GB/s: read or compute?")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Requests with hash_ids, to size a pool.")
    ] = None,
    hit_rate: Annotated[float | None, typer.Option(help="With --trace; 0 to 1.")] = None,
    json: JsonTarget = None,
) -> None:
    """Compute KV sizes, break-even bandwidths and pool sizes."""
    if trace is not None or hit_rate is not None:
        _run("calc.pool_for", json, config, trace, hit_rate)
    from pdstore.cli.break_even import Machine

    _run(
        "calc.calc",
        json,
        config,
        Machine(gpu, gpus, mfu),
        prompt or [1024, 8192, 32_768, 131_072],
        kv_element_bytes=kv_element_bytes,
        params=params,
        gb_per_s=bandwidth,
    )


@app.command()
def explain(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; needs --model.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="Token ids as 1,2,3, or a file of them.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="Whose tokenizer reads the prompt.")
    ] = None,
    namespace: Annotated[
        str, typer.Option(metavar="HEX", help="Its first digits. Default: the best.")
    ] = "",
    cache_salt: Annotated[str, typer.Option(metavar="SALT", help="The request's own.")] = "",
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """Say how much of a prompt the pool has, where it ends, and why."""
    from pdstore.cli.explained import Question

    question = Question(prompt, model, ids, namespace, cache_salt)
    _run("explained.explain", json, store, question)


@app.command()
def selftest(
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="A config.json. Default: an 8B model.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 200,
    store: Store = None,
    json: JsonTarget = None,
) -> None:
    """Save and load KV of a model's layout, and compare every byte."""
    _run("selftest.selftest", json, store, model, tokens)


@app.command()
def top(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Of P, D, any of /metrics.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Totals, and out.")] = False,
    json: JsonTarget = None,
) -> None:
    """Watch hits, misses, rates and queues of running instances."""
    if once or json is not None:
        _run("live.top_once", json, urls)
    _run("live.top", None, urls, every)


@app.command()
def up(
    kind: Annotated[Pool, typer.Argument(help="The server to start.")],
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for values.")] = "1GiB",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: a free one.")] = None,
    json: JsonTarget = None,
) -> None:
    """Start a pool for a rehearsal on this host; Ctrl-C stops it."""
    _run("rehearsal.up", None, kind.value, memory, port, json)
