# shellcheck shell=bash
# Sourced: a fresh Debian or Ubuntu in a directory, which goes away with all mounts and processes.
# It uses the package mirrors, proxies and certificates that this machine is set up with.

# in_namespace "$@": starts the calling script again, with mounts of its own. Sets `root`.
in_namespace() {
    [[ $(id -u) -eq 0 ]] || { echo "$0 needs root: it makes a file system and mounts" >&2; exit 2; }
    if [[ -z ${IN_NAMESPACE:-} ]]; then
        scratch=$(mktemp -d)
        trap 'rm -rf --one-file-system "$scratch"' EXIT
        IN_NAMESPACE=$scratch unshare --mount --pid --fork --kill-child "$0" "$@"
        exit
    fi
    mount --make-rprivate /
    root=$IN_NAMESPACE/root
    mkdir "$root"
    mount --bind "$root" "$root" # without a mount there, tests inside can make no namespaces
}

# What makes this machine reach its mirrors: for apt, for pip, and the paths that pip's options name,
# with what lies beside them: an index often points there.
mirror_paths() {
    [[ $(. /etc/os-release && echo "$VERSION_CODENAME") != "$suite" ]] || echo /etc/apt
    printf '%s\n' /etc/pip.conf "$HOME/.config/pip" "$HOME/.pip" \
        /etc/resolv.conf /etc/hosts /etc/ssl/certs /usr/share/ca-certificates \
        /usr/local/share/ca-certificates
    { python3 -m pip config list 2>/dev/null; env | grep '^PIP_'; } \
        | grep -oE '(file://)?/[^ ,:'\''"\\]+' | sed -E 's,^file://,,; s,(.)/[^/]+$,\1,'
}

# The variables of proxies, certificates and pip; nothing else of this environment.
mirror_variables() {
    env | grep -iE '^([a-z]+_proxy|pip_[a-z_]+|ssl_cert_[a-z]+|[a-z]+_ca_bundle)=' || true
}

bound=()
bind() {
    local path=$1 other
    [[ -e $path ]] || return 0
    for other in "${bound[@]}"; do
        [[ $path/ != "$other"/* ]] || return 0
    done
    bound+=("$path")
    if [[ -d $path ]]; then
        mkdir -p "$root$path"
    else
        mkdir -p "$(dirname "$root$path")"
        rm -f "$root$path" && touch "$root$path"
    fi
    mount --bind -o ro "$path" "$root$path"
}

# make_system PACKAGES [OPTION]... [MIRROR [SCRIPT]]: makes the release `suite` of a distribution.
make_system() {
    local packages=$1 options=()
    shift
    while [[ ${1:-} == -* ]]; do options+=("$1"); shift; done
    debootstrap --variant=minbase --include="$packages" "${options[@]}" "$suite" "$root" "$@" \
        >"$IN_NAMESPACE/log" || { tail "$IN_NAMESPACE/log"; exit 1; }
    mount -t proc proc "$root/proc"
    mount -t sysfs -o ro sysfs "$root/sys" # lscpu reads it, which vLLM asks for the cores
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    bound=()
    while read -r path; do bind "$path"; done < <(mirror_paths | sort -u)
}

# inside COMMAND...: runs it in the fresh system, in the checkout.
inside() {
    local variables=()
    mapfile -t variables < <(mirror_variables)
    env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "${variables[@]}" \
        chroot "$root" /bin/sh -c 'cd /srv/pdstore && exec "$@"' sh "$@" </dev/null
}
