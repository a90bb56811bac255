#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, a memory checker, and the copy benchmarks.
# Usage: benchmarks/device_swap.sh [DIRECTORY]   where the raw results go (default benchmarks/results)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0

{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    python3 -c 'import platform, torch; print(platform.platform(), torch.__version__)'
    cat COMMIT 2>/dev/null || git rev-parse HEAD
} | tee "$out/swap_machine.txt"

python3 -m pytest -q -p no:cacheprovider tests/test_native*.py tests/test_staging*.py 2>&1 \
    | tee "$out/swap_tests.txt" | tail -40 || status=1
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        timeout 150 compute-sanitizer --tool $tool --error-exitcode 9 \
            python3 -m pytest -q -p no:cacheprovider -o faulthandler_timeout=0 \
            tests/test_native_gpu.py -k "reads_after or writes_after or staging" 2>&1 \
            | tee "$out/swap_$tool.txt" | tail -4 || status=1
    done
fi
timeout 330 python3 -m pdstore bench swap --rounds 7 --json "$out/swap_bench.json" 2>&1 \
    | tee "$out/swap_bench.txt" | tail -150 || status=1
timeout 150 python3 -m pdstore bench start --json "$out/swap_start.json" 2>&1 \
    | tee "$out/swap_start.txt" || status=1
exit $status
