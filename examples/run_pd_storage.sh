#!/usr/bin/env bash
# The whole thing in one command: P and D with a pool between them, checked against one instance.
#
#   examples/run_pd_storage.sh [--store STORE] [--engine NAME] [--model DIR] [--json FILE]
#
#   --store    file, redis or mooncake: a fresh one. Or the URL of a pool that runs. Default: that
#              of PDSTORE_STORE, else of MOONCAKE_MASTER or MOONCAKE_CONFIG_PATH, else file
#   --engine   mini (the default) or vllm
#   --model    or MODEL: a checkpoint; else a tiny one is trained, once, in a minute
#   --json     write the results to a file, too
#
# Exits with 0 only if every answer is that of one instance alone, D computed one token of each
# prompt, and with the switch off D computed everything. The first line names the pool. Logs are in
# logs/. Ctrl-C stops it all.
set -euo pipefail
# shellcheck source=examples/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

engine=mini last=''
for option in "$@"; do
    [[ $option != -h && $option != --help ]] || { usage; exit; }
    [[ $last != --engine ]] || engine=$option
    last=$option
done
[[ -z $MODEL ]] || set -- --model "$MODEL" "$@"
python=$(find_python "$engine")
PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m examples.demo "$@"
