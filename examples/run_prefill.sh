#!/usr/bin/env bash
# Starts the prefill instance (P) of a P/D pair that hands KV over through a pool.
#
#   examples/run_prefill.sh [--port N] [--store URL] [--model DIR] [--engine NAME] [-- ENGINE OPTIONS]
#
#   --port    or PREFILL_PORT   where it listens (8100)
#   --store   or PDSTORE_STORE  the pool, the same for P and D (file://, a directory of this user;
#                               with MOONCAKE_MASTER and its like that pool: deploy/mooncake.md)
#   --model   or MODEL          a checkpoint; else a tiny one is trained, once, in a minute
#   --engine                    mini (the default), vllm, or sglang (which needs --model)
#   --dry-run                   print sglang's command and start nothing
#
# Sets PD_TRANSFER_VIA_STORAGE=1 itself. Ctrl-C stops it. Beside it: run_decode.sh, run_router.sh.
set -euo pipefail
# shellcheck source=examples/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

serve prefill "$PREFILL_PORT" "$@"
