#!/usr/bin/env bash
# Tries a wheel in an environment that has nothing else, by the lines of README.md: the extras that
# it installs, its Python block, `pdstore doctor` over each kind of pool, `size`, `bench` and the router.
#
#   scripts/try_wheel.sh WHEEL [WHEEL]...    pdstore's wheel first; others are installed and imported
#
#   TORCH=DIRECTORY   a site-packages directory whose torch is linked in, since a second torch of
#                     several hundred MB would take longer than all the rest; all other packages
#                     are installed
#   PYTHON            makes the environment (python3)
#
# redis:// is tried where there is a redis-server. Nothing of the checkout can be imported.
set -euo pipefail

[[ $# -gt 0 && -f $1 ]] || { echo "usage: scripts/try_wheel.sh WHEEL [WHEEL]..." >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheel=$(realpath "$1")
shift
others=()
for each in "$@"; do others+=("$(realpath "$each")"); done
torch=$(realpath "${TORCH:-/}")

scratch=$(mktemp -d)
servers=()
# leave: ends what was started, and removes the environment.
leave() {
    [[ ${#servers[@]} -eq 0 ]] || kill "${servers[@]}" 2>/dev/null || true
    wait
    rm -rf "$scratch" /dev/shm/*"try_wheel_$$"*
}
trap leave EXIT
cd "$scratch"
unset PYTHONPATH "${!PDSTORE_@}" PD_TRANSFER_VIA_STORAGE

# until_true COMMAND...: waits up to 60 s.
until_true() {
    local end=$((SECONDS + 60))
    until "$@"; do
        ((SECONDS < end)) || { echo "still not so after 60 s: $*" >&2; return 1; }
        sleep 0.1
    done
}

extras=$(grep -om 1 "pip install 'pdstore\[[a-z,]*\]'" "$root/README.md" | grep -o '\[.*\]')
printf '=== pip install %s%s\n' "$(basename "$wheel")" "$extras"
"${PYTHON:-python3}" -m venv venv
if [[ $torch != / ]]; then
    for each in "$torch"/{torch,torch-*.dist-info,torchgen,functorch}; do
        [[ ! -e $each ]] || ln -s "$each" venv/lib/python3*/site-packages
    done
fi
PATH=$scratch/venv/bin:$PATH
pip install -qq --no-compile --disable-pip-version-check -c "$root/constraints.txt" \
    "$wheel$extras" "${others[@]}"
for each in pdstore "${others[@]}"; do
    name=$(basename "$each")
    python -c "import ${name%%-*} as it; print(it.__file__); assert '$scratch' in it.__file__"
done

printf '\n=== README.md, its Python block\n'
python - "$root/README.md" <<'PYTHON'
import re, sys
[code] = re.findall("```python\n(.*?)```", open(sys.argv[1]).read(), re.DOTALL)
exec(code)
assert job.result.num_tokens == 200
PYTHON

pools=("file://$scratch/pool" "shm://try_wheel_$$?size=1GiB")
if command -v redis-server >/dev/null; then
    redis-server --port 0 --unixsocket "$scratch/redis.sock" --save '' --appendonly no \
        --maxmemory 1gb --maxmemory-policy volatile-lru >redis.log &
    servers+=($!)
    until_true test -S redis.sock
    pools+=("redis+unix://$scratch/redis.sock")
fi
for pool in "${pools[@]}"; do
    printf '\n=== pdstore doctor, %s\n' "${pool%%:*}"
    PD_TRANSFER_VIA_STORAGE=1 PDSTORE_STORE=$pool pdstore doctor
done

printf '\n=== pdstore size, pdstore bench\n'
pdstore size --gpu H100 >size.txt && head -3 size.txt
pdstore bench --rounds 1 --store "shm://try_wheel_$$?size=1GiB"

printf '\n=== pdstore-router\n'
pdstore-router --help | head -1
pdstore-router --prefill http://127.0.0.1:1 --decode http://127.0.0.1:1 --port 0 2>router.log &
servers+=($!)
until_true grep -q 'running on http' router.log || { cat router.log >&2; exit 1; }
python - "$(grep -o 'http://127.0.0.1:[0-9]*' router.log | tail -1)" <<'PYTHON'
import json, sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/health", timeout=60)
except urllib.error.HTTPError as error:  # 503, since nothing is there
    said = json.load(error)
print(said["status"], "without P and D")
assert said["status"] == "down"
PYTHON
