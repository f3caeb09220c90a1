"""Every role's settings are documented: specification, defaults and page say the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.aerie import variables

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "tools"))
import role_pages  # noqa: E402

ROLES = sorted(path.name for path in (PROJECT / "roles").iterdir() if any(path.iterdir()))


def load(role: str, file: str) -> dict:
    return yaml.safe_load((PROJECT / "roles" / role / file).read_text()) or {}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_and_specification_have_the_same_keys(role):
    roles = variables.Roles.of({role: load(role, "meta/argument_specs.yml")})
    assert set(load(role, "defaults/main.yml")) == roles.names()
    assert variables.strays(roles) == []


@pytest.mark.parametrize("role", [role for role in ROLES if role != "aerie"])
def test_every_role_is_preceded_by_the_validation_of_all(role):
    dependencies = [entry if isinstance(entry, str) else entry["role"] for entry in load(role, "meta/main.yml")["dependencies"]]
    assert dependencies[0] == "aerie"


@pytest.mark.parametrize("role", ROLES)
def test_every_default_that_the_specification_names_is_the_one_in_force(role):
    defaults = load(role, "defaults/main.yml")
    for options in variables.Roles.of({role: load(role, "meta/argument_specs.yml")}).options.values():
        assert {name: option["default"] for name, option in options.items() if "default" in option} == {
            name: defaults[name] for name, option in options.items() if "default" in option
        }


def test_every_roles_page_is_current():
    assert [path.name for path in role_pages.stale(PROJECT)] == [], "run tools/role_pages.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Set C(aerie_root) or V(null).", "Set `aerie_root` or `null`."),
        ("See O(x.y) | RV(z).", "See `x.y` \\| `z`."),
        ("SGLANG(x) stays, B(bold) too.", "SGLANG(x) stays, *bold* too."),
    ],
)
def test_markup_becomes_markdown(text, expected):
    assert role_pages.markdown(text) == expected


def test_a_stale_page_fails_the_check(tmp_path):
    role = tmp_path / "roles/nccl"
    for file, value in {
        "meta/argument_specs.yml": {"argument_specs": {"main": {"options": {"nccl_level": {"type": "str"}}}}},
        "defaults/main.yml": {"nccl_level": "SYS"},
    }.items():
        (role / file).parent.mkdir(parents=True)
        (role / file).write_text(yaml.safe_dump(value))
    (tmp_path / "docs/roles").mkdir(parents=True)
    (tmp_path / "docs/roles/gone.md").write_text("")
    assert [path.name for path in role_pages.stale(tmp_path)] == ["nccl.md", "gone.md"]
    (tmp_path / "docs/roles/gone.md").unlink()
    (text,) = role_pages.pages(tmp_path).values()
    assert "| `nccl_level` | str | `SYS` |  |" in text
    (tmp_path / "docs/roles/nccl.md").write_text(text)
    assert role_pages.stale(tmp_path) == []


def test_the_check_is_a_command_with_a_status():
    done = subprocess.run([sys.executable, str(PROJECT / "tools/role_pages.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == (1 if role_pages.stale(PROJECT) else 0)
