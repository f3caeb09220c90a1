#!/usr/bin/env bash
# Surveys this machine and tries its GPUs, one or two of them, as playbooks/preflight.yml does on any host; changes nothing outside OUT.
#   probes.sh [OUT]        OUT (or $OUT) takes the playbook's log, the survey's and the probes' results as JSON, and nvidia-smi's words
#   AERIE_GPU_PYTHON       a Python that has torch (python3)
#   AERIE_CONTROLLER       a Python that has ansible-core (.venv/bin/python, else python3)
#   AERIE_PROBE_SECONDS    how long each probe may take (120)
# Exit status: that of the probes, whatever the rules find; on a machine without pciutils or with NVLink some of them do.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-${OUT:?probes.sh OUT: where should the results go?}}" && cd "${1:-$OUT}" && pwd)
export AERIE_GPU_PYTHON=${AERIE_GPU_PYTHON:-$(command -v python3)}
if [ -z "${AERIE_CONTROLLER:-}" ]; then
  AERIE_CONTROLLER=python3
  [ ! -x .venv/bin/python ] || AERIE_CONTROLLER=.venv/bin/python
fi
export ANSIBLE_CONFIG=$PWD/ansible.cfg ANSIBLE_NOCOLOR=1 LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
# Multicast over NVLink reaches past a virtual machine to GPUs that others use: off, unless it was set on purpose.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
seconds=${AERIE_PROBE_SECONDS:-120}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# nvidia-smi's words are kept for people; whether the GPUs work is for the probes to say.
if command -v nvidia-smi >/dev/null; then
  nvidia-smi >"$out/nvidia-smi-before.txt" || true
  nvidia-smi topo -m >"$out/topology.txt" || true
fi
play() {
  "$AERIE_CONTROLLER" -m ansible playbook -i tests/gpu/inventory "$@" \
    -e "{\"aerie_root\": \"$scratch/root\", \"aerie_results\": \"$out\", \"__gpu_out\": \"$out\", \"__gpu_seconds\": $seconds}"
}
status=0
play tests/gpu/probes.yml 2>&1 | tee "$out/probes.log" || status=$?
if [ -f playbooks/preflight.yml ]; then
  # The rules over a survey of its own; the probes were just run, and the wedge check alone is quick.
  play playbooks/preflight.yml -e '{"preflight_active": true, "preflight_probes": ["wedge"], "preflight_fail_on": "never"}' \
    2>&1 | tee "$out/preflight.log" || echo "preflight ended with $?" | tee -a "$out/preflight.log"
fi
! command -v nvidia-smi >/dev/null || nvidia-smi >"$out/nvidia-smi-after.txt" || true
exit "$status"
