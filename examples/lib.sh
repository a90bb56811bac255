# shellcheck shell=bash
# Functions and defaults of the example scripts, which source it; it does nothing else.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PREFILL_PORT=${PREFILL_PORT:-8100}
DECODE_PORT=${DECODE_PORT:-8200}
ROUTER_PORT=${ROUTER_PORT:-8000}
MODEL=${MODEL:-}
MODEL_NAME=pdstore-demo

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

# usage: prints the comment at the top of the script, without its first line (#!).
usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}

# value_of "$@": prints the value of the option $1.
value_of() {
    [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value (--help shows how)"
    printf '%s' "$2"
}

# find_python [ENGINE]: prints the first python that has the examples' packages: $PYTHON, the active
# environment's, or that of `make setup` (`make setup-vllm` for vllm). For sglang, which is installed
# where its GPU is: $PYTHON or the first on the PATH.
find_python() {
    local python engine=${1:-mini} setup=setup venv=.venv modules=(torch transformers uvicorn httpx)
    local check='import importlib.util as u, sys
sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))'
    if [[ $engine == sglang ]]; then
        printf '%s' "${PYTHON:-python3}"
        return
    fi
    if [[ $engine == vllm ]]; then
        setup=setup-vllm venv=.venv-vllm modules+=(vllm)
    fi
    for python in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$ROOT/$venv/bin/python"; do
        if [[ -n $python ]] && "$python" -c "$check" "${modules[@]}" 2>/dev/null; then
            printf '%s' "$python"
            return
        fi
    done
    die "no Python environment with the examples' packages; run once: make -C $ROOT $setup"
}

# module_of ENGINE: prints the module that runs an instance of an engine.
module_of() {
    case $1 in
        mini) printf 'examples.mini_engine' ;;
        vllm) printf 'examples.vllm_serve' ;;
        sglang) printf 'examples.sglang_serve' ;;
        *) die "unknown engine '$1': there are mini, vllm and sglang" ;;
    esac
}

need_free_port() {
    local port=$1
    [[ $port =~ ^[0-9]+$ && $port -ge 1 && $port -le 65535 ]] || die "not a port: '$port'"
    if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        die "port $port is in use; choose another with --port"
    fi
}

# find_model PYTHON: prints the checkpoint's directory: $MODEL, or a tiny one that is trained once.
find_model() {
    local python=$1
    if [[ -z $MODEL ]]; then
        [[ -t 2 ]] || export TQDM_MININTERVAL=10 # a log needs no moving bar
        (cd "$ROOT" && "$python" -m examples.make_checkpoint) | tail -n 1
        return
    fi
    [[ -f $MODEL/config.json ]] || die "no checkpoint in '$MODEL' (no config.json there)"
    (cd "$MODEL" && pwd)
}

# choose_store: takes the pool that Mooncake's variables name, if no store is named.
choose_store() {
    local name
    for name in MOONCAKE_CONFIG_PATH MOONCAKE_MASTER MOONCAKE_MASTER_SERVER_ADDR; do
        if [[ -z ${PDSTORE_STORE:-} && -n ${!name:-} ]]; then
            PDSTORE_STORE=mooncake://
            printf 'pool mooncake:// (%s=%s)\n' "$name" "${!name}" >&2
        fi
    done
}

# serve ROLE PORT OPTIONS...: replaces the script by one engine instance that uses the pool.
serve() {
    local role=$1 port=$2 engine=mini dry_run='' python module model options=()
    shift 2
    while [[ $# -gt 0 ]]; do
        case $1 in
            -h | --help) usage; exit ;;
            --port) port=$(value_of "$@"); shift 2 ;;
            --store) PDSTORE_STORE=$(value_of "$@"); shift 2 ;;
            --model) MODEL=$(value_of "$@"); shift 2 ;;
            --engine) engine=$(value_of "$@"); shift 2 ;;
            --dry-run) dry_run=--dry-run; shift ;;
            --) shift; break ;;
            *) die "unknown option '$1' (--help shows them)" ;;
        esac
    done
    module=$(module_of "$engine")
    [[ -z $dry_run || $engine == sglang ]] || die "--dry-run is for --engine sglang"
    [[ $engine != sglang || -n $MODEL ]] || die "sglang needs a checkpoint: --model DIR"
    [[ -n $dry_run ]] || need_free_port "$port"
    python=$(find_python "$engine")
    [[ $engine != vllm || -n $MODEL ]] || options=(--tiny) # for the tiny checkpoint only
    [[ -z $dry_run ]] || options=("$dry_run")
    model=$(find_model "$python")
    export PD_TRANSFER_VIA_STORAGE=1
    choose_store
    [[ -z ${PDSTORE_STORE:-} ]] || export PDSTORE_STORE
    printf '%s on http://127.0.0.1:%s with PD_TRANSFER_VIA_STORAGE=1 (set by this script), model %s\n' \
        "$role" "$port" "$model" >&2
    cd "$ROOT" || die "no directory $ROOT"
    exec "$python" -m "$module" --role "$role" --port "$port" --model "$model" \
        --served-model-name "$MODEL_NAME" "${options[@]}" "$@"
}
