"""What is patched is told file by file, with its way back, and everything that somebody else did shows."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import upkeep_example
from ansible.module_utils.aerie.patching import patch_status
from ansible.module_utils.testing import patch_module_args
from upkeep_example import ADDED, MARKS, OTHER, WORKER

import source_patch_info
from aerie_controller import terminal
from aerie_controller.terminal_reports import upkeep


def table_of(releases: list[dict[str, Any]]) -> str:
    return terminal.render(upkeep.status("gpu-01", releases), 100)


@pytest.fixture
def root(tmp_path):
    return upkeep_example.make(tmp_path)


@pytest.fixture
def made(root):
    found = root.release("aaaaaaaaaaaa", MARKS)
    root.link("current", found)
    return found


def survey(root) -> dict[str, Any]:
    (found,) = patch_status.survey(root.paths)
    return found


def states(release: dict[str, Any]) -> dict[str, str]:
    return {file["path"]: file["state"] for file in release["files"]}


def test_every_patched_file_is_told_with_its_set_hooks_and_original(root, made):
    found = survey(root)
    by_path = {file["path"]: file for file in found["files"]}
    assert states(found) == {WORKER: "patched", ADDED: "added"}
    assert by_path[WORKER]["sets"] == by_path[ADDED]["sets"] == ["marks"]
    assert by_path[WORKER]["hooks"] == ["forward begins"]
    assert by_path[WORKER]["original"]["state"] == "kept"
    assert by_path[ADDED]["original"]["state"] == "none"
    assert (found["links"], found["applied"], found["pristine"], found["drift"]) == (["current"], ["marks"], 3, [])
    assert found["store_same_filesystem"] is True


def test_of_two_sets_each_file_names_its_own(root):
    definition = {"name": "other", "summary": "s", "why": "w", "versions": ">=1"}
    other = upkeep_example.PatchSet.of({"name": "other", "definition": definition, "overlay": {"sglang/more.py": "value = 2\n"}})
    root.link("current", root.release("aaaaaaaaaaaa", MARKS, other))
    assert {file["path"]: file["sets"] for file in survey(root)["files"]} == {
        WORKER: ["marks"],
        ADDED: ["marks"],
        "sglang/more.py": ["other"],
    }


@pytest.mark.parametrize(
    ("spoil", "path", "state", "words"),
    [
        (lambda at: (at / WORKER).write_text("edited\n"), WORKER, "changed", "was changed by somebody"),
        (lambda at: (at / WORKER).write_text(upkeep_example.SOURCES[WORKER]), WORKER, "pristine", "was put back as published"),
        (lambda at: (at / ADDED).unlink(), ADDED, "missing", "is missing since"),
        (lambda at: (at / OTHER).write_text("value = 3\n"), OTHER, "changed", "neither as published nor patched"),
        (lambda at: (at / OTHER).unlink(), OTHER, "missing", "is missing, though it was published"),
        (lambda at: (at / "sglang/mine.py").write_text(""), "sglang/mine.py", "unknown", "was added by somebody"),
    ],
)
def test_what_somebody_did_to_a_file_is_drift(root, made, spoil, path, state, words):
    spoil(made.site_packages)
    found = survey(root)
    assert states(found)[path] == state
    (drift,) = found["drift"]
    assert drift.startswith(f"{path} ")
    assert words in drift


@pytest.mark.parametrize(
    ("spoil", "state"), [(lambda path: path.unlink(), "missing"), (lambda path: (path.chmod(0o644), path.write_text("rotten")), "damaged")]
)
def test_a_kept_original_that_is_gone_or_rotten_is_told_before_it_is_needed(root, made, spoil, state):
    store = root.store(made)
    spoil(store.object_path(store.manifest()["files"][WORKER]["before"]))
    found = survey(root)
    assert {file["path"]: file["original"]["state"] for file in found["files"]}[WORKER] == state
    assert "can't go back" in found["drift"][0]


def test_copies_that_people_left_beside_files_are_told_and_are_no_drift(root, made):
    (made.site_packages / f"{WORKER}.bak").write_text(upkeep_example.SOURCES[WORKER])
    (made.site_packages / f"{OTHER}.orig").write_text("")
    found = survey(root)
    assert {one["path"]: one["words"] for one in found["backups_beside"]} == {
        f"{WORKER}.bak": "is the pristine file",
        f"{OTHER}.orig": None,
    }
    assert found["drift"] == []


def test_a_transaction_that_was_cut_off_is_told_with_what_the_next_run_does(root):
    made = root.release("aaaaaaaaaaaa")
    root.link("current", made)
    root.cut_off(made, MARKS)
    found = survey(root)
    assert found["interrupted"]["outcome"] == "undone"
    assert found["interrupted"]["next"] == "the next run puts its files back first (2)"
    assert found["interrupted"]["owner"]["user"] == "ops"
    assert "was cut off" in found["drift"][0]
    assert "puts its files back first" in table_of([found])


def test_each_release_that_a_link_means_is_told_once_with_all_its_links(root, made):
    root.link("pins/nightly", made)
    root.link("previous", root.release("bbbbbbbbbbbb"))
    root.release("cccccccccccc")
    assert [(one["id"][-1], one["links"]) for one in patch_status.survey(root.paths)] == [
        ("a", ["current", "pins/nightly"]),
        ("b", ["previous"]),
    ]


def test_a_link_to_nothing_is_told_and_not_the_end(root, made):
    (root.paths.root / "previous").symlink_to("releases/1.2.3-dddddddddddd")
    gone = patch_status.survey(root.paths)[1]
    assert "isn't there, or only half made" in gone["drift"][0]
    assert "isn't there" in table_of([gone])


def test_a_checkout_is_compared_with_its_commit(root, made, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(made.site_packages / "sglang", checkout / "python/sglang")
    for name in (WORKER, OTHER):
        (checkout / "python" / name).write_text(upkeep_example.SOURCES[name])
    for argv in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(checkout), *argv], check=True)
    (checkout / "python" / OTHER).write_text("value = 3\n")
    (checkout / "python/sglang/untracked.py").write_text("")
    found = patch_status.tree(checkout / "python", root.paths.originals, version="1.2.3")
    assert found["origin"] == "git"
    assert len(found["commit"]) == 40
    assert states(found) == {OTHER: "changed"}


def test_looking_changes_nothing(root, made):
    before = sorted((path, path.lstat().st_mtime_ns) for path in root.paths.root.rglob("*"))
    patch_status.survey(root.paths)
    assert sorted((path, path.lstat().st_mtime_ns) for path in root.paths.root.rglob("*")) == before


def test_the_table_fits_a_terminal_and_lets_no_name_move_the_cursor(root, made):
    (made.site_packages / ("sglang/" + "long_" * 15 + "\x1b[2J.py")).write_text("")
    (made.site_packages / OTHER).write_text("value = 3\n")
    text = table_of(patch_status.survey(root.paths))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "patched by marks" in text
    assert "changed by somebody" in text


def test_hundreds_of_missing_files_take_few_lines_and_hide_neither_patches_nor_other_drift(root, made):
    record = next(made.site_packages.glob("*.dist-info")) / "RECORD"
    record.write_text(record.read_text() + "".join(f"sglang/a_test/t{number:03}.py,sha256=AA,1\n" for number in range(300)))
    (made.site_packages / WORKER).write_text("edited\n")
    (made.site_packages / OTHER).write_text("value = 3\n")
    found = survey(root)
    text = table_of([found])
    lines = text.splitlines()
    assert sum("is missing, though it was published" in line for line in lines) == upkeep.MOST_MISSING == 8
    assert "  … and 292 more, missing though they were published" in lines
    assert "… and 292 more files, missing though they were published" in lines
    assert text.index(WORKER) < text.index(OTHER) < text.index("sglang/a_test/t000.py")
    assert f"! {OTHER} was changed by somebody" in text
    assert len(lines) < 40
    assert len([one for one in found["files"] if one["state"] == "missing"]) == 300


def test_the_module_looks_at_all_releases_in_one_call_and_never_reports_a_change(root, made, capsys):
    (made.site_packages / OTHER).unlink()
    with patch_module_args({"root": str(root.paths.root)}), pytest.raises(SystemExit):
        source_patch_info.main()
    result = json.loads(capsys.readouterr().out)
    assert result["changed"] is False
    assert result["releases"][0]["id"] == made.id
    assert result["drift"] == [f"{made.id}: {OTHER} is missing, though it was published"]
