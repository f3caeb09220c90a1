#!/usr/bin/env bash
# Compares tokens as tokens.sh --rehearse does, on the CPU, in other releases of SGLang than the CPU profile's: in 0.5.16 to 0.5.22. About four
# minutes and 1.5 GB for each.
#   releases.sh OUT VERSION...
# OUT      takes for each version its environment, its host's root and what tokens.sh leaves; the environment and the root are made anew
#   PYTHON                one that has wheels of torch (python3.11);  AERIE_CONTROLLER, AERIE_DYNAMIC_PORT   as tokens.sh says
# Exit status: 0 where nothing differs that should not, in any of them.
set -euo pipefail
started=$SECONDS rehearse=1 stages=' ' status=0
[ $# -ge 2 ] || { sed -n '2,/^set/{/^set/!p}' "$0"; exit 2; }
for version in "${@:2}"; do
  [[ $version =~ ^0\.5\.(1[6-9]|2[0-2])$ ]] || { echo "releases.sh: $version is none of 0.5.16 to 0.5.22, for which it is made" >&2; exit 2; }
done
all=$(mkdir -p "$1" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
variables=$here/tokens_rehearsal.yml

for version in "$@"; do
  out=$all/$version environment=$all/$version/environment
  export AERIE_DYNAMIC_ROOT=$out/root
  root=$AERIE_DYNAMIC_ROOT
  rm -rf "$environment" "$root"
  mkdir -p "$out"
  "${PYTHON:-python3.11}" -m venv "$environment"
  "$environment/bin/python" "$here/releases.py" "$version" >"$out/environment.log" 2>&1 || { tail -5 "$out/environment.log"; status=1; continue; }
  play "$out/deploy.log" deploy_eagle3.yml --skip-tags start,benchmark,collect,report -e "sglang_release_adopt_environment=$environment/bin/python" &&
    "$here/tokens.sh" --rehearse "$out" || status=1
  say "$version: $(tail -n 1 "$out/tokens-float32.log" 2>/dev/null || echo "no answers")"
done
exit "$status"
