#!/usr/bin/env bash
# Run `ansible-test sanity` on the project's modules. ansible-test knows collections only, so it gets a throw-away one:
# library/ as plugins/modules, module_utils/aerie as plugins/module_utils/aerie, imports and names of modules rewritten to match.
# Action plugins are left out: they import plugins/aerie_controller by path, which no collection can hold; ruff and mypy check them.
#   ansible_sanity.sh [TEST...]     default: the tests below
# ansible-test makes a virtual environment for some tests and installs what it pins with pip's ordinary configuration; they are
# kept in .cache/sanity, so that only the first run needs an index.
set -euo pipefail
cd "$(dirname "$0")/.."
project=$PWD
venv=${VENV:-$project/.venv}
# What ruff, mypy and yamllint check already is not asked again: pep8, pylint, yamllint.
tests=("${@:-}")
[ -n "${tests[0]}" ] || tests=(validate-modules import compile shebang line-endings symlinks empty-init no-illegal-filenames ansible-doc)
selection=()
for test in "${tests[@]}"; do selection+=(--test "$test"); done

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
collection=$copy/ansible_collections/local/aerie
mkdir -p "$collection/plugins/module_utils" "$collection/meta"
cp -r library "$collection/plugins/modules"
cp -r module_utils/aerie "$collection/plugins/module_utils/aerie"
find "$collection" -name __pycache__ -prune -exec rm -rf {} +
grep -rlZ 'ansible\.module_utils\.aerie' "$collection/plugins" |
  xargs -0 -r sed -i 's/ansible\.module_utils\.aerie/ansible_collections.local.aerie.plugins.module_utils.aerie/g'
# inside a collection a module is named in full, also in documentation: M(name), O(name#module:option)
for module in library/*.py; do
  name=$(basename "$module" .py)
  sed -i -E "s/M\($name\)/M(local.aerie.$name)/g; s/\b(O|RV)\($name#module:/\1(local.aerie.$name#module:/g" "$collection"/plugins/modules/*.py
done
printf 'namespace: local\nname: aerie\nversion: 1.0.0\nreadme: README.md\nauthors: [Aerie contributors]\n' > "$collection/galaxy.yml"
printf -- "---\nrequires_ansible: '>=2.19.0'\n" > "$collection/meta/runtime.yml"
# hosts' modules need Python 3.11; ansible-test would also import them with older ones
mkdir -p "$collection/tests"
printf 'modules:\n  python_requires: ">=3.11"\n' > "$collection/tests/config.yml"

python=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# its own home: virtual environments and pip's bootstrap live there
export HOME=$project/.cache/sanity
mkdir -p "$HOME/.ansible/test/cache"
# ansible-test fetches a script that installs pip from an address that may be out of reach; the standard library can do the same
for version in 24_2 25_2 25_3 26_0; do
  printf 'import runpy, sys\nsys.argv = ["ensurepip", "--default-pip"]\nrunpy.run_module("ensurepip", run_name="__main__")\n' \
    > "$HOME/.ansible/test/cache/get_pip_$version.py"
done
cd "$collection"
git init -q .
git add -A
PATH=$venv/bin:$PATH ansible-test sanity --local --python "$python" --color no --truncate 0 "${selection[@]}"
