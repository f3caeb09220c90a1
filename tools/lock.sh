#!/usr/bin/env bash
# Make requirements/*.txt from requirements/*.in anew: exact versions with hashes, for Python 3.11 and later.
#   lock.sh [uv's options, such as --upgrade]
# Takes uv from PATH, else installs it in a throw-away virtual environment.
set -euo pipefail
cd "$(dirname "$0")/../requirements"
uv=$(command -v uv || true)  # none is no failure: it is installed below
if [ -z "$uv" ]; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  "${PYTHON:-python3}" -m venv "$scratch"
  "$scratch/bin/pip" --quiet install uv
  uv=$scratch/bin/uv
fi
for name in controller dev; do  # dev is constrained by controller.txt: in this order
  "$uv" pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" "$@" "$name.in" --output-file "$name.txt"
done
