"""The process of a FUSE mount of tests: `fuse_server.py BEHIND POINT FAULTS OPTIONS`.

BEHIND: the directory that calls are passed on to. POINT: where it is mounted.
FAULTS: a JSON file, read at each call: [call, words of the path, errno's name] of each fault.
OPTIONS: options of FUSE, as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mfusepy

_STATVFS = (
    *("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail"),
    *("f_ffree", "f_files", "f_flag", "f_frsize", "f_namemax"),
)


class PassingOn(mfusepy.Operations):
    """Passes calls on to a directory, except those that FAULTS names."""

    use_ns = True

    def __init__(self, behind: str, faults: Path) -> None:
        self.behind, self.faults = behind, faults

    def access(self, path: str, mode: int) -> int:
        os.lstat(self.behind + path)
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        status = os.lstat(self.behind + path)
        facts = {name: getattr(status, name) for name in ("st_mode", "st_nlink", "st_size")}
        facts |= {"st_uid": status.st_uid, "st_gid": status.st_gid}
        unit = 10**9 if "coarse" in self.faults.read_text() else 1
        for name in ("st_atime", "st_mtime", "st_ctime"):
            facts[name] = getattr(status, f"{name}_ns") // unit * unit
        return facts

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self.behind + path)]

    def statfs(self, path: str) -> dict[str, int]:
        if "statfs" in self.faults.read_text():
            return {}
        status = os.statvfs(self.behind + path)
        return {name: getattr(status, name) for name in _STATVFS}

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self.behind + path, ns=times)
        return 0

    def open(self, path: str, flags: int) -> int:
        return os.open(self.behind + path, flags & ~os.O_NOFOLLOW)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self.behind + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self.behind + path, length)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self.behind + path, mode)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self.behind + path, mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self.behind + path)
        return 0

    def mknod(self, path: str, mode: int, device: int) -> int:
        os.mknod(self.behind + path, mode, device)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self.behind + path)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self.behind + old, self.behind + new)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self.behind + source, self.behind + target)
        return 0


def failing(call: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation that fails as FAULTS says, and else does what `answer` does."""

    def answer_or_fail(self: PassingOn, path: str, *args: Any) -> Any:
        for hurt, name, why in json.loads(self.faults.read_text()):
            is_hurt = hurt == call or (hurt == "colon" and ":" in path)
            if is_hurt and name in path and why != "zero":
                raise mfusepy.FuseOSError(getattr(errno, why))
        return answer(self, path, *args)

    return answer_or_fail


def main() -> None:
    behind, at, faults, options = sys.argv[1:5]
    for call, answer in list(vars(PassingOn).items()):
        if callable(answer) and not call.startswith("_"):
            setattr(PassingOn, call, failing(call, answer))
    mfusepy.FUSE(
        PassingOn(behind, Path(faults)),
        at,
        foreground=True,
        nothreads=False,
        allow_other=True,
        default_permissions=True,
        **json.loads(options),
    )


if __name__ == "__main__":
    main()
