"""`pdstore native`: the native library of this machine, built now where that is possible."""

from __future__ import annotations

from pdstore.cli.answer import Answer, busy, table
from pdstore.format.namespace import Json
from pdstore.native.build import find_library
from pdstore.native.library import Library


def native() -> Answer:
    """Reports both forms of the library. Raises NativeError if there is none to find or build."""
    found: list[Json] = []
    rows = []
    for name, with_cuda in (("host tensors", False), ("GPU tensors", True)):
        with busy(f"building libpdstore for {name}"):
            library = Library(find_library(with_cuda=with_cuda))
        has_cuda, path = library.has_cuda, str(library.path)
        rows.append([name, "yes" if has_cuda else "no", str(library.num_devices), path])
        found.append({"for": name, "cuda": has_cuda, "gpus": library.num_devices, "file": path})
    return Answer({"libraries": found}, [table(["for", "CUDA", ">GPUs", "file"], rows)])
