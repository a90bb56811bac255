"""scripts/system_packages.sh, on systems that are directories of small programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "system_packages.sh"
TOOLS = ("bash", "sh", "true", "env", "grep", "make", "mkdir", "dirname")
LIBRARIES = ("libibverbs.so.1", "libcurl.so.4", "libnuma.so.1")
ALL = "python3-venv make g++ redis-server libibverbs1 libcurl4 libnuma1"
INSTALL = "missing system packages; as root: apt-get update && apt-get install -y"


class System:
    """A PATH: the programs that are on it, the libraries, and what apt-get was asked."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.asked = directory / "bin", directory / "asked"
        self.bin.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.program("id", "echo 1000")
        self.program("sudo", "exit 1")
        self.program("apt-get", f'echo "$*" >>{self.asked}')
        self.program("python", "exit 1")
        self.libraries()

    def program(self, name: str, script: str = "exit 0") -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o700)

    def libraries(self, *names: str) -> None:
        lines = "\n".join(f"\t{name} (libc6,x86-64) => /lib/{name}" for name in names)
        self.program("ldconfig", f"echo '{lines}'")

    def complete(self) -> None:
        """Has all that there is a need for."""
        for name in ("python", "c++", "redis-server"):
            self.program(name)
        self.libraries(*LIBRARIES)

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        given = {"PATH": str(self.bin), "PYTHON": str(self.bin / "python")}
        return subprocess.run(
            command,
            env=given | env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def check(self, *needs: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(SCRIPT), *needs, **env)

    def installed(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_rights_one_line_names_everything(system: System) -> None:
    (system.bin / "make").unlink()
    done = system.check()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{INSTALL} {ALL}\n")
    assert system.installed() == []


@pytest.mark.parametrize("root", ["id", "sudo"])
def test_root_or_sudo_without_a_password_installs_it(system: System, root: str) -> None:
    if root == "id":
        system.program("id", "echo 0")
    else:
        system.program("sudo", '[ "$1" != -n ] || shift; exec "$@"')
    redis = system.bin / "redis-server"
    script = f'echo "$*" >>{system.asked}; [ "$1" != install ] || ln -s /bin/true {redis}'
    (system.bin / "ln").symlink_to("/bin/ln")
    system.program("apt-get", script)
    done = system.check("redis")
    assert (done.returncode, done.stderr) == (0, "installing system packages: redis-server\n")
    update, install = system.installed()
    assert update.startswith("update")
    assert (install.split()[0], install.split()[-1]) == ("install", "redis-server")


@pytest.mark.parametrize(
    ("goal", "packages"),
    [
        (["test"], ALL.replace("make ", "")),
        (["demo"], "python3-venv"),
        (["demo", "STORE=redis"], "python3-venv redis-server"),
        (["demo", "STORE=mooncake"], "python3-venv libibverbs1 libcurl4 libnuma1"),
    ],
)
def test_make_stops_before_anything_runs(
    system: System, tmp_path: Path, goal: list[str], packages: str
) -> None:
    """Its python can say a version, and has no venv."""
    system.program("python", 'case "$2" in *ensurepip*) exit 1;; esac')
    python, venv = system.bin / "python", tmp_path / "venv"
    done = system.run("make", "-s", *goal, f"PYTHON={python}", f"VENV={venv}", SHELL="/bin/sh")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == f"{INSTALL} {packages}"
    assert not venv.exists()
