"""The commands of deploy/ are ones that this vLLM takes."""

from __future__ import annotations

from tests.deploy.commands import DEPLOY, commands_of

_LINES = (DEPLOY / "systemd" / "examples" / "prefill.env").read_text().splitlines()
EXAMPLE = dict(line.split("=", 1) for line in _LINES if not line.startswith("#"))


def test_vllm_takes_every_command():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    commands = [*commands_of("serve"), *commands_of("$(MODEL)"), *commands_of("${MODEL:-/model}")]
    assert len(commands) >= 5
    for arguments in commands:
        model, *options = ["a-model", *(a for a in arguments if "MODEL" not in a)]
        if "$VLLM_OPTIONS" in options:
            options[-1:] = EXAMPLE["VLLM_OPTIONS"].split()
        parsed = parser.parse_args([model, *(o.replace("${PORT}", "8000") for o in options)])
        assert parsed.port == 8000
        assert parsed.shutdown_timeout > 0
