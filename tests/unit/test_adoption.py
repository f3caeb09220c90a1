"""What a host has already is used as it is, never written to, and what can't be known of it is refused with one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import adopted_images
import fake_wheels
import pytest
from ansible.module_utils.aerie import jobs
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import adoption, release
from ansible.module_utils.aerie.releases.release import Ingredients, PatchSetRef
from ansible.module_utils.testing import patch_module_args

import sglang_environment
import sglang_release
from runs import snapshot

QUIET = Progress(None)
SETS = (PatchSetRef("one", "a" * 64),)
WORKER = "sglang/srt/speculative/eagle_worker_v2.py"


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "host")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image whose SGLang is an installed wheel."""
    adopted_images.image(tmp_path / "image")
    adopted_images.install(tmp_path / "image", "sglang", "1.2.3", fake_wheels.SGLANG)
    return tmp_path / "image"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return adopted_images.checkout(tmp_path / "checkout")


@pytest.fixture(params=["finder", "path"])
def editable(request: pytest.FixtureRequest, tmp_path: Path, checkout: Path) -> Path:
    """An image whose SGLang is an editable installation of the checkout."""
    adopted_images.image(tmp_path / "editable")
    adopted_images.install_editable(tmp_path / "editable", checkout, finder=request.param == "finder")
    return tmp_path / "editable"


