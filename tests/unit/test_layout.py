"""The project keeps its own shape: roles declare what they take, modules document what they do, nothing names one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
MODULES = sorted((ROOT / "library").glob("*.py"))
ACTIONS = sorted((ROOT / "plugins/action").glob("*.py"))
PLAYBOOKS = [ROOT / "deploy_eagle3.yml", *sorted((ROOT / "playbooks").glob("*.yml"))]
# Built from parts, so that this file does not name what it forbids
MACHINE_PATHS = ("/wor" + "k/", "/tmp/la" + "b", "/roo" + "t/.", "/opt/py" + "pi", "/opt/whe" + "els")
REGISTRY_HOSTS = ("pypi" + ".org", "pythonhosted" + ".org", "deb.debian" + ".org", "registry.npmjs" + ".org")


def tracked_files() -> list[Path]:
    """What git has or would take: tracked files and new ones that are not ignored."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text()) if path.exists() else None


def role_options(role: Path) -> dict[str, Any]:
    """The options of all entry points of a role."""
    entries = load(role / "meta/argument_specs.yml")["argument_specs"].values()
    return {name: option for entry in entries for name, option in entry.get("options", {}).items()}


def literals(module: Path) -> dict[str, Any]:
    """DOCUMENTATION, EXAMPLES and RETURN of a module, parsed."""
    found = {}
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = yaml.safe_load(node.value.value) if isinstance(node.value.value, str) else node.value.value
    return found


def without_samples(values: dict[str, Any], above: str = "") -> list[str]:
    """Names of return values that have neither a sample nor, below them, values that all have one."""
    missing = []
    for name, value in values.items():
        if "contains" in value:
            missing += without_samples(value["contains"], f"{above}{name}.") if "sample" not in value else []
        elif "sample" not in value:
            missing.append(f"{above}{name}")
    return missing


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_role_declares_exactly_the_variables_that_it_has_defaults_for(role):
    defaults = load(role / "defaults/main.yml") or {}
    assert set(defaults) == set(role_options(role))


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_role_owns_the_prefix_of_its_variables(role):
    defaults = load(role / "defaults/main.yml") or {}
    assert [name for name in defaults if not name.startswith(f"{role.name}_")] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_every_variable_of_a_role_is_described(role):
    assert [name for name, option in role_options(role).items() if not option.get("description")] == []


@pytest.mark.parametrize("role", [role for role in ROLES if role.name != "aerie"], ids=lambda path: path.name)
def test_role_is_validated_and_leased_through_the_role_aerie(role):
    dependencies = (load(role / "meta/main.yml") or {}).get("dependencies", [])
    assert "aerie" in [entry if isinstance(entry, str) else entry.get("role") for entry in dependencies]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_module_documents_itself(module):
    texts = literals(module)
    documentation = texts["DOCUMENTATION"]
    assert documentation["module"] == module.stem
    assert {"check_mode", "diff_mode"} <= set(documentation["attributes"])
    assert all(attribute.get("support") for attribute in documentation["attributes"].values())
    assert any(module.stem in example for example in texts["EXAMPLES"]), "no example uses the module"
    assert texts["RETURN"], "RETURN is empty"
    assert without_samples(texts["RETURN"]) == []


@pytest.mark.parametrize("action", ACTIONS, ids=lambda path: path.stem)
def test_action_plugin_belongs_to_a_module_that_documents_it(action):
    assert (ROOT / "library" / action.name).exists()


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.name)
def test_playbook_says_first_what_it_does(playbook):
    lines = playbook.read_text().splitlines()
    assert lines[0] == "---"
    assert re.match(r"# \S.{20,}", lines[1]), "the first line after --- is a comment for a person"


def test_only_ansible_builtin_is_used():
    ours = {path.stem for path in (*MODULES, *ACTIONS)}
    foreign = set()
    for path in (*PLAYBOOKS, *(ROOT / "roles").rglob("tasks/*.yml"), *(ROOT / "roles").rglob("handlers/*.yml")):
        for collection in re.findall(r"^\s*(?:- )?((?!ansible\.builtin\.)\w+\.\w+\.\w+):", path.read_text(), re.MULTILINE):
            foreign.add(collection)
    assert foreign - ours == set()


@pytest.mark.parametrize(("what", "words"), [("paths of one machine", MACHINE_PATHS), ("hosts of registries", REGISTRY_HOSTS)])
def test_nothing_names(what, words):
    hits = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked_files()
        for word in words
        if path.stat().st_size < 4 << 20 and word.encode() in path.read_bytes()
    ]
    assert hits == [], f"{what} in the tree"


def test_the_cores_know_nothing_of_ansible():
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in sorted((ROOT / "module_utils/aerie").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.startswith("ansible") and not name.startswith("ansible.module_utils.aerie") and name != "ansible.module_utils"
    ]
    assert offenders == []


def test_make_help_tells_every_target_a_person_types():
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: (\S+)$", makefile, re.MULTILINE))
    described = set(re.findall(r"^([a-z0-9-]+):.*## .+$", makefile, re.MULTILINE))
    assert phony == described
