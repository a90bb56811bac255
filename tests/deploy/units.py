"""Units of systemd, started without systemd by the lines that it would go by."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.deploy.commands import DEPLOY
from tests.support.child import child
from tests.support.kv import eventually

INSTALL_S = 60
ROUTER = f"""\
#!{sys.executable}
from pdstore.router.main import main
main()
"""
"""The program `pdstore-router`, run by this interpreter."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"  # as systemd gives it to services


@dataclass(frozen=True)
class Unit:
    """A service as install.sh has put it below a folder.

    name: as `systemctl start` takes it: `pdstore-router`, or `pdstore-vllm@prefill`.
    root: the folder that stands for `/`.
    """

    name: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """All variables that the process gets; a later line wins."""
        found = {"PATH": _PATH, "HOME": str(self.root / "var/lib/pdstore"), "LANG": "C.UTF-8"}
        for line in self._lines("Environment"):
            found.update(_assignment(word) for word in shlex.split(line))
        for name in self._lines("EnvironmentFile"):
            lines = (self.root / name.removeprefix("/")).read_text().splitlines()
            found.update(_assignment(line) for line in lines if line and not line.startswith("#"))
        return found

    @property
    def command(self) -> list[str]:
        """The program and its arguments: `${X}` is one of them, and `$X` as many as X has words."""
        [line] = self._lines("ExecStart")
        environment = self.environment
        program, *words = shlex.split(line)
        found = [str(self.root / program.removeprefix("/"))]
        for word in words:
            if whole := re.fullmatch(r"\$(\w+)", word):
                found += shlex.split(environment[whole[1]])
            else:
                found.append(re.sub(r"\$\{(\w+)\}", lambda each: environment[each[1]], word))
        return found

    def _lines(self, key: str) -> list[str]:
        """The values of a key in the unit, with the instance's name in them."""
        template, at, instance = self.name.partition("@")
        file = self.root / "etc/systemd/system" / f"{template}{at}.service"
        text = file.read_text().replace("\\\n", " ").replace("%i", instance)
        return re.findall(rf"^{key}=(.*)", text, re.MULTILINE)


def set_variables(file: Path, **values: str) -> None:
    """Writes a user's values into an environment file, which must have these variables."""
    text = file.read_text()
    for name, value in values.items():
        text, count = re.subn(
            rf"^{name}=.*$", lambda _, line=f"{name}={value}": line, text, flags=re.MULTILINE
        )
        assert count == 1, f"{file.name} has no {name}"
    file.write_text(text)


def tree_of(root: Path) -> dict[str, int]:
    """The files below a folder, without the virtual environment, and their permissions."""
    found = {}
    for folder, folders, files in os.walk(root):
        if "venv" in folders:
            folders.remove("venv")
        for name in files:
            path = Path(folder, name)
            found[str(path.relative_to(root))] = path.stat().st_mode & 0o777
    return found


def _assignment(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    assert sign, f"not an assignment: {text}"
    return name, value


def wheel_of(directory: Path, programs: Mapping[str, str]) -> Path:
    """Writes a wheel that installs these programs, given by name and text, and nothing else."""
    file = directory / "stand_ins-1-py3-none-any.whl"
    info = "stand_ins-1.dist-info"
    texts = {
        **{f"stand_ins-1.data/scripts/{name}": text for name, text in programs.items()},
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: stand-ins\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in texts.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFREG | 0o755) << 16  # pip keeps the right to run it
            archive.writestr(entry, text)
    return file


def install(
    root: Path, *arguments: str | Path, umask: int = -1
) -> subprocess.CompletedProcess[str]:
    """Runs install.sh, with a folder for `/`."""
    return subprocess.run(
        [DEPLOY / "systemd" / "install.sh", *arguments],
        env={**os.environ, "DESTDIR": str(root), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        umask=umask,
    )


@contextlib.contextmanager
def starting(units: Mapping[Unit, str], logs: Path, deadline_s: float) -> Iterator[None]:
    """Starts units at once, waits until each answers, and ends them all.

    units: each with the URL at which it answers. logs: a folder, for a file of each unit's name.
    """
    files = {unit: logs / f"{unit.name}.log" for unit in units}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(trust_env=False))
        for unit, file in files.items():
            both = {"stdout": stack.enter_context(file.open("wb")), "stderr": subprocess.STDOUT}
            stack.enter_context(child(unit.command, env=unit.environment, **both))
        for unit, url in units.items():
            eventually(lambda url=url: _answers(client, url), deadline_s, files[unit].read_text)
        yield


def _answers(client: httpx.Client, url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        if client.get(f"{url}/health").status_code == 200:
            return True
    time.sleep(0.05)  # so that this leaves the processor to those that start
    return False
