"""Says as JSON how pdstore reads the arguments that an SGLang has parsed and resolved itself.

Run with a wheel, a model's directory and a JSON list of command lines: for each, `sglangs` has what
SGLang itself goes by once it is started, `pdstores` what the adapter reads, `typed` what SGLang's
ServerArgs has, and `refusal` why pdstore refuses the server, or null. It is a process of its own,
because the other tests leave out what arguments are resolved with.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from transformers import AutoConfig, AutoProcessor

from pdstore.adapters.sglang.pages import (
    DRAFT_ARGUMENTS,
    STATE_KERNELS,
    refuse_unsupported,
    server_arguments,
)
from pdstore.errors import ConfigError
from tests.support.left_out import find_in, leave_out

READ = (
    *("model_path", "revision", "load_format", "quantization", "quantization_param_path"),
    *("kv_cache_dtype", "context_length", "json_model_override_args", "enable_lora", "lora_paths"),
    "hicache_storage_prefetch_policy",
)
"""The arguments that the adapter reads; of those of states and drafts, a version may lack some."""
_LEFT_OUT = ("torchvision", "torchao", "sgl_kernel", "gguf", "IPython", "outlines")
_HICACHE = [
    "--enable-hierarchical-cache",
    "--page-size",
    "64",
    "--hicache-mem-layout",
    "page_first",
]


def _install(wheel: Path) -> None:
    assert AutoProcessor  # imported before torchvision is left out, for which it would look
    register = AutoConfig.register
    # SGLang registers models that a newer transformers has
    AutoConfig.register = staticmethod(functools.partial(register, exist_ok=True))
    leave_out([*_LEFT_OUT, "sglang.kernels", "sglang.srt.layers"])
    find_in(wheel)


def _resolved(options: list[str]):
    """Returns SGLang's ServerArgs as a started server publishes them."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(options)
    if hasattr(args, "resolve_once"):  # before SGLang 0.5.19 they are resolved when they are made
        args.resolve_once()
    args.check_server_args()
    runtime_context.get_context().set_server_args(args)
    return args


def _read_of(args) -> list[str]:
    return [*READ, *(name for name in (*STATE_KERNELS, *DRAFT_ARGUMENTS) if hasattr(args, name))]


def _sglangs(args) -> dict[str, object]:
    """Returns the arguments as SGLang's own modules read them: from the context's configuration."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.runtime_context import get_context

    values = {}
    for name in _read_of(args):
        first, *others = namespace_of(type(args))[name].split(".")
        values[name] = functools.reduce(getattr, [*others, name], get_context().config_bag(first))
    return values


def _refusal(args) -> str | None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    ranks |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False}
    kind = {"enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"}
    config = HiCacheStorageConfig(**ranks, **kind, extra_config={"interface_v1": 1})
    try:
        refuse_unsupported(config, args)
    except ConfigError as error:
        return str(error)
    return None


def _told(options: list[str]) -> dict[str, object]:
    args = _resolved(options)
    read = server_arguments()
    return {
        "typed": {name: getattr(args, name) for name in _read_of(args)},
        "sglangs": _sglangs(args),
        "pdstores": {name: getattr(read, name) for name in _read_of(args)},
        "adapters": [adapter.lora_id for adapter in read.lora_paths or ()],
        "refusal": _refusal(read),
    }


if __name__ == "__main__":
    wheel, model, lines = sys.argv[1:]
    _install(Path(wheel))
    usual = ["--model-path", model, "--device", "cpu", *_HICACHE]
    told = [_told([*usual, *line]) for line in json.loads(lines)]
    print(json.dumps(told, default=str))
