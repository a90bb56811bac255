"""Reports the native library of this machine, building it now where that is possible."""

from __future__ import annotations

from pdstore.cli.report import Report
from pdstore.native.build import find_library
from pdstore.native.library import Library


def native_report() -> Report:
    """Reports both forms of the library. Raises NativeError if there is none to find or build."""
    report = Report("libpdstore", ["for", "CUDA", "GPUs", "file"])
    for name, with_cuda in (("host tensors", False), ("GPU tensors", True)):
        library = Library(find_library(with_cuda=with_cuda))
        has_cuda = "yes" if library.has_cuda else "no"
        report.add(name, has_cuda, library.num_devices, str(library.path))
    return report
