#!/usr/bin/env bash
# Compares three servers on one GPU, cell by cell: baseline, EAGLE-3 with pinned (simulated) acceptance, and dynamic. README.md beside this says
# how it is called on a lent machine. A call that is cut leaves usable data, and the next one goes on; servers stay up until "stop".
#   bench.sh [--rehearse] [--budget SECONDS] BACKEND OUT [STAGE...]
# BACKEND   triton or flashinfer; with --rehearse any name
# OUT       takes records.jsonl (raw, as it goes), analysis.json, table.md, plot.svg/png, gpu.csv, logs
# STAGE     deploy, start, measure, trace, report, stop; by default start measure report, after deploy where there is no release yet
# --budget  seconds of this call after which nothing new is begun (480)
#   AERIE_CONTROLLER      a Python that has ansible-core (.venv/bin/python, else python3)
#   AERIE_GPU_*           as tests/gpu/inventory says;  AERIE_DYNAMIC_THRESHOLD as servers.yml says
#   AERIE_BENCH           more arguments of bench.py, such as "--passes 8 --window 3 --extra plain"
set -euo pipefail
started=$SECONDS rehearse='' budget=480 status=0
while [[ ${1:-} == --* ]]; do
  case $1 in
    --rehearse) rehearse=1; shift ;;
    --budget) budget=$2; shift 2 ;;
    *) sed -n '2,/^set/{/^set/!p}' "$0"; exit 2 ;;
  esac
done
[ $# -ge 2 ] || { sed -n '2,/^set/{/^set/!p}' "$0"; exit 2; }
backend=$1 out=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
stages=" ${*:-start measure report} "
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

AERIE_DYNAMIC_BACKEND=$backend
export AERIE_DYNAMIC_BACKEND
if [ "$rehearse" ]; then
  variables=$here/servers_rehearsal.yml
  quick=(--levels 1,2,6 --passes 2 --settle 0.3 --window 1.5 --input-len 16 --output-len 48 --changing-output-len 24 --ramp 8 --step 2.5 --steps 1,6,2)
else
  variables=$here/servers.yml quick=()
fi
read -ra more <<<"${AERIE_BENCH:-}"

if wants deploy || [ ! -e "$root/current/release.json" ]; then
  play "$out/deploy.log" deploy_eagle3.yml --skip-tags start,benchmark,collect,report
fi
if wants start; then
  play "$out/start.log" tests/gpu/dynamic/start.yml
  say "servers ready"
fi
if wants measure; then
  "$AERIE_CONTROLLER" -u "$here/bench.py" --root "$root" --out "$out" --backend "$backend" --budget $((budget - SECONDS + started)) \
    "${quick[@]}" "${more[@]}" 2>&1 | tee -a "$out/bench.log" || status=1
fi
if wants trace; then
  "$AERIE_CONTROLLER" -u "$here/compare_traces.py" --root "$root" --out "$out" ${rehearse:+--concurrency 6 --steps 8} 2>&1 | tee -a "$out/trace.log" ||
    status=1
fi
if wants report; then
  "$AERIE_CONTROLLER" "$here/plot.py" "$out" || status=1
fi
if wants stop; then
  play "$out/stop.log" playbooks/stop.yml
fi
for name in baseline eagle3 dynamic; do
  log=$root/instances/$name/server.log
  [ ! -e "$log" ] || xz -9c "$log" >"$out/server-$name.log.xz"
done
say "ended with $status"
exit "$status"
