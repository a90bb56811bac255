#!/usr/bin/env bash
# Starts a Mooncake pool: a master, and processes that hold memory for it. Ctrl-C stops them all.
#
#   examples/run_mooncake.sh [--host IP] [--port N] [--segment SIZE] [--protocol tcp|rdma] [...]
#   examples/run_mooncake.sh --join MASTER:PORT --host IP [--segment SIZE] [...]
#
#   --host          the address at which other hosts reach this one (127.0.0.1: this host only)
#   --port          of the master (50051)
#   --segment       memory to hold values in (4GB), all of it taken at the start
#   --holders       processes that share it: each copies with one thread (4; with rdma 1)
#   --protocol      tcp (the default), or rdma with --devices
#   --devices       NICs for rdma, comma-separated
#   --client-port   of the first holder (50052); the others have the next ports
#   --metrics-port  of the master's HTTP server (9003), on 127.0.0.1
#   --join          no master: holds memory for the one that runs there
#
# Then, for P and for D:  export PDSTORE_STORE=mooncake://IP:50051?lease=10
# Logs are in logs/. What the flags are for, ports, sizes, security: deploy/mooncake.md
set -euo pipefail
# shellcheck source=examples/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

host=127.0.0.1 port=50051 segment=4GB protocol=tcp devices='' client_port=50052
metrics_port=9003 join='' holders=''
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit ;;
        --host) host=$(value_of "$@"); shift 2 ;;
        --port) port=$(value_of "$@"); shift 2 ;;
        --segment) segment=$(value_of "$@"); shift 2 ;;
        --holders) holders=$(value_of "$@"); shift 2 ;;
        --protocol) protocol=$(value_of "$@"); shift 2 ;;
        --devices) devices=$(value_of "$@"); shift 2 ;;
        --client-port) client_port=$(value_of "$@"); shift 2 ;;
        --metrics-port) metrics_port=$(value_of "$@"); shift 2 ;;
        --join) join=$(value_of "$@"); shift 2 ;;
        *) die "unknown option '$1' (--help shows them)" ;;
    esac
done

# program NAME: prints its path: beside $PYTHON, in the active environment or .venv, or on the PATH.
program() {
    local directory found
    for directory in "${PYTHON:+$(dirname "$PYTHON")}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin}" \
        "$ROOT/.venv/bin"; do
        if [[ -n $directory && -x $directory/$1 ]]; then
            printf '%s' "$directory/$1"
            return
        fi
    done
    found=$(command -v "$1") || die "no $1 here: pip install 'pdstore[mooncake]', or without a" \
        "GPU 'pdstore[mooncake-cpu]', and as root: apt-get install libibverbs1 libcurl4 libnuma1"
    printf '%s' "$found"
}

children=()
stop() {
    trap '' INT TERM HUP
    [[ ${#children[@]} -eq 0 ]] || kill "${children[@]}" 2>/dev/null || true
    wait
}
trap 'exit 130' INT
trap 'exit 143' TERM HUP
trap stop EXIT

# die_with_logs MESSAGE: prints the end of each log, and dies.
die_with_logs() {
    tail -n 5 "$ROOT"/logs/mooncake_*.log >&2
    die "$1"
}

# start NAME COMMAND...: starts a child that writes to logs/NAME.log.
start() {
    local name=$1
    shift
    "$@" >"$ROOT/logs/$name.log" 2>&1 &
    children+=($!)
}

# wait_for PORT NAME CHILD: returns when the child accepts connections.
wait_for() {
    local tries
    for ((tries = 0; tries < 6000; tries++)); do # a large holder takes minutes
        if (: <"/dev/tcp/$host/$1") 2>/dev/null; then
            return
        fi
        kill -0 "$3" 2>/dev/null || die_with_logs "$2 ended"
        sleep 0.1
    done
    die_with_logs "$2 does not answer on port $1"
}

[[ $segment =~ ^([1-9][0-9]*)([KMGT]B)?$ ]] ||
    die "no size: --segment '$segment', write one like 4GB"
case ${BASH_REMATCH[2]} in
    KB) bits=10 ;;
    MB) bits=20 ;;
    GB) bits=30 ;;
    TB) bits=40 ;;
    *) bits=0 ;;
esac
segment_bytes=$((BASH_REMATCH[1] << bits))
[[ $protocol != rdma ]] || holders=${holders:-1} # a NIC copies
[[ ${holders:=4} =~ ^[1-9][0-9]?$ ]] || die "no number from 1 to 99: --holders '$holders'"
holder_bytes=$((segment_bytes / holders))
((holder_bytes >= 16 << 20)) || die "--segment '$segment' is too small: a holder needs 16MB"
mkdir -p "$ROOT/logs"
need_free_port "$client_port"
for ((n = 0; n < holders; n++)); do
    need_free_port $((client_port + n))
    [[ -n $join || $((client_port + n)) != "$port" ]] || die "--port $port is a holder's, too"
done
master=$(program mooncake_master)
holder=$(program mooncake_client)
export MC_LOG_LEVEL=${MC_LOG_LEVEL:-WARNING} MC_TCP_BIND_ADDRESS=$host
export MC_RPC_TIMEOUT_MS=${MC_RPC_TIMEOUT_MS:-3000} # for what the holder itself waits for
export MC_TCP_STATUS_TIMEOUT_SEC=${MC_TCP_STATUS_TIMEOUT_SEC:-2}
export MC_TCP_PROGRESS_TIMEOUT_SEC=${MC_TCP_PROGRESS_TIMEOUT_SEC:-2}
if [[ -z $join ]]; then
    need_free_port "$port"
    need_free_port "$metrics_port"
    start mooncake_master "$master" --rpc_port="$port" --rpc_address="$host" \
        --rpc_thread_num="$(($(nproc) > 3 ? $(nproc) / 2 : 2))" \
        --metrics_port="$metrics_port" --metrics_host=127.0.0.1 \
        --default_kv_lease_ttl=10000 --client_ttl=5 --put_start_discard_timeout_sec=10 \
        --eviction_high_watermark_ratio=0.85 --eviction_ratio=0.1
    wait_for "$port" mooncake_master "${children[0]}"
fi
first=${#children[@]} # of the holders
# perturb: a holder writes to all its memory at the start, and puts need not wait for page faults
export GLIBC_TUNABLES=${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.perturb=85
for ((n = 0; n < holders; n++)); do
    start "mooncake_client_$n" "$holder" --host="$host" --port=$((client_port + n)) \
        --global_segment_size="$holder_bytes" --master_server_address="${join:-$host:$port}" \
        --metadata_server=P2PHANDSHAKE --protocol="$protocol" --device_names="$devices"
done
for ((n = 0; n < holders; n++)); do
    wait_for $((client_port + n)) "mooncake_client_$n" "${children[first + n]}"
done
url="mooncake://${join:-$host:$port}?lease=10"
cat >&2 <<END
ready: holds $segment on this host. For P and for D:
  export PDSTORE_STORE='$url'
END
wait -n || true
die_with_logs "one of them ended"
