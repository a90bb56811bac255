#!/usr/bin/env bash
# On a machine with two GPUs: the hand-off as a client waits for it, files and the arena.
# Usage: benchmarks/device_handoff.sh OUT [OPTIONS OF benchmarks.handoff]
#        OUT is where the raw results go (benchmarks/results).
#        POOL: a memory-backed directory (default: one with huge pages is mounted, as root).
#        NAME: of the files of results (default handoff). TOUCH: GiB of POOL to write before.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 name=${NAME:-handoff} touch_gib=${TOUCH:-64}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if [[ -z ${POOL:-} ]]; then
    POOL=/mnt/pdstore_pool
    mkdir -p "$POOL"
    mountpoint -q "$POOL" || mount -t tmpfs -o size=160G,huge=always tmpfs "$POOL" || POOL=/dev/shm
fi
if [[ ! -e $POOL/.touched ]]; then
    # A virtual machine's memory is slow until it was written once; reserving it does not count.
    began=$SECONDS
    for i in $(seq 16); do
        dd if=/dev/zero of="$POOL/touch$i" bs=16M count=$((touch_gib * 4)) status=none &
    done
    wait
    rm -f "$POOL"/touch*
    touch "$POOL/.touched"
    echo "wrote $touch_gib GiB of $POOL once: $((SECONDS - began)) s"
fi
rm -rf "$POOL"/pdstore-bench-*
{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    nvidia-smi topo -m
    lscpu | grep -E 'Model name|L2|L3|NUMA|Socket|Thread'
    python3 -c 'import platform, torch; print(platform.platform(), torch.__version__)'
    nproc
    cat COMMIT 2>/dev/null || git rev-parse HEAD
} >"$out/${name}_machine.txt" 2>&1
python3 -m benchmarks.handoff --pool "$POOL" --json "$out/$name.json" "$@" 2>&1 | tee "$out/$name.txt"
