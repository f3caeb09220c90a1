"""The algorithms that settings may name are those of SGLang, which no release tells its command line's parser."""

from __future__ import annotations

import ast
import zipfile

import pytest
import wheels
from ansible.module_utils.aerie.serving import server_flags

pytestmark = pytest.mark.contract

ENUM = "sglang/srt/speculative/spec_info.py"
RELEASES = ("0.5.9", "0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.20", "0.5.23")


def algorithms(version: str) -> set[str]:
    """Return the members of SpeculativeAlgorithm in a release's wheel."""
    with zipfile.ZipFile(wheels.wheel("sglang", version)) as archive:
        module = ast.parse(archive.read(ENUM))
    (enum,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "SpeculativeAlgorithm")
    assignments = (node for node in enum.body if isinstance(node, ast.Assign))
    names = {target.id for node in assignments for target in node.targets if isinstance(target, ast.Name)}
    return names - {"NONE"}


@pytest.mark.parametrize("version", RELEASES)
def test_every_algorithm_of_a_release_can_be_named(version: str) -> None:
    # NEXTN is no member but another word for EAGLE.
    assert algorithms(version) | {"NEXTN"} <= set(server_flags.ALGORITHMS)


def test_no_algorithm_can_be_named_that_the_newest_release_does_not_have() -> None:
    assert set(server_flags.ALGORITHMS) == algorithms("0.5.23") | {"NEXTN"}
