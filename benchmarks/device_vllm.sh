#!/usr/bin/env bash
# On a machine with a GPU, vLLM and Mooncake: P -> pool -> D of a real vLLM, over files and Mooncake.
# Usage: benchmarks/device_vllm.sh [DIRECTORY] [OPTIONS OF THE SCRIPT]
#        DIRECTORY is where the raw results go (default benchmarks/results)
#        SCRIPT: vllm_gpu (the default), or vllm_shards for unequal numbers of ranks, on two GPUs
#        NAME: of the files of results (default vllm, or SCRIPT)
#        POOL: a memory-backed directory of 64 GiB or more (default: one is mounted, as root)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/results}
shift
script=${SCRIPT:-vllm_gpu} name=${NAME:-${SCRIPT:-vllm}}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# vLLM finds the connector by an entry point: without it, it would start without a pool.
python3 - <<'END' || exit 1
import importlib.metadata, sys
plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
if "pdstore" not in {plugin.name for plugin in plugins}:
    sys.exit("vLLM would not find pdstore: install it for this Python (pip install --no-deps -e .)")
END

if [[ -z ${POOL:-} ]]; then
    POOL=/mnt/pdstore_pool
    mkdir -p $POOL
    mountpoint -q $POOL || mount -t tmpfs -o size=72G,huge=always tmpfs $POOL || POOL=/dev/shm
    # Memory that a virtual machine has never touched is slow the first time: while models load,
    (
        [[ -e $POOL/.touched ]] && exit
        for i in 1 2 3 4 5 6 7 8; do fallocate -l 4G "$POOL/touch$i" & done
        wait
        rm -f "$POOL"/touch?
        touch $POOL/.touched
        echo "touched after $SECONDS s"
    ) &
fi
rm -rf "$POOL"/pdstore-bench-* # of a run that was killed
{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    nvidia-smi topo -m
    lscpu | grep -E 'Model name|L2|L3|NUMA|Socket|Thread'
    python3 -c 'import platform, torch; print(platform.platform(), torch.__version__)'
    nproc
    df -h "$POOL" | tail -1
    cat COMMIT 2>/dev/null || git rev-parse HEAD
} | tee "$out/vllm_machine.txt"
python3 "benchmarks/$script.py" --json "$out/$name.json" --pool "$POOL" "$@" 2>&1 \
    | tee "$out/$name.txt"
