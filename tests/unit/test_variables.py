"""A variable that no role knows is refused where it carries a role's prefix or misspells one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible.module_utils.aerie import variables

PROJECT = Path(__file__).parents[2]
ROLES = variables.Roles.of(
    {
        "sglang": {"argument_specs": {"main": {"options": {"sglang_mode": {}}}}},
        "sglang_server": {
            "argument_specs": {"main": {"options": {"sglang_server_arms": {}}}, "stop": {"options": {"sglang_server_force": {}}}}
        },
        "nccl": {"argument_specs": {"main": {}}},
    }
)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sglang_server_arm", "role sglang_server has no such setting; did you mean 'sglang_server_arms'"),
        ("sglang_nodes", "role sglang has no such setting; did you mean 'sglang_mode'"),
        ("nccl_debug", "role nccl has no such setting"),
    ],
)
def test_an_unknown_name_is_refused_by_the_role_with_the_longest_prefix(name, problem):
    (found,) = variables.unknown(ROLES, {name: "hosts.yml:3"})
    assert found.startswith(f"{name} (hosts.yml:3): {problem}")


def test_a_misspelt_first_word_is_refused_and_a_variable_of_the_users_own_is_not():
    roles = variables.Roles({"aerie": {"aerie_root": {}}, "provision": {"provision_canary": {}}})
    names = {"aeri_root": None, "provison_canary": None, "area_root": None, "canary": None, "model_root": None}
    assert [problem.partition(":")[0] for problem in variables.unknown(roles, names)] == ["aeri_root", "provison_canary"]


def test_a_misspelt_prefix_is_refused_too():
    roles = variables.Roles({"sglang_server": {"sglang_server_arms": {}}})
    (found,) = variables.unknown(roles, {"sglang_servr_arms": None})
    assert found == "sglang_servr_arms: no role has such a setting; did you mean 'sglang_server_arms'?"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sglang_server_arms", id="known"),
        pytest.param("sglang_server_force", id="known to another entry point"),
        pytest.param("__sglang_server_result", id="internal"),
        pytest.param("ansible_host", id="of no role"),
        pytest.param("my_sglang_server_arm", id="prefix within"),
        pytest.param("ncclx_debug", id="prefix without underscore"),
    ],
)
def test_other_names_are_left_alone(name):
    assert variables.unknown(ROLES, {name: None}) == []


def test_an_exception_is_left_alone():
    assert variables.unknown(ROLES, {"nccl_debug": None}, exceptions=["nccl_debug"]) == []


def test_an_option_outside_its_roles_prefix_is_a_stray():
    roles = variables.Roles({"nccl": {"nccl_level": {}, "level": {}}})
    assert variables.strays(roles) == ["role nccl: option level belongs to no role by its name"]


def test_the_documented_exceptions_are_those_in_force():
    page = (PROJECT / "docs/reference/variables.md").read_text().partition("## Exceptions")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(variables.EXCEPTIONS)
