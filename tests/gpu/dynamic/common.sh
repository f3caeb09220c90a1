# What bench.sh and tokens.sh share: the environment of Ansible, the root, a playbook that says little. Sourced with $here and $rehearse set.
# shellcheck shell=bash disable=SC2034,SC2154
cd "$here/../../.."
if [ -z "${AERIE_CONTROLLER:-}" ]; then
  AERIE_CONTROLLER=python3
  [ ! -x .venv/bin/python ] || AERIE_CONTROLLER=$PWD/.venv/bin/python
fi
export ANSIBLE_CONFIG=$PWD/ansible.cfg ANSIBLE_NOCOLOR=1 LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
export ANSIBLE_ACTION_PLUGINS=$here/action_plugins:$PWD/plugins/action
if [ "$rehearse" ]; then
  inventory=inventory/demo root=${AERIE_DYNAMIC_ROOT:-$PWD/.aerie/dynamic}
else
  inventory=tests/gpu/inventory root=${AERIE_GPU_ROOT:-/opt/aerie}
fi

say() { printf '%s  %d s  %s\n' "$(date +%T)" $((SECONDS - started)) "$*"; }
wants() { [[ $stages == *" $1 "* ]]; }

# play LOG PLAYBOOK ARGUMENT...: what it says goes to LOG; its failures are shown.
play() {
  local log=$1 status=0
  shift
  "$AERIE_CONTROLLER" -m ansible playbook -i "$inventory" "$@" -e "@$variables" \
    -e "{\"aerie_root\": \"$root\", \"aerie_results\": \"$out/results\"}" >"$log" 2>&1 </dev/null || status=$?
  say "$1 ended with $status"
  [ "$status" = 0 ] || { grep -A25 -E '^(fatal|failed|ERROR|\[ERROR)' "$log" | cut -c1-400 | tail -60; return "$status"; }
}
