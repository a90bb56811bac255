"""app: every command has help, the version is told, and completion can be shown."""

from __future__ import annotations

import typer

import pdstore
from pdstore.cli.app import app
from pdstore.cli.main import main
from pdstore.format.namespace import FORMAT_VERSION


def test_every_command_has_a_line_of_help_and_json(capsys):
    commands = typer.main.get_command(app).commands
    assert set(commands) == {"ls", "du", "inspect", "purge", "doctor", "explain"}
    for name, command in commands.items():
        assert command.help, name
        assert "json" in {parameter.name for parameter in command.params}, name
        assert main([name, "--help"]) == 0
    capsys.readouterr()


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    said = f"pdstore {pdstore.__version__}, stored format {FORMAT_VERSION}"
    assert capsys.readouterr().out == said + "\n"
