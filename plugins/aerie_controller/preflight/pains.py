"""Who owns each known pain: read from preflight/pains.yml, and looked up where it says that the owner is."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie_controller import PROJECT

# isort: split
from ansible.module_utils.aerie.errors import raise_all
from ansible.module_utils.aerie.host import probes
from ansible.module_utils.aerie.words import listing, near

from . import rules

PAINS = PROJECT / "preflight/pains.yml"
COUNT = 26
KINDS = ("preflight_rule", "launch_check", "release_check", "benchmark_gate", "active_probe")
KEYS = ("symptom", "cause", "owner", "also")
IN_TABLE = "gpu_settings: "


@dataclass(frozen=True)
class Pain:
    """One thing that people ran into, and who finds or prevents it."""

    number: int
    symptom: str
    cause: str
    kind: str
    owner: str
    also: tuple[str, ...] = ()


def load(path: Path = PAINS) -> tuple[Pain, ...]:
    """Return the pains in order; raise one error with everything that is wrong in the file."""
    value = yaml.safe_load(path.read_text())
    entries = value.get("pains") if isinstance(value, Mapping) and set(value) == {"pains"} else None
    problems: list[str] = []
    if not isinstance(entries, Mapping):
        raise_all(["must be a mapping with one key, pains, a mapping by number"], str(path))
        return ()
    problems += [f"pain {number} is missing" for number in range(1, COUNT + 1) if number not in entries]
    for number, entry in entries.items():
        problems += [f"pain {number}: {problem}" for problem in _problems(entry)]
    raise_all(problems, str(path))
    return tuple(
        Pain(number, entry["symptom"], entry["cause"], entry["owner"]["kind"], entry["owner"]["name"], tuple(entry.get("also") or ()))
        for number, entry in sorted(entries.items())
    )


def _problems(entry: Any) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"must be a mapping with {listing(KEYS)}"
        return
    yield from (f"{key}: no such key{near(str(key), KEYS)}" for key in entry if key not in KEYS)
    yield from (f"{key} is missing" for key in KEYS[:3] if not entry.get(key))
    owner = entry.get("owner")
    if not isinstance(owner, Mapping) or set(owner) != {"kind", "name"}:
        yield "owner must be one mapping with kind and name"
    elif owner["kind"] not in KINDS:
        yield f"owner.kind is {owner['kind']!r}: it must be {listing(KINDS, last='or')}"


def orphans(pains: Collection[Pain], rule_ids: Collection[str], project: Path = PROJECT) -> list[str]:
    """Return a problem for each pain whose owner, or one of those that help, isn't there."""
    table = yaml.safe_load((project / "profiles/cuda/gpu_settings.yml").read_text())
    settings = {rule["id"] for rule in table["rules"]}
    problems = []
    for pain in pains:
        there = {
            "preflight_rule": lambda name: name in rule_ids,
            "active_probe": lambda name: name in probes.PROBES,
        }.get(pain.kind, lambda name: _is_function(project / "module_utils/aerie", name))
        if pain.owner.startswith(IN_TABLE):
            found = pain.kind == "launch_check" and pain.owner.removeprefix(IN_TABLE) in settings
        else:
            found = there(pain.owner)
        problems += [] if found else [f"pain {pain.number}: there is no {pain.kind} {pain.owner}"]
        problems += [f"pain {pain.number}: there is no rule {name}" for name in pain.also if name not in rule_ids]
    return problems


def known() -> list[str]:
    """Return what is wrong with the project's own table: nothing, as a test proves."""
    return orphans(load(), [rule.id for rule in rules.load()])


def _is_function(package: Path, name: str) -> bool:
    """Say whether ``folder.module.function`` is a function below ``package`` that something besides itself calls."""
    module, _, function = name.rpartition(".")
    path = package / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return False
    defined = any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.parse(path.read_text()).body)
    return defined and any(_calls(other, function) for other in (*package.rglob("*.py"), *(package.parents[1] / "library").glob("*.py")))


def _calls(path: Path, function: str) -> bool:
    text = path.read_text()
    if f"{function}(" not in text:
        return False
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)) if name == function:
                return True
    return False
