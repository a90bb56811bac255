"""format_arena: makes an empty file an arena of libpdstore."""

from __future__ import annotations

from pdstore.native.abi import Code
from pdstore.native.library import Library


def format_arena(library: Library, fd: int, num_bytes: int, slab_bytes: int, seed: int) -> None:
    """Makes an empty file an arena; nobody else may have it open.

    num_bytes: of memory for values, a multiple of `slab_bytes`.
    seed: random, of the hashes of this arena's keys.
    Raises ValueError for sizes that no arena has, OSError if the file system refuses.
    """
    code = library.calls.pds_arena_format(fd, num_bytes, slab_bytes, seed)
    if code == Code.ARGUMENT:
        raise ValueError(f"no arena has {num_bytes} bytes in slabs of {slab_bytes}")
    if code:
        raise OSError("the file system refuses to make the file so large")
