#!/usr/bin/env bash
# Makes sure that the system has what pip cannot install, before anything else is done.
#
#   scripts/system_packages.sh [NEED]... [--wanted NEED...]
#
#   NEED: venv, compiler, redis, mooncake (without one: these); monitoring, browser, fuse, units,
#         network, bare, arm
#
# Does nothing where all is there. Installs what is missing by apt-get as root or by a sudo that
# asks for no password; elsewhere says in one sentence what to install, and exits with 1. Packages
# after --wanted are installed in the same way; where that fails, the tests that need them skip.
# `make` calls it; PYTHON is the interpreter that makes the virtual environments (python3).
set -euo pipefail

PYTHON=${PYTHON:-python3}
SBIN=/sbin:/usr/sbin # not on every user's PATH

# The only list of packages: need, Debian package, and what succeeds where it is there.
PACKAGES='
venv      python3-venv  has_venv
compiler  make          has_program make
compiler  g++           has_program c++
redis     redis-server  has_program redis-server
mooncake  libibverbs1   has_library libibverbs.so.1
mooncake  libcurl4      has_library libcurl.so.4
mooncake  libnuma1      has_library libnuma.so.1
monitoring  prometheus               has_program prometheus
monitoring  prometheus-alertmanager  has_program prometheus-alertmanager
browser     chromium                 has_program chromium
fuse        fuse3                    has_program fusermount3
units       systemd                  has_program systemd-analyze
network     iproute2                 has_program ip
bare        debootstrap              has_program debootstrap
arm         qemu-user-static         has_program qemu-aarch64-static
arm         libc6-arm64-cross        test -e /usr/aarch64-linux-gnu
'

has_venv() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }
has_program() { PATH=$PATH:$SBIN command -v "$1" >/dev/null; }
# grep reads to the end: one that stops at the first match may end ldconfig by a signal, which counts.
has_library() { PATH=$PATH:$SBIN ldconfig -p | grep "^[[:space:]]*${1//./\\.} " >/dev/null; }

# missing_of NEED...: the packages that are not there, a line each.
missing_of() {
    local need package check
    while read -r need package check; do
        # shellcheck disable=SC2086 # the check is a command with arguments
        [[ " $* " != *" $need "* ]] || $check || printf '%s\n' "$package"
    done <<<"$PACKAGES"
}

# as_root: the words that run a command as root here; fails where none do.
as_root() {
    if [[ $(id -u) -eq 0 ]]; then
        printf 'env'
    elif has_program sudo && sudo -n true 2>/dev/null; then
        printf 'sudo -n'
    else
        return 1
    fi
}

# A redis may also come from TEST_REDIS_URL or Docker: tests that need a server of their own skip.
has_redis_elsewhere() {
    [[ -n ${TEST_REDIS_URL:-} ]] || timeout 5 docker info >/dev/null 2>&1
}

install() {
    local root said
    has_program apt-get && root=$(as_root) || return 1
    printf 'installing system packages: %s\n' "$*" >&2
    # shellcheck disable=SC2086 # one word or two
    said=$({ $root apt-get update -qq && $root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@"; } 2>&1) && return
    printf '%s\n' "$said" >&2
    return 1
}

main() {
    local missing=()
    mapfile -t missing < <(missing_of "$@")
    [[ ${#missing[@]} -gt 0 ]] || return 0
    if install "${missing[@]}"; then
        mapfile -t missing < <(missing_of "$@")
        [[ ${#missing[@]} -gt 0 ]] || return 0
    elif [[ ${missing[*]} == redis-server ]] && has_redis_elsewhere; then
        return 0
    fi
    printf 'missing system packages; as root: apt-get update && apt-get install -y %s\n' \
        "${missing[*]}" >&2
    return 1
}

want() {
    local missing
    mapfile -t missing < <(missing_of "$@")
    [[ ${#missing[@]} -eq 0 ]] || install "${missing[@]}" || true
}

needs=()
while [[ $# -gt 0 && $1 != --wanted ]]; do
    needs+=("$1")
    shift
done
[[ ${#needs[@]} -gt 0 ]] || needs=(venv compiler redis mooncake)
main "${needs[@]}"
[[ $# -eq 0 ]] || want "${@:2}"
