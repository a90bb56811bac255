#!/usr/bin/env bash
# Builds what a package index takes, in dist/: the sources, a wheel for each processor, and the
# sources and the wheel of LMCache's adapter, which is Python alone.
#
#   scripts/release.sh [PROCESSOR]...       x86_64, aarch64; without one: both
#
# A wheel has the CPU form of libpdstore, compiled against glibc 2.28 with its C++ library inside
# (csrc/manylinux.cmake); where nvcc is installed, the form for GPUs is built at first use.
# PYTHON has the packages of the dependency group `release`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=$(realpath -s "${PYTHON:-python3}")
PATH=$(dirname "$PYTHON"):$PATH
[[ $# -gt 0 ]] || set -- x86_64 aarch64

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf dist

echo "building the sources" >&2
"$PYTHON" -m build --sdist --no-isolation --outdir dist . >"$scratch/log" 2>&1 \
    || { cat "$scratch/log" >&2; exit 1; }
"$PYTHON" -m build --no-isolation --outdir dist integrations/lmcache >"$scratch/log" 2>&1 \
    || { cat "$scratch/log" >&2; exit 1; }
for processor in "$@"; do
    echo "building the wheel for $processor: a minute or two" >&2
    _PYTHON_HOST_PLATFORM=linux-$processor \
        CMAKE_TOOLCHAIN_FILE=$PWD/csrc/manylinux.cmake \
        CMAKE_ARGS="-DPDSTORE_CUDA=OFF -DCMAKE_SYSTEM_PROCESSOR=$processor" \
        "$PYTHON" -m build --wheel --no-isolation --outdir "$scratch" . >"$scratch/log" 2>&1 \
        || { cat "$scratch/log" >&2; exit 1; }
    # Looks at every symbol, and names the wheel for the oldest system that it runs on.
    auditwheel repair --plat auto --wheel-dir dist "$scratch"/*"linux_$processor.whl" \
        >"$scratch/log" 2>&1 \
        || { cat "$scratch/log" >&2; exit 1; }
done
twine check --strict dist/*
