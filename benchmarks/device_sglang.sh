#!/usr/bin/env bash
# On a machine with two GPUs: SGLang as P and D over pdstore, over its own files, over its Mooncake.
# Usage: benchmarks/device_sglang.sh OUT [OPTIONS OF benchmarks.sglang_gpu]
#        OUT is where the raw results go (benchmarks/results).
#        POOL: a memory-backed directory (default: one with huge pages is mounted, as root).
#        NAME: of the files of results (default sglang).
#
# Two calls, each within ten minutes; the second finds the checkpoint of the first in POOL:
#        benchmarks/device_sglang.sh OUT
#        NAME=sglang_faults benchmarks/device_sglang.sh OUT --tokens 8192 --runs 1 --faults \
#            --backends pdstore-shm pdstore-redis
# Faults alone, those that restart no server (about two minutes):
#        NAME=sglang_faults benchmarks/device_sglang.sh OUT --tokens 8192 --backends pdstore-shm pdstore-redis \
#            --only "pages damaged" "store hung" "store gone"
#
# Wheels of Python 3.12 beside the torch 2.11.0 (531 MB) that the machine has, by `pip download --no-deps`, in MB:
#   sglang 0.5.17: 22                   sglang-kernel 0.4.5: 383 (1.2 GB unpacked)
#   transformers 5.12.1: 11             flashinfer_python 0.6.15.post1: 15
#   xgrammar 0.2.1: 45                  torchvision 0.26.0: 8
#   torchao 0.17.0, apache-tvm-ffi 0.1.11, outlines 0.1.11, kernels 0.14.1: 3 or less each
#   mooncake-transfer-engine-cuda13 0.3.14: 50 (for its own backend `mooncake`)
# and the small ones of Requires-Dist in sglang's METADATA. Of sglang-kernel 1.1 GB are sgl_kernel/flash_ops.abi3.so,
# for --attention-backend fa3; the servers take triton, which needs a C compiler there. flashinfer compiles for
# minutes: SGLANG_IS_FLASHINFER_AVAILABLE=false. SGLang's own kernels (HiCache, rope, activation) are compiled by nvcc
# for one to two minutes, or lie in TVM_FFI_CACHE_DIR from before. SGLANG_DISABLED_MODEL_ARCHS spares the import of
# 200 models.
# What does not import is said before any server starts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1 name=${NAME:-sglang}
shift
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# No NVLink multicast: the GPUs of a host may belong to several guests.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1

if [[ -z ${POOL:-} ]]; then
    POOL=/mnt/pdstore_pool
    mkdir -p "$POOL"
    mountpoint -q "$POOL" || mount -t tmpfs -o size=120G,huge=always tmpfs "$POOL" || POOL=/dev/shm
fi
rm -rf "$POOL"/pdstore-bench-* # of a run that was killed
{
    date -u +%FT%TZ
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    nvidia-smi topo -m
    lscpu | grep -E 'Model name|L2|L3|NUMA|Socket|Thread'
    python3 -c 'import platform, torch; print(platform.platform(), torch.__version__)'
    nproc
    cat COMMIT 2>/dev/null || git rev-parse HEAD
} >"$out/${name}_machine.txt" 2>&1
# What does not import would cost each server its start: say it at once.
python3 -c 'import sglang, sgl_kernel, sglang.launch_server' 2>&1 | tail -5 | tee "$out/${name}_import.txt"
[[ ${PIPESTATUS[0]} -eq 0 ]] || exit 1
python3 -m benchmarks.sglang_gpu --pool "$POOL" --gpus 0 1 --json "$out/$name.json" "$@" 2>&1 \
    | tee "$out/$name.txt"
