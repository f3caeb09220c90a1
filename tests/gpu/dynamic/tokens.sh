#!/usr/bin/env bash
# Says whether a dynamic server gives the tokens of one that never speculates, on a GPU with CUDA graphs, while its mode changes hundreds of times;
# and whether as much is accepted after a return as if it had never been off. The trained pair of models/tiny; acceptance is not pinned.
#   tokens.sh [--rehearse] OUT [DTYPE...]
# OUT      takes tokens-<dtype>.json, logs
# DTYPE    float32 (no token may differ but where two logits are equal) and bfloat16 (ties below AERIE_TOKENS_GAP, 0.25); both by default
#   AERIE_CONTROLLER, AERIE_GPU_*   as bench.sh says;  AERIE_TOKENS   more arguments of tokens.py, such as "--crossings 500"
# Exit status: 0 where nothing differs that should not. Its servers are stopped at the end; others on the card may stay.
set -euo pipefail
started=$SECONDS rehearse='' stages=' '
[ "${1:-}" != --rehearse ] || { rehearse=1; shift; }
[ $# -ge 1 ] || { sed -n '2,/^set/{/^set/!p}' "$0"; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
if [ "$rehearse" ]; then
  variables=$here/tokens_rehearsal.yml quick=(--crossings 20 --requests 30)
else
  variables=$here/tokens.yml quick=()
fi
read -ra more <<<"${AERIE_TOKENS:-}"
types=("${@:-float32}")
[ $# -gt 0 ] || [ "$rehearse" ] || types=(float32 bfloat16)
status=0

[ -e "$root/current/release.json" ] || play "$out/deploy.log" deploy_eagle3.yml --skip-tags start,benchmark,collect,report
for type in "${types[@]}"; do
  export AERIE_TOKENS_DTYPE=$type AERIE_TEST_STEPS=$out/steps-$type.jsonl
  rm -f "$AERIE_TEST_STEPS"
  if play "$out/start-$type.log" tests/gpu/dynamic/start.yml; then
    "$AERIE_CONTROLLER" -u "$here/tokens.py" --root "$root" --out "$out" --dtype "$type" --steps "$AERIE_TEST_STEPS" \
      "${quick[@]}" "${more[@]}" 2>&1 | tee "$out/tokens-$type.log" || status=1
  else
    status=1
  fi
  for name in baseline dynamic; do
    log=$root/instances/tokens-$name/server.log
    [ ! -e "$log" ] || xz -9c "$log" >"$out/server-$name-$type.log.xz"
  done
  [ ! -e "$AERIE_TEST_STEPS" ] || xz -9f "$AERIE_TEST_STEPS"
done
play "$out/stop.log" playbooks/stop.yml
say "ended with $status"
exit "$status"