@pytest.fixture
def call(paths, capsys, monkeypatch):
    """Run a module as Ansible would, its job to the end; return its result."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # so that a snapshot shows what else would be written

    def run(module: Any, **arguments: Any) -> dict[str, Any]:
        with patch_module_args({"root": str(paths.root), **arguments}), pytest.raises(SystemExit):
            module.main()
        answer = json.loads(capsys.readouterr().out)
        if job := answer.pop("job", None):
            for _ in range(600):
                if finished := jobs.read(Path(job)):
                    return finished
                time.sleep(0.05)
        return answer

    return run


def ingredients(python: Path, tree: Path | None = None, sets: tuple[PatchSetRef, ...] = ()) -> Ingredients:
    found = adoption.survey(str(python))
    package = adoption.tree(found, str(tree), "1.2.3") if tree else adoption.installed(found)
    described = adoption.describe(found, package, "cpu")
    return Ingredients(described["version"], "cpu", described["environment"], described["package"], sets)


def imported(python: str | Path) -> list[str]:
    program = "import sglang, sglang.srt.server_args, torch, small_library; print(sglang.__file__, torch.__file__)"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd="/").stdout.split()


def test_an_adopted_environment_is_deployed_by_the_modules_and_stays_as_it_was(call, image, paths):
    before = snapshot(image)
    environment = call(sglang_environment, profile="cpu", adopt_environment=str(image / "bin/python"))
    assert (environment["changed"], environment["made"], environment["version"]) == (False, [], "1.2.3")
    assert environment["environment"]["adopted"] and environment["package"]["adopted"] == "environment"
    given = {key: environment[key] for key in ("version", "profile", "environment", "package")}
    given |= {"patch_sets": ["one"], "patch_set_hashes": {"one": "a" * 64}}
    assert call(sglang_release, **given, _ansible_check_mode=True)["changed"] and not paths.root.exists()
    made = call(sglang_release, **given)
    current = call(sglang_release, state="current", id=made["id"])
    assert current["release"]["verified"], current
    assert {key: current["release"][key] for key in ("adopted", "tree", "commit")} == {
        "adopted": "environment",
        "tree": None,
        "commit": None,
    }
    sglang, torch = imported(current["python"])
    assert Path(sglang).is_relative_to(current["site_packages"])
    assert Path(torch).is_relative_to(image)
    assert not call(sglang_release, **given)["changed"]
    assert not call(sglang_release, state="current", id=made["id"])["changed"]
    assert snapshot(image) == before


def test_the_copy_of_a_wheel_is_pristine_by_its_record_and_its_sources_are_not_the_images(image, paths):
    site_packages = Path(release.describe(paths, release.make(paths, ingredients(image / "bin/python"), QUIET))["site_packages"])
    tree = SourceTree.open(site_packages, "sglang")
    assert (tree.origin, tree.version.text) == ("record", "1.2.3")
    assert tree.pristine(WORKER) == (site_packages / WORKER).read_bytes()
    assert not (site_packages / WORKER).samefile(image / f"lib/python{adopted_images.MINOR}/site-packages" / WORKER)


def test_a_release_of_an_editable_checkout_has_its_own_sglang_and_knows_the_commit(editable, checkout, paths):
    value = release.verify(paths, release.make(paths, ingredients(editable / "bin/python"), QUIET), QUIET)
    where = release.describe(paths, value)
    assert Path(imported(editable / "bin/python")[0]).is_relative_to(checkout)
    assert Path(imported(where["python"])[0]).is_relative_to(where["site_packages"])
    assert value["commit"] == SourceTree.open(checkout, "sglang", "1.2.3").commit
    tree = SourceTree.open(Path(where["site_packages"]), "sglang")
    assert tree.origin == "record"
    assert all(tree.pristine(name) is not None for name in fake_wheels.SGLANG)


def test_uncommitted_edits_of_an_editable_checkout_are_refused_with_their_difference(editable, checkout):
    (checkout / WORKER).write_text("class EAGLEWorkerV2:\n    tuned = True\n")
    with pytest.raises(AerieError, match=rf"(?s){WORKER} changed and not committed.*-    pass.*\+    tuned = True"):
        adoption.installed(adoption.survey(str(editable / "bin/python")))


def test_a_wheels_file_that_was_edited_is_told(image):
    (image / f"lib/python{adopted_images.MINOR}/site-packages" / WORKER).write_text("edited = True\n")
    (note,) = adoption.installed(adoption.survey(str(image / "bin/python"))).notes
    assert WORKER in note and "differ from SGLang 1.2.3" in note


def test_an_adopted_tree_is_used_in_place_and_is_one_release_for_all_patch_sets(call, editable, checkout, paths):
    before = snapshot(checkout.parent)
    found = call(sglang_environment, profile="cpu", adopt_environment=str(editable / "bin/python"), adopt_tree=str(checkout))
    given = {key: found[key] for key in ("version", "profile", "environment", "package")}
    made = call(sglang_release, **given)
    assert made["site_packages"] == str(checkout)
    assert call(sglang_release, state="current", id=made["id"])["release"]["verified"]
    assert Path(imported(made["python"])[0]).is_relative_to(checkout)
    assert not list(paths.release(made["id"]).glob("lib/*/site-packages/sglang*"))
    patched = given | {"patch_sets": ["one"], "patch_set_hashes": {"one": "a" * 64}}
    foretold = call(sglang_release, **patched, _ansible_check_mode=True)
    assert foretold["changed"] and "patch sets: one" in foretold["diff"]["after"]
    again = call(sglang_release, **patched)
    assert (again["changed"], again["id"], again["release"]["verified"]) == (True, made["id"], False)
    assert again["release"]["patch_sets"] == [{"name": "one", "sha256": "a" * 64}]
    assert call(sglang_release, state="current", id=made["id"])["changed"]
    assert not call(sglang_release, **patched)["changed"]
    paths.current.unlink()
    assert call(sglang_release, state="absent", id=made["id"])["changed"]
    compiled = {name for name in snapshot(checkout.parent) if "__pycache__" in name}
    assert {name: what for name, what in snapshot(checkout.parent).items() if name not in compiled} == before


def test_a_tree_whose_files_are_put_back_is_as_verified_as_it_was(call, editable, checkout, paths):
    found = call(sglang_environment, profile="cpu", adopt_environment=str(editable / "bin/python"), adopt_tree=str(checkout))
    given = {key: found[key] for key in ("version", "profile", "environment", "package")}
    release_id = call(sglang_release, **given)["id"]
    before = call(sglang_release, state="current", id=release_id)["release"]
    patched = given | {"patch_sets": ["one"], "patch_set_hashes": {"one": "a" * 64}}
    call(sglang_release, **patched)
    back = call(sglang_release, **given, put_back=True)["release"]
    assert {**back, "before": None} == {**before, "before": None}
    assert not call(sglang_release, **patched, put_back=True)["release"]["verified"], "it never was with these"
    assert not call(sglang_release, **given)["release"]["verified"], "a switch verifies anew"


def test_a_way_back_to_a_tree_that_moved_is_refused_before_anything_is_stopped(call, editable, checkout, paths):
    asked = {"profile": "cpu", "adopt_environment": str(editable / "bin/python"), "adopt_tree": str(checkout)}
    for step in ("one", "two"):
        (checkout / "sglang" / f"{step}.py").write_text("")
        adopted_images.commit(checkout.parent)
        found = call(sglang_environment, **asked)
        made = call(sglang_release, **{key: found[key] for key in ("version", "profile", "environment", "package")})
        if step == "one":
            call(sglang_release, state="current", id=made["id"])
            assert "one release whatever patch sets it has" in call(sglang_release, state="current", id="previous")["msg"]
    call(sglang_release, state="current", id=made["id"])
    assert "was at commit" in call(sglang_release, state="current", id="previous", _ansible_check_mode=True)["msg"]


def test_a_tree_comes_before_a_wheel_that_the_python_has(image, checkout, paths):
    value = release.make(paths, ingredients(image / "bin/python", checkout, SETS), QUIET)
    assert Path(imported(release.describe(paths, value)["python"])[0]).is_relative_to(checkout)


def test_a_changed_environment_is_another_one_and_its_old_release_says_what_changed(image, paths):
    before = ingredients(image / "bin/python")
    value = release.make(paths, before, QUIET)
    assert release.drift(paths, value) is None
    site_packages = adopted_images.install(image, "addition", "2.0", {"addition.py": ""})
    shutil.rmtree(site_packages / "small_library-1.0.dist-info")
    assert ingredients(image / "bin/python").environment["id"] != before.environment["id"]
    with pytest.raises(
        AerieError, match=r"was changed: addition 2\.0 added and small-library 1\.0 removed: run the role sglang_release again"
    ):
        release.verify(paths, value, QUIET)
    (image / "bin/python").unlink()
    assert "is gone" in (release.drift(paths, value) or "")


def test_a_tree_at_another_commit_is_told(image, checkout, paths):
    value = release.make(paths, ingredients(image / "bin/python", checkout), QUIET)
    (checkout / WORKER).write_text("pulled = True\n")
    assert release.drift(paths, value) is None, "an edit is the patch engine's to judge"
    adopted_images.commit(checkout.parent)
    assert f"was at commit {value['commit']}, and is at " in (release.drift(paths, value) or "")


def test_an_environment_that_changes_after_it_was_looked_at_is_refused(image, paths):
    seen = ingredients(image / "bin/python")
    (image / f"lib/python{adopted_images.MINOR}/site-packages" / WORKER).write_text("changed = True\n")
    with pytest.raises(AerieError, match="have changed since they were looked at"):
        release.make(paths, seen, QUIET)
    assert release.existing(paths) == []


def test_a_python_that_can_not_be_adopted_is_refused_with_a_cure(tmp_path, image):
    no_python = tmp_path / "false"
    no_python.write_text("#!/bin/sh\nexit 1\n")
    no_python.chmod(0o755)
    for name, message in (
        (tmp_path / "nothing", "is no program on this host: correct it"),
        (image, rf"is a directory: name the Python in it, such as {image}/bin/python"),
        (no_python, f"{no_python} does not run as a Python"),
    ):
        with pytest.raises(AerieError, match=rf"sglang_release_adopt_environment: .*{message}"):
            adoption.survey(str(name))
    adopted_images.image(tmp_path / "bare")
    bare = adoption.survey(str(tmp_path / "bare/bin/python"))
    with pytest.raises(AerieError, match="has no SGLang"):
        adoption.installed(bare)
    with pytest.raises(AerieError, match=r"torch 1\.9\.1\+cpu is no build for CUDA, and profile cuda needs one"):
        adoption.check(bare, "cuda")
    shutil.rmtree(tmp_path / f"bare/lib/python{adopted_images.MINOR}/site-packages/torch")
    with pytest.raises(AerieError, match="it has no torch"):
        adoption.check(adoption.survey(str(tmp_path / "bare/bin/python")), "cpu")


def test_a_cuda_build_rehearses_on_the_cpu_with_a_warning(tmp_path):
    adopted_images.image(tmp_path / "cuda", fake_wheels.TORCH_CUDA)
    found = adoption.survey(str(tmp_path / "cuda/bin/python"))
    assert adoption.check(found, "cuda") == []
    assert "is a build for CUDA 13.0" in adoption.check(found, "cpu")[0]


def test_an_sglang_whose_version_or_pristine_files_nobody_knows_is_refused(image):
    found = adoption.survey(str(image / "bin/python"))
    with pytest.raises(AerieError, match=r"sglang_release_version is 1\.2\.4, and the adopted SGLang at .* is 1\.2\.3"):
        adoption.installed(found, "1.2.4")
    info = image / f"lib/python{adopted_images.MINOR}/site-packages/sglang-1.2.3.dist-info"
    (info / "RECORD").unlink()
    with pytest.raises(AerieError, match=r"neither in a git checkout .* nor has it a RECORD"):
        adoption.installed(adoption.survey(str(image / "bin/python")))
    shutil.rmtree(info)
    with pytest.raises(AerieError, match="no metadata tells its version"):
        adoption.installed(adoption.survey(str(image / "bin/python")))


def test_a_tree_that_is_none_is_refused_with_what_may_be_meant(image, checkout, tmp_path):
    found = adoption.survey(str(image / "bin/python"))
    for wrong in (checkout.parent, checkout / "sglang"):
        with pytest.raises(AerieError, match=rf"does not hold the package sglang: did you mean {checkout}\?"):
            adoption.tree(found, str(wrong))
    shutil.copytree(checkout / "sglang", tmp_path / "loose/sglang")
    with pytest.raises(AerieError, match=r"its version isn't known.*set sglang_release_version"):
        adoption.tree(found, str(checkout))
    with pytest.raises(AerieError, match="git init and commit"):
        adoption.tree(found, str(tmp_path / "loose"), "1.2.3")


def test_packages_that_were_only_lent_by_variables_do_not_count(image, tmp_path, monkeypatch):
    (tmp_path / "lent").mkdir()
    shutil.move(image / f"lib/python{adopted_images.MINOR}/site-packages/sglang", tmp_path / "lent/sglang")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lent"))
    assert adoption.survey(str(image / "bin/python")).sglang is None


def test_supervisor_is_made_with_the_first_python_that_can(tmp_path):
    broken = tmp_path / "python-x"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert adoption.supervisor_interpreter((str(broken), sys.executable)).path == os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    with pytest.raises(AerieError, match=r"supervisor needs a Python .*python-x does not run"):
        adoption.supervisor_interpreter((str(broken),))


def test_caches_are_set_aside_when_the_release_before_is_left(call, image, checkout, paths):
    first = release.make(paths, ingredients(image / "bin/python"), QUIET)["id"]
    second = release.make(paths, ingredients(image / "bin/python", checkout), QUIET)["id"]
    assert call(sglang_release, state="current", id=first, set_caches_aside=True)["caches_aside"] == []
    cache = paths.caches / f"{first}-580.95"
    cache.mkdir(parents=True)
    assert call(sglang_release, state="current", id=first, set_caches_aside=True)["caches_aside"] == [], "nothing changed"
    foretold = call(sglang_release, state="current", id=second, set_caches_aside=True, _ansible_check_mode=True)
    assert foretold["caches_aside"] == [f"caches/{cache.name}"] and cache.is_dir()
    (aside,) = call(sglang_release, state="current", id=second, set_caches_aside=True)["caches_aside"]
    assert aside.startswith(f"caches/.aside/{cache.name}.") and (paths.root / aside).is_dir() and not cache.exists()
