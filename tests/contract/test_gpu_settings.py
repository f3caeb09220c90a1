"""The table of GPU settings against the real wheels: every citation is there, and every flag and variable is one that the version has."""

from __future__ import annotations

import ast
import fnmatch
import functools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import wheels
import yaml

PROJECT = Path(__file__).parents[2]
TABLE = yaml.safe_load((PROJECT / "profiles/cuda/gpu_settings.yml").read_text())
RULES: list[dict[str, Any]] = TABLE["rules"]
OPTIONS: dict[str, dict[str, Any]] = TABLE["options"]
# All releases that were looked at, in order; a rule's first and last version are among them.
VERSIONS = (
    "0.5.9",
    "0.5.10",
    "0.5.10.post1",
    "0.5.11",
    "0.5.12.post1",
    "0.5.13",
    "0.5.14",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)

from ansible.module_utils.aerie.serving import gpu_settings  # noqa: E402
from ansible.module_utils.aerie.specifiers import Specifier, Version  # noqa: E402

pytestmark = pytest.mark.contract


@functools.cache
def archive(package: str, version: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheels.wheel(package, version))


def text(package: str, version: str, name: str) -> str:
    return archive(package, version).read(name).decode()


def function(source: str, name: str) -> str:
    """Return the text of the functions called ``name``, wherever they are defined."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"no function {name}"
    return "\n".join(ast.get_source_segment(source, node) or "" for node in found)


def check(source: Mapping[str, Any]) -> None:
    if "report" in source:
        return
    if "measurement" in source:
        assert source["says"] in (PROJECT / source["measurement"]).read_text(), source
        return
    package, version = source["wheel"].split()
    names = archive(package, version).namelist()
    if "metadata" in source:
        (name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        assert source["metadata"] in text(package, version, name)
    elif "absent" in source or "present" in source:
        found = fnmatch.filter(names, source.get("present") or source["absent"])
        assert bool(found) == ("present" in source), found[:3]
    else:
        content = text(package, version, source["file"])
        if "function" in source:
            content = function(content, source["function"])
        assert source.get("says", "") in content, source


def sources() -> Iterator[Any]:
    for rule in RULES:
        yield from (pytest.param(source, id=f"{rule['id']}-{number}") for number, source in enumerate(rule["source"]))
        moot = (rule.get("moot_since") or {}).get("source") or []
        yield from (pytest.param(source, id=f"{rule['id']}-moot-{number}") for number, source in enumerate(moot))
    for name, option in OPTIONS.items():
        yield from (pytest.param(source, id=f"{name}-{number}") for number, source in enumerate(option["source"]))


@pytest.mark.parametrize("source", list(sources()))
def test_what_a_rule_cites_is_in_the_wheel(source):
    check(source)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.get("moot_since")], ids=lambda rule: rule["id"])
def test_a_rule_ends_with_the_version_that_made_it_moot(rule):
    versions, moot = Specifier.parse(rule["versions"]), Version.parse(rule["moot_since"]["version"])
    assert moot not in versions
    before = [version for text in VERSIONS if (version := Version.parse(text)) < moot]
    assert before[-1] in versions


# The server's arguments, read from the sources: the newest need packages that are not here to be imported.


@functools.cache
def arguments(version: str) -> dict[str, tuple[str, ...] | None]:
    """Return each flag of a version, without dashes in front, with its choices (None: any value or none known)."""
    found: dict[str, tuple[str, ...] | None] = {}
    names = ["sglang/srt/server_args.py"]
    names += [name for name in archive("sglang", version).namelist() if name.startswith("sglang/srt/arg_groups/") and name.endswith(".py")]
    trees = [ast.parse(text("sglang", version, name)) for name in names]
    lists: dict[str, Any] = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.endswith("_CHOICES"):
                lists[node.targets[0].id] = [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                choices = _choices(node, lists)
                flags = [one.value for one in node.args if isinstance(one, ast.Constant) and str(one.value).startswith("--")]
                found |= {str(flag).removeprefix("--"): choices for flag in flags}
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_argument(field.annotation):
                        found |= _field(field.target.id, field.annotation, lists)
    return found


def _is_argument(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name) and annotation.value.id == "A"


def _field(name: str, annotation: ast.expr, lists: Mapping[str, Any]) -> dict[str, tuple[str, ...] | None]:
    call = next((node for node in ast.walk(annotation) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Arg"), None)
    words = {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
    if "no_cli" in words:
        return {}
    written = words.get("cli_name")
    flag = str(written.value).removeprefix("--") if isinstance(written, ast.Constant) else name.replace("_", "-")
    return {flag: _choices(call, lists) if call else None}


def _choices(call: ast.Call, lists: Mapping[str, Any]) -> tuple[str, ...] | None:
    for keyword in call.keywords:
        if keyword.arg == "choices":
            if isinstance(keyword.value, ast.Name):
                return tuple(lists[keyword.value.id]) if keyword.value.id in lists else None
            return tuple(str(one.value) for one in ast.walk(keyword.value) if isinstance(one, ast.Constant))
    return None


def meant(versions: str) -> list[str]:
    return [version for version in VERSIONS if Version.parse(version) in Specifier.parse(versions)]


def test_the_reader_of_arguments_finds_those_of_all_three_forms():
    for version in ("0.5.9", "0.5.15.post1", "0.5.23"):
        found = arguments(version)
        assert len(found) > 300, version
        assert {"model-path", "fp8-gemm-backend", "speculative-num-steps"} <= set(found), version
        assert "triton" in (found["attention-backend"] or ())
        assert "no-such-flag" not in found


SETTINGS = [
    pytest.param(one, version, id=f"{name}-{version}")
    for name, one in [*((rule["id"], rule) for rule in RULES), *OPTIONS.items()]
    for version in meant(one["versions"])
]


@pytest.mark.parametrize(("setting", "version"), SETTINGS)
def test_each_version_has_what_a_rule_sets_and_forbids(setting, version):
    known = arguments(version)
    for flag, value in (setting.get("flags") or {}).items():
        assert flag in known
        assert value is True or known[flag] is None or value in known[flag]
    forbidden = setting.get("forbids") or {}
    assert not forbidden or set(forbidden) & set(known)
    for flag in (setting.get("when") or {}).get("flags") or {}:
        assert flag in known
    if "verify_backend" in (setting.get("when") or {}):
        assert {*gpu_settings.PHASES, "attention-backend", gpu_settings.VERIFY_MODE} <= set(known)
    asked = [*(setting.get("environment") or {}), *((setting.get("when") or {}).get("environment") or {})]
    source = "".join(text("sglang", version, f"sglang/srt/{name}") for name in ("environ.py", "server_args.py"))
    for name in asked:
        assert f"{name} " in source or f'"{name}"' in source or f".{name}." in source


def test_the_table_is_one_that_the_host_reads():
    table = gpu_settings.Table.of(TABLE)
    assert table.capabilities == {"9.0", "12.0"}
    assert {rule.id for rule in table.rules if "9.0" in rule.capabilities} == {"triton-target-verify"}
    assert all(meant(rule["versions"]) for rule in RULES)
