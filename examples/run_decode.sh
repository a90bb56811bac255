#!/usr/bin/env bash
# Starts the decode instance (D) of a P/D pair that hands KV over through a pool.
#
#   examples/run_decode.sh [--port N] [--store URL] [--model DIR] [--engine NAME] [-- ENGINE OPTIONS]
#
#   --port    or DECODE_PORT    where it listens (8200)
#   --store   or PDSTORE_STORE  the pool, the same for P and D (file://, a directory of this user;
#                               with MOONCAKE_MASTER and its like that pool: deploy/mooncake.md)
#   --model   or MODEL          a checkpoint; else a tiny one is trained, once, in a minute
#   --engine                    mini (the default), vllm, or sglang (which needs --model)
#   --dry-run                   print sglang's command and start nothing
#
# Sets PD_TRANSFER_VIA_STORAGE=1 itself. Ctrl-C stops it. Beside it: run_prefill.sh, run_router.sh.
set -euo pipefail
# shellcheck source=examples/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

serve decode "$DECODE_PORT" "$@"
