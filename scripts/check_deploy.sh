#!/usr/bin/env bash
# Checks the files of deploy/ against the schemas of the programs that read them.
# PATH has hadolint, check-jsonschema and kubernetes-validate (group `dev`); kubectl and
# systemd-analyze come with the system, and where they are missing a line says what was not checked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../deploy"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

has() {
    command -v "$1" >/dev/null || { echo "not checked, $1 is not installed: $2" >&2; return 1; }
}

quietly() {
    "$@" >"$scratch/said" 2>&1 || { cat "$scratch/said" >&2; exit 1; }
}

quietly hadolint Dockerfile
quietly check-jsonschema --builtin-schema vendor.github-workflows ../.github/workflows/*.yml
for file in compose*.yaml; do # without compose's own tags, which say how two files are joined
    sed -E 's/: !(reset|override) /: /' "$file" >"$scratch/$file"
done
quietly check-jsonschema --builtin-schema vendor.compose-spec "$scratch"/compose*.yaml
if has promtool deploy/prometheus; then
    quietly promtool check config prometheus/prometheus.yaml
fi
# valid FILE: each of Kubernetes' own objects has a schema there; the operator's two have ours.
valid() {
    kubernetes-validate --strict --kubernetes-version 1.31 "$1" >"$scratch/said" 2>&1 \
        || { cat "$scratch/said" >&2; exit 1; }
    ! grep WARN "$scratch/said" | grep -v 'api version monitoring.coreos.com/v1' >&2 || exit 1
}

quietly check-jsonschema --schemafile ../tests/deploy/operator.schema.json \
    kustomize/components/podmonitor/podmonitor.yaml kustomize/components/alerts/rules.yaml
if has kubectl deploy/kustomize; then
    for overlay in kustomize/overlays/*/; do
        kubectl kustomize "$overlay" >"$scratch/objects.yaml"
        valid "$scratch/objects.yaml"
        # With all components, as a user's own overlay lists them; kustomize wants relative paths.
        {
            printf 'apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n'
            printf 'resources:\n  - %s\ncomponents:\n' "$(realpath --relative-to="$scratch" "$overlay")"
            realpath --relative-to="$scratch" kustomize/components/*/ | sed 's/^/  - /'
        } >"$scratch/kustomization.yaml"
        kubectl kustomize "$scratch" >"$scratch/objects.yaml"
        valid "$scratch/objects.yaml"
    done
fi
if has systemd-analyze deploy/systemd; then
    # The units' programs are not here: that they are missing is no problem.
    problems=$(systemd-analyze verify systemd/*.service 2>&1 | grep -v 'is not executable' || true)
    [[ -z $problems ]] || { echo "$problems" >&2; exit 1; }
fi
