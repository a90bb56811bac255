#!/usr/bin/env bash
# Makes what the units of this folder need, as root: user, folders, virtual environment, units, and
# the examples' environment files, of which it replaces none that is there.
#
#   deploy/systemd/install.sh vllm 'pdstore[vllm,router]'
#
# The arguments go to `pip install`; run it again to upgrade. PYTHON is the interpreter (python3). With
# DESTDIR all files go below that folder, and neither a user is made nor systemd told of the units.
set -euo pipefail
umask 022 # the units' users run what is made here

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DESTDIR=${DESTDIR:-}
PYTHON=${PYTHON:-python3}
etc=$DESTDIR/etc/pdstore
venv=$DESTDIR/opt/pdstore/venv
units=$DESTDIR/etc/systemd/system

if [[ $# -eq 0 ]]; then
    echo "usage: $0 PIP_ARGUMENT..., such as: $0 vllm 'pdstore[vllm,router]'" >&2
    exit 2
fi

# A system user: of others, systemd-logind removes the arena in /dev/shm at a logout. The units make
# its home, in which vLLM keeps weights and compiled kernels.
if [[ -z $DESTDIR ]] && ! id pdstore >/dev/null 2>&1; then
    useradd --system --home-dir /var/lib/pdstore --shell /usr/sbin/nologin pdstore
fi

[[ -x $venv/bin/pip ]] || "$PYTHON" -m venv "$venv"
"$venv/bin/pip" install --upgrade "$@"

install -d -m 755 "$etc" "$units"
for file in "$here"/examples/*.env; do # may hold passwords; systemd reads them as root
    [[ -e $etc/${file##*/} ]] || install -m 600 "$file" "$etc"
done
install -m 644 "$here"/*.service "$units"

if [[ -z $DESTDIR ]]; then
    systemctl daemon-reload
fi
echo "Next: write what is yours into $etc/*.env, then"
echo "  systemctl enable --now pdstore-vllm@prefill pdstore-vllm@decode pdstore-router"
