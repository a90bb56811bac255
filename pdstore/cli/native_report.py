"""What the native library is on this machine, built now where that is possible."""

from __future__ import annotations

from pdstore.cli.report import Report
from pdstore.native.build import find_library
from pdstore.native.library import Library


def native_report() -> Report:
    """Both forms of the library. Raises NativeError where neither is there nor can be built."""
    report = Report("libpdstore", ["for", "CUDA", "GPUs", "file"])
    for name, with_cuda in (("host tensors", False), ("GPU tensors", True)):
        library = Library(find_library(with_cuda=with_cuda))
        has_cuda = "yes" if library.has_cuda else "no"
        report.add(name, has_cuda, library.num_devices, str(library.path))
    return report
