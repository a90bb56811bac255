"""Mount: the file system that a pool's directory lies on; what it remembers of names, and lacks.

The table of mounts is read here. psutil would save 8 lines of it, and add a compiled package of
1 MB that takes 10 ms to import.
"""

# Decision: docs/decisions/042-files-of-several-hosts.md
from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pdstore.errors import ConfigError

_MOUNTS = Path("/proc/self/mountinfo")
_NFS = frozenset({"nfs", "nfs4"})
_OF_OTHERS = ("cifs", "smb3", "9p", "virtiofs", "fuse")  # clients that keep names for a while
_LOOKS_ALWAYS = frozenset({"lookupcache=none", "lookupcache=positive", "lookupcache=pos"})
_OF_ONE_HOST = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"})
_OCTAL = re.compile(r"\\([0-7]{3})")  # mountinfo writes blanks, tabs and backslashes so
_ELSEWHERE = "/proc/self/status"  # a file on another mount than any pool
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Doubt(NamedTuple):
    """A thing that may not work as the user expects: what it is about, and what to change."""

    subject: str
    said: str
    remedy: str


class Mount(NamedTuple):
    """A mounted file system: its type, as in /proc/self/mountinfo, its options, and its place."""

    kind: str
    options: frozenset[str]
    point: Path = Path()

    @property
    def is_of_one_host(self) -> bool:
        """True for a type that only one host mounts; another host may get its files by a server."""
        return self.kind in _OF_ONE_HOST

    @property
    def remembers_misses(self) -> bool:
        """True if this host's kernel may believe for seconds that a name is missing.

        Another host may have made a file of that name meanwhile.
        """
        if self.kind in _NFS:
            return not self.options & _LOOKS_ALWAYS
        return self.kind.split(".")[0].startswith(_OF_OTHERS)

    def doubts(self) -> Iterator[Doubt]:
        """Yields a doubt if hosts learn late what others have put."""
        if self.kind in _NFS and self.remembers_misses:
            message = f"{self.kind} keeps for up to a minute that a name is missing"
            yield Doubt("mount", message, "mount it with lookupcache=positive on every host")


def mount_of(path: Path, mounts: str | None = None) -> Mount:
    """Returns the mount that a path lies on; one without a type if the system does not tell.

    mounts: as in /proc/self/mountinfo; None reads that. Of several mounts at the nearest directory
      above the path, the last one counts.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text()
        except OSError:
            return Mount("", frozenset())
    path, found = Path(os.path.realpath(path)), Mount("", frozenset())
    for line in mounts.splitlines():
        here, _, there = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), here.split()[4]))
        if path.is_relative_to(point) and len(point.parts) >= len(found.point.parts):
            kind, _, options = there.split(maxsplit=2)
            found = Mount(kind, frozenset(options.split(",")), point)
    return found


class NameCheck:
    """Asks a file system again for names that this host's kernel may wrongly believe missing.

    An NFS client asks its server about a directory that is opened, and then looks again for names
    in it. Other clients look again for a name that is to be made: a link to it from another mount
    always fails, with EEXIST if the name is there.

    root: the pool's directory. Use one for each call of the store: it opens a folder once.
    """

    def __init__(self, root: Path, mount: Mount) -> None:
        self._root = str(root)
        self._is_nfs = mount.kind in _NFS
        self._opened: set[str] = set()

    def is_there(self, path: str) -> bool:
        """Returns whether the file system now has a file at a path of the pool."""
        folder = os.path.dirname(path)
        if self._is_nfs:
            self._open_folder(self._root)
            self._open_folder(folder)
            return os.access(path, os.F_OK)
        why = _why_not_linked(path)
        if why == errno.ENOENT and _why_not_linked(folder) == errno.EEXIST:
            why = _why_not_linked(path)
        return why == errno.EEXIST

    def _open_folder(self, folder: str) -> None:
        if folder not in self._opened:
            self._opened.add(folder)
            with contextlib.suppress(OSError):
                os.close(os.open(folder, _FOLDER))


def _why_not_linked(path: str) -> int | None:
    """Returns with which errno a link from another mount to a path fails, as it always does."""
    try:
        os.link(_ELSEWHERE, path)
    except OSError as error:
        return error.errno
    os.unlink(path)
    return None


def check_abilities(root: Path, temporary: str, now_ns: Callable[[], int]) -> None:
    """Does to one small file what is done to each value. Raises ConfigError for what is not there.

    A full disk is no lack: then it stops without an error. Raises OSError for other failures.

    temporary: a path on the same file system, at which nothing is.
    now_ns: as `FileSystemClock.now_ns`.
    """
    named = f"{temporary}:0"
    linked = f"{temporary}:1"

    def stamp() -> None:
        until = now_ns() + 3600 * 10**9
        os.utime(linked, ns=(until, until), follow_symlinks=False)
        if abs(os.lstat(linked).st_mtime_ns - until) > 3 * 10**9:  # FAT counts in 2 s
            raise OSError(errno.EINVAL, "a file does not keep the modification time it is given")

    with contextlib.ExitStack() as stack:
        for path in (named, linked, temporary):
            stack.callback(_forget, path)
        try:
            _make(temporary)
            _try(root, "does not take ':' in names", lambda: _make(named))
            _try(root, "has no hard links", lambda: os.link(named, linked))
            _try(root, "does not set times of files", stamp)
        except OSError as error:
            if error.errno not in FULL:
                raise


def _try(root: Path, lack: str, do: Callable[[], object]) -> None:
    try:
        do()
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError(
            f"the file system of {root} {lack} ({error.strerror}):"
            " name a directory on another one, or use redis:// or mooncake:// between hosts"
        ) from error


def _make(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _forget(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
