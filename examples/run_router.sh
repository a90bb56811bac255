#!/usr/bin/env bash
# Starts the router (`pdstore-router`) in front of run_prefill.sh and run_decode.sh, and shows how to ask it.
#
#   examples/run_router.sh [--port N] [--prefill URL]... [--decode URL]... [--mode relay|concurrent]
#                          [--first-token prefill|decode] [--affinity none|prefix] [--retries N]
#                          [--keep-alive S] [--status PORT] [--traces URL]
#
#   --port     or ROUTER_PORT   where it listens (8000)
#   --prefill                   a P (http://127.0.0.1:$PREFILL_PORT, 8100); may be repeated
#   --decode                    a D (http://127.0.0.1:$DECODE_PORT, 8200); may be repeated
#   --mode                      relay (the default): P, then D. concurrent: both at once
#   --first-token               whose first token the client gets (decode, the default: D's)
#   --affinity                  none (the default): in turns. prefix: where most of it went before
#   --retries                   how often P is asked again when D could not use a hand-off (0)
#   --keep-alive                seconds that idle connections of clients are kept (75)
#   --status                    port of a page on this host about the router (none)
#   --traces                    an OTLP receiver of spans, such as http://127.0.0.1:4318 (none)
#
# Ctrl-C stops it.
set -euo pipefail
# shellcheck source=examples/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mode=relay
prefills=()
decodes=()
options=()
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit ;;
        --port) ROUTER_PORT=$(value_of "$@"); shift 2 ;;
        --prefill) prefills+=(--prefill "$(value_of "$@")"); shift 2 ;;
        --decode) decodes+=(--decode "$(value_of "$@")"); shift 2 ;;
        --mode) mode=$(value_of "$@"); shift 2 ;;
        --first-token | --affinity | --retries | --keep-alive | --status | --traces)
            options+=("$1" "$(value_of "$@")"); shift 2 ;;
        *) die "unknown option '$1' (--help shows them)" ;;
    esac
done
[[ $mode == relay || $mode == concurrent ]] || die "unknown mode '$mode': relay or concurrent"
[[ ${#prefills[@]} -gt 0 ]] || prefills=(--prefill "http://127.0.0.1:$PREFILL_PORT")
[[ ${#decodes[@]} -gt 0 ]] || decodes=(--decode "http://127.0.0.1:$DECODE_PORT")
need_free_port "$ROUTER_PORT"
python=$(find_python)

cat >&2 <<TEXT
router on http://127.0.0.1:$ROUTER_PORT, $mode. When P and D are up (its /health says so), ask it:

  curl http://127.0.0.1:$ROUTER_PORT/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "A block holds the keys and values of", "max_tokens": 24}'

TEXT
cd "$ROOT"
exec "$python" -m pdstore.router --port "$ROUTER_PORT" --mode "$mode" "${prefills[@]}" "${decodes[@]}" \
    "${options[@]}"
