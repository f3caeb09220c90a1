#!/usr/bin/env bash
# Searches NCCL settings with the micro-benchmark alone, on a machine with two or more GPUs, in about three minutes. No Ansible is needed.
#   PYTHON=/opt/torch/.venv/bin/python OUT=/tmp/out tests/gpu/tune_nccl.sh
# PYTHON has torch; OUT gets result.json, table.txt, progress.log and launches.tar.gz. RANKS (2), CANDIDATES (10), ROUNDS (5) say how much.
# NVLink multicast stays off in every set (NCCL_NVLS_ENABLE=0). A second, short search hangs one rank on purpose.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-/opt/torch/.venv/bin/python}
OUT=${OUT:?say where results go}
export PYTHON OUT RANKS=${RANKS:-2} CANDIDATES=${CANDIDATES:-10} ROUNDS=${ROUNDS:-5} NCCL_NVLS_ENABLE=0
mkdir -p "$OUT"
nvidia-smi topo -m | tee "$OUT/topology.txt" || true
exec "$PYTHON" tests/gpu/tune_nccl.py
