#!/usr/bin/env bash
# Check types of everything in Python. The cores are imported as ansible.module_utils.aerie, which only Ansible makes true:
# a directory with links, first on mypy's path, makes it true for mypy too.
#   typecheck.sh [mypy's options]
set -euo pipefail
cd "$(dirname "$0")/.."
cache=.cache/mypy
view=$cache/path/ansible/module_utils
mkdir -p "$view"
: > "$cache/path/ansible/__init__.pyi"
: > "$view/__init__.pyi"
ln -sfn ../../../../../module_utils/aerie "$view/aerie"
shopt -s nullglob
files=("$view/aerie" plugins library/*.py tools/*.py tests/runs.py tests/ports.py tests/machine_guard.py tests/isolated_machine.py tests/targets/booted_hosts.py tests/faults/stepping.py tests/faults/package.py)
export MYPYPATH=$cache/path:plugins:library:tools:tests:tests/targets:tests/faults
exec "${MYPY:-.venv/bin/mypy}" --cache-dir "$cache/cache" "$@" "${files[@]}"
