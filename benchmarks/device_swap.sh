#!/usr/bin/env bash
# On a machine with a GPU: the tests that need one, memory checkers, and the copy benchmarks.
# Usage: benchmarks/device_swap.sh [DIRECTORY [STEP...]]
#   DIRECTORY: where the raw results go (default benchmarks/results)
#   STEP: tests, check, bench (the default: these three)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=${1:-benchmarks/results}
steps=("${@:2}")
[ ${#steps[@]} -gt 0 ] || steps=(tests check bench)
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
pytest=(python3 -m pytest -q -p no:cacheprovider -m cuda)

{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    python3 -c 'import platform, torch; print(platform.platform(), torch.__version__)'
    cat COMMIT 2>/dev/null || git rev-parse HEAD
} | tee "$out/swap_machine.txt"

run_tests() {
    timeout 240 "${pytest[@]}" tests/native tests/worker \
        --durations=5
}
# Both at once: neither looks at the clock.
run_check() {
    local tool
    for tool in memcheck racecheck; do
        timeout 150 compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" \
            -o faulthandler_timeout=0 tests/native/test_gpu.py tests/native/test_parity.py \
            -k "reads_after or writes_after or staging or (small_length and 3-cuda)" >"$out/swap_$tool.txt" 2>&1 &
    done
    wait
    tail -n 4 "$out/swap_memcheck.txt" "$out/swap_racecheck.txt"
}
run_bench() { timeout 400 python3 -m benchmarks.swap.bench --rounds 7 --json "$out/swap_bench.json"; }

status=0
for step in "${steps[@]}"; do
    started=$SECONDS
    "run_$step" 2>&1 | tee "$out/swap_$step.txt" || status=1
    echo "== $step: $((SECONDS - started)) s"
done
exit $status
