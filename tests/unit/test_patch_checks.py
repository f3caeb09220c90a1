"""A server starts with the patch sets that were asked for, from the tree that has them, or not at all."""

from __future__ import annotations

import json
import os
import time

import pytest
import sglang_example
import upkeep_example
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash
from ansible.module_utils.aerie.patching import patch_checks
from ansible.module_utils.aerie.serving import server_plan
from upkeep_example import ADDED, MARKS, WORKER, patch_set

from ports import free_port


@pytest.fixture
def root(tmp_path):
    return upkeep_example.make(tmp_path)


@pytest.fixture
def made(root):
    return root.release("aaaaaaaaaaaa", MARKS)


def wanted(*sets):
    return [
        {"name": one.name, "sha256": one.sha256, "upstream_since": one.upstream_since.text if one.upstream_since else None} for one in sets
    ]


def problems(root, made, sets):
    return patch_checks.problems(root.paths, root.value(made), sets)


def test_what_was_asked_for_and_is_there_is_no_problem(root, made):
    assert problems(root, made, wanted(MARKS)) == []
    assert problems(root, made, None) == []
    assert problems(root, root.release("bbbbbbbbbbbb"), []) == []


@pytest.mark.parametrize("sets", [[], [patch_set("others")], [MARKS, patch_set("others")]])
def test_a_release_with_other_sets_than_those_asked_for_is_refused(root, made, sets):
    (problem,) = problems(root, made, wanted(*sets))
    assert "was made with the patch sets marks" in problem
    assert "run playbooks/patch.yml" in problem


def test_a_set_that_changed_since_the_release_was_made_is_not_the_one_asked_for(root, made):
    changed = [one | {"sha256": "f" * 64} for one in wanted(MARKS)]
    assert "asked for are marks (ffffffff)" in problems(root, made, changed)[0]


def test_a_set_that_was_never_applied_is_not_active(root):
    made = root.release("aaaaaaaaaaaa", asked=(MARKS,))
    (problem,) = problems(root, made, wanted(MARKS))
    assert "asked for and needed are the patch sets marks" in problem
    assert "applied are none" in problem


def test_a_set_that_this_sglang_has_itself_counts_as_active(root):
    upstream = patch_set(upstream_since="1.2")
    assert problems(root, root.release("aaaaaaaaaaaa", asked=(upstream,)), wanted(upstream)) == []
    later = patch_set(upstream_since="1.3")
    assert problems(root, root.release("bbbbbbbbbbbb", asked=(later,)), wanted(later)) != []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at: (at / WORKER).write_text("edited\n"), "was changed"),
        (lambda at: (at / WORKER).write_text(upkeep_example.SOURCES[WORKER]), "was put back"),
        (lambda at: (at / ADDED).unlink(), "is not there"),
    ],
)
@pytest.mark.parametrize("asked", [wanted(MARKS), None])
def test_a_patched_file_that_is_not_as_it_was_written_is_refused_whatever_was_asked_for(root, made, spoil, words, asked):
    spoil(made.site_packages)
    (problem,) = problems(root, made, asked)
    assert words in problem
    assert made.id in problem


def test_a_transaction_that_was_cut_off_is_refused(root, made):
    root.cut_off(made)
    assert any("was cut off" in problem for problem in problems(root, made, None))


def test_the_check_of_every_deploy_takes_no_time(root, made):
    started = time.perf_counter()
    problems(root, made, wanted(MARKS))
    assert time.perf_counter() - started < 0.2


def look(made, tmp_path, **environment):
    return patch_checks.look(str(made.path / "bin/python"), {"PATH": os.environ["PATH"], **environment}, tmp_path, made.site_packages)


def test_a_server_that_would_import_its_own_tree_may_start(made, tmp_path):
    assert look(made, tmp_path) == ()


def test_a_search_path_that_leads_to_another_sglang_is_refused(made, tmp_path):
    (tmp_path / "elsewhere/sglang").mkdir(parents=True)
    (tmp_path / "elsewhere/sglang/__init__.py").write_text("")
    with pytest.raises(AerieError, match=r"would import SGLang from .*elsewhere.*PYTHONPATH=.*elsewhere in the server's environment"):
        look(made, tmp_path, PYTHONPATH=str(tmp_path / "elsewhere"))


def test_a_directory_of_that_name_where_the_server_works_is_refused_unless_it_is_no_package(made, tmp_path):
    (tmp_path / "sglang").mkdir()
    assert look(made, tmp_path) == ()
    (tmp_path / "sglang/__init__.py").write_text("raise SystemExit('imported')\n")
    with pytest.raises(AerieError, match=f"a directory sglang in {tmp_path}"):
        look(made, tmp_path)


def test_an_environment_that_breaks_python_is_told(made, tmp_path):
    with pytest.raises(AerieError, match="does not run with the server's environment"):
        look(made, tmp_path, PYTHONHOME="/nowhere")


def test_a_plugin_that_sglang_would_load_by_itself_is_told_unless_it_is_shut_out(made, tmp_path):
    info = made.site_packages / "odd_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd_hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nodd = odd_hooks:register\n")
    (plugin,) = look(made, tmp_path)
    assert "the plugin odd (odd_hooks:register) of the package odd_hooks" in patch_checks.warning(plugin)
    assert look(made, tmp_path, SGLANG_PLUGINS="none") == ()


def test_a_server_is_refused_before_anything_is_touched_and_in_check_mode_warned_about(tmp_path):
    sglang_example.make_release(tmp_path)
    host = sglang_example.make_host(tmp_path)
    asked = {"patch_sets": tuple(wanted(MARKS)), "instance": {"port": free_port()}}
    with pytest.raises(AerieError, match=r"nothing was touched.*was made with the patch sets none, and asked for are marks"):
        server_plan.plan(host, sglang_example.make_request(tmp_path, **asked))
    assert not (tmp_path / "instances").exists()
    (warning,) = server_plan.plan(host, sglang_example.make_request(tmp_path, rehearsal=True, **asked)).warnings
    assert "could not start as things are now" in warning


def test_a_server_on_an_adopted_tree_is_another_when_its_patch_sets_are(tmp_path):
    release = sglang_example.make_release(tmp_path)
    value = json.loads((release / "release.json").read_text()) | {"adopted": "tree", "patch_sets": []}
    definitions = set()
    for sets in ([], [{"name": "marks", "sha256": "1"}], [{"name": "marks", "sha256": "2"}]):
        (release / "release.json").write_text(json.dumps(value | {"patch_sets": sets}))
        request = sglang_example.make_request(tmp_path, instance={"port": free_port()})
        plan = server_plan.plan(sglang_example.make_host(tmp_path), request)
        definitions.add(canonical_hash(server_plan._sources(plan.release)))
    assert len(definitions) == 3
