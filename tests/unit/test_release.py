"""A release is named after what it is made from, becomes current only when it was verified, and otherwise nothing moves."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import installed
import pytest
from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment, release
from ansible.module_utils.aerie.releases.release import Ingredients, PatchSetRef
from ansible.module_utils.testing import patch_module_args

import sglang_release

SETS = (PatchSetRef("one", "a" * 64), PatchSetRef("two", "b" * 64))
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"
QUIET = Progress(None)


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "host")


@pytest.fixture
def ingredients() -> Ingredients:
    host = installed.host()
    described = environment.describe(host.plan, host.spec, host.interpreter)
    return Ingredients(host.spec.version, host.spec.profile, described["environment"], described["package"], SETS)


@pytest.fixture
def made(paths, ingredients) -> tuple[dict[str, Any], Path]:
    """A release that was made, and its site-packages."""
    value = release.make(paths, ingredients, QUIET)
    return value, Path(release.describe(paths, value)["site_packages"])


@pytest.fixture
def run(paths, capsys):
    """Run the module as Ansible would, its job to the end; return its result."""

    def call(**arguments: Any) -> dict[str, Any]:
        with patch_module_args({"root": str(paths.root), **arguments}), pytest.raises(SystemExit):
            sglang_release.main()
        answer = json.loads(capsys.readouterr().out)
        if job := answer.pop("job", None):
            for _ in range(600):
                if finished := jobs.read(Path(job)):
                    return finished
                time.sleep(0.05)
        return answer

    return call


def module_arguments(ingredients: Ingredients) -> dict[str, Any]:
    sets = ingredients.patch_sets
    return {
        "version": ingredients.version,
        "profile": ingredients.profile,
        "environment": dict(ingredients.environment),
        "package": dict(ingredients.package),
        "patch_sets": [one.name for one in sets],
        "patch_set_hashes": {one.name: one.sha256 for one in sets},
    }


def verified(paths: HostPaths, ingredients: Ingredients) -> str:
    value = release.verify(paths, release.make(paths, ingredients, QUIET), QUIET)
    release.switch(paths, value["id"])
    return str(value["id"])


def test_a_release_is_named_after_package_environment_and_ordered_patch_sets(ingredients):
    others = [
        replace(ingredients, patch_sets=SETS[::-1]),
        replace(ingredients, patch_sets=SETS[:1]),
        replace(ingredients, patch_sets=(SETS[0], PatchSetRef("two", "c" * 64))),
        replace(ingredients, package={**ingredients.package, "sha256": "0" * 64}),
        replace(ingredients, environment={**ingredients.environment, "id": "cpu-other"}),
    ]
    ids = [one.id for one in (ingredients, *others)]
    assert len(set(ids)) == len(ids)
    assert all(release.ID.fullmatch(one) for one in ids)
    moved = replace(ingredients, package={**ingredients.package, "path": "/elsewhere"})
    assert moved.id == ingredients.id


def test_a_release_runs_its_own_sglang_on_the_packages_of_the_environment(made, paths):
    value, site_packages = made
    python = release.describe(paths, value)["python"]
    program = "import sglang, torch, small_library, pretend.deep.part; print(sglang.__file__, torch.__file__)"
    answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    sglang, torch = answer.stdout.split()
    assert Path(sglang).is_relative_to(site_packages)
    assert Path(torch).is_relative_to(value["environment"]["site_packages"])


def test_sources_are_copies_so_that_patches_never_reach_the_package(made):
    value, site_packages = made
    pristine = Path(value["package"]["path"])
    assert not (site_packages / WORKER).samefile(pristine / WORKER)
    assert not (site_packages / "sglang/srt/big.py").samefile(pristine / "sglang/srt/big.py")
    assert (site_packages / "sglang/srt/big.so").samefile(pristine / "sglang/srt/big.so")
    assert not (site_packages / environment.PACKAGE_MARKER).exists()


@pytest.mark.parametrize("what", ["changed", "gone", "added", "a library"])
def test_a_package_that_is_no_longer_its_wheel_makes_no_release(paths, ingredients, tmp_path, what):
    package = shutil.copytree(Path(ingredients.package["path"]), tmp_path / "package")
    name = {"added": "sglang/added.py", "a library": "sglang/srt/big.so"}.get(what, WORKER)
    if what == "gone":
        (package / name).unlink()
    else:
        (package / name).write_bytes(b"import os\n" * 200_000)
    with pytest.raises(AerieError, match=rf"is no longer what its wheel was \(changed, added or gone: {name}\): remove .*install\.yml"):
        release.make(paths, replace(ingredients, package={**ingredients.package, "path": str(package)}), QUIET)
    assert release.existing(paths) == []


def test_programs_of_the_environment_are_in_the_release_but_its_python_is_its_own(paths, ingredients):
    program = Path(ingredients.environment["path"]) / "bin" / "ninja"
    program.write_text("#!/bin/sh\n")
    value = release.make(paths, ingredients, QUIET)
    binary = paths.release(value["id"]) / "bin"
    assert (binary / "ninja").resolve() == program
    assert not (binary / "pip").exists()
    assert Path(environment.run([str(binary / "python"), "-c", "import sys; print(sys.prefix)"]).stdout.strip()) == binary.parent


def test_a_half_made_release_is_made_again(made, paths, ingredients):
    value, site_packages = made
    (paths.release(value["id"]) / release.RELEASE).unlink()
    (site_packages / "sglang/left_over.py").write_text("of a killed run")
    assert release.read(paths, value["id"]) is None
    assert release.existing(paths) == []
    release.make(paths, ingredients, QUIET)
    assert not (site_packages / "sglang/left_over.py").exists()
    assert release.existing(paths) == [value["id"]]


def test_verifying_keeps_what_the_parser_takes(made, paths):
    value, _ = made
    after = release.verify(paths, value, QUIET)
    assert after["verified"] and after["verified_at"]
    assert release.read(paths, value["id"]) == after
    arguments = json.loads((paths.release(value["id"]) / release.ARGUMENTS).read_text())
    by_dest = {argument["dest"]: argument for argument in arguments}
    assert by_dest["tp_size"] == {
        "flags": ["--tp-size", "--tensor-parallel-size"],
        "dest": "tp_size",
        "action": "_StoreAction",
        "type": "int",
        "choices": None,
        "nargs": None,
        "default": 1,
        "deprecated": False,
        "help": "GPUs",
    }
    assert by_dest["backend"]["choices"] == ["a", "b", "c"]
    assert isinstance(by_dest["backend"]["default"], str)
    assert by_dest["values"]["nargs"] == "+" and by_dest["values"]["default"] == [1.0, 2.0]
    assert [name for name, argument in by_dest.items() if argument["deprecated"]] == ["old", "older"]
    assert by_dest["old"]["nargs"] == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("def broken(:\n", r"(?s)does not compile, current stays as it was.*SyntaxError"),
        ("import no_such_module\n", r"(?s)does not import, current stays as it was.*No module named 'no_such_module'"),
    ],
)
def test_a_release_that_fails_verification_moves_nothing(paths, ingredients, damage, message):
    before = verified(paths, replace(ingredients, patch_sets=()))
    value = release.make(paths, ingredients, QUIET)
    (Path(release.describe(paths, value)["site_packages"]) / WORKER).write_text(damage)
    with pytest.raises(AerieError, match=message):
        release.verify(paths, value, QUIET)
    assert release.read(paths, value["id"])["verified"] is False
    assert release.linked(paths.current) == before
    with pytest.raises(AerieError, match="was not verified and can't become current"):
        release.switch(paths, value["id"])
    assert release.linked(paths.current) == before
    assert release.linked(paths.previous) is None


def test_a_release_that_imports_another_sglang_is_refused(made, paths):
    value, site_packages = made
    (site_packages / "sglang/__init__.py").unlink()
    (site_packages / "elsewhere.pth").write_text(f"{value['package']['path']}\n")
    with pytest.raises(AerieError, match=rf"imports SGLang from {value['package']['path']}.* and not from its own tree"):
        release.verify(paths, value, QUIET)


def test_a_cuda_release_that_could_import_a_stand_in_is_refused(made, paths):
    value, _ = made
    with pytest.raises(AerieError, match=r"profile cuda must not see stand-ins.*pretend \("):
        release.verify(paths, value | {"profile": "cuda"}, QUIET)


def test_previous_remembers_and_going_back_exchanges_the_two(paths, ingredients):
    first = verified(paths, replace(ingredients, patch_sets=()))
    assert (release.linked(paths.current), release.linked(paths.previous)) == (first, None)
    second = verified(paths, ingredients)
    assert (release.linked(paths.current), release.linked(paths.previous)) == (second, first)
    release.switch(paths, second)
    assert (release.linked(paths.current), release.linked(paths.previous)) == (second, first)
    release.switch(paths, release.find(paths, "previous")["id"])
    assert (release.linked(paths.current), release.linked(paths.previous)) == (first, second)
    assert (paths.current / release.RELEASE).exists()


def test_what_is_in_use_is_never_removed(paths, ingredients):
    first, second = verified(paths, replace(ingredients, patch_sets=())), verified(paths, ingredients)
    third = release.make(paths, replace(ingredients, patch_sets=SETS[:1]), QUIET)["id"]
    for kept, why in ((first, "is previous and is kept"), (second, "is current and is kept")):
        with pytest.raises(AerieError, match=why):
            release.remove(paths, kept)
    with subprocess.Popen([str(paths.release(third) / "bin/python"), "-c", "input()"], stdin=subprocess.PIPE) as server:
        try:
            with pytest.raises(AerieError, match=rf"in use by process {server.pid} "):
                release.remove(paths, third)
        finally:
            server.kill()
    release.remove(paths, third)
    assert release.existing(paths) == sorted([first, second])


def test_an_unknown_release_is_refused_with_those_that_are_there(made, paths):
    value, _ = made
    with pytest.raises(AerieError, match=rf"no release '{value['id'][:-1]}x'; did you mean '{value['id']}'"):
        release.find(paths, value["id"][:-1] + "x")
    with pytest.raises(AerieError, match="no previous release to go back to"):
        release.find(paths, "previous")


def test_a_release_without_its_environment_or_package_is_refused(paths, ingredients, tmp_path):
    gone = {**ingredients.environment, "path": str(tmp_path / "gone")}
    with pytest.raises(AerieError, match="gone is missing or half made: run the role sglang_release"):
        release.make(paths, replace(ingredients, environment=gone), QUIET)
    with pytest.raises(AerieError, match="gone is missing or half made"):
        release.make(paths, replace(ingredients, package={**ingredients.package, "path": str(tmp_path / "gone")}), QUIET)
    assert release.existing(paths) == []


def test_the_module_makes_verifies_and_then_changes_nothing(run, paths, ingredients):
    arguments = module_arguments(ingredients)
    foretold = run(**arguments, _ansible_check_mode=True)
    assert foretold["changed"] and not foretold["exists"] and not paths.releases.exists()
    made = run(**arguments)
    assert made["changed"] and made["exists"] and made["id"] == foretold["id"] == ingredients.id
    assert not run(**arguments)["changed"]
    foretold = run(state="current", id=made["id"], _ansible_check_mode=True)
    assert foretold["changed"] and foretold["current"] == made["id"] and release.linked(paths.current) is None
    assert foretold["diff"] == {"before": "current: none\n", "after": f"current: {made['id']}\n"}
    current = run(state="current", id=made["id"])
    assert current["changed"] and current["release"]["verified"] and release.linked(paths.current) == made["id"]
    shutil.rmtree(paths.jobs)
    again = run(state="current", id=made["id"])
    assert not again["changed"] and again["release"] == current["release"]
    assert not paths.jobs.exists(), "what was verified was verified again"


def test_check_mode_foresees_a_release_that_is_not_made_yet(run, ingredients):
    foretold = run(state="current", id=ingredients.id, _ansible_check_mode=True)
    assert foretold["changed"] and not foretold["exists"] and foretold["current"] == ingredients.id
    assert run(state="current", id="previous", _ansible_check_mode=True)["failed"]


def test_the_module_removes_only_what_looks_like_a_release(run, made, paths):
    value, _ = made
    for wrong in ("../instances", "previous", "0.5"):
        assert "is no release id" in run(state="absent", id=wrong)["msg"]
    assert run(state="absent", id=value["id"], _ansible_check_mode=True)["changed"] and paths.release(value["id"]).exists()
    assert run(state="absent", id=value["id"])["changed"] and not paths.release(value["id"]).exists()
    assert not run(state="absent", id=value["id"])["changed"]


def test_the_module_needs_the_hashes_that_its_action_plugin_adds(run, ingredients):
    result = run(**module_arguments(ingredients) | {"patch_set_hashes": None})
    assert result["failed"] and "needs its action plugin" in result["msg"]
