"""The module source_patch: check mode only reads, results are true, refusals are failures with reasons."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

import source_patch

SOURCE = b"def f(batch):\n    return batch\n"
HOOK = {"name": "h", "file": "pkg/a.py", "at": [{"function": "f"}], "where": "start", "insert": "mark({param[0]})", "import": "import mark"}
SET = {
    "name": "one",
    "definition": {"name": "one", "summary": "s", "why": "w", "versions": ">=1", "hooks": [HOOK]},
    "overlay": {"pkg/new.py": "x = 1\n"},
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site-packages"
    (site / "pkg").mkdir(parents=True)
    (site / "pkg/a.py").write_bytes(SOURCE)
    info = site / "pkg-1.5.dist-info"
    info.mkdir()
    digest = base64.urlsafe_b64encode(hashlib.sha256(SOURCE).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"pkg/a.py,sha256={digest},{len(SOURCE)}\n")
    return site


@pytest.fixture
def run(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run the module as Ansible would; return its result."""

    def call(**arguments: Any) -> dict[str, Any]:
        defaults = {"path": str(site), "package": "pkg", "store": str(tmp_path / "store"), "sets": ["one"], "definitions": [SET]}
        with (
            patch_module_args({key: value for key, value in (defaults | arguments).items() if value is not None}),
            pytest.raises(SystemExit),
        ):
            source_patch.main()
        return json.loads(capsys.readouterr().out)

    return call


def tree(site: Path) -> dict[str, bytes]:
    return {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def test_check_mode_says_what_the_run_does_and_only_reads(run, site, tmp_path):
    before = tree(site)
    checked = run(_ansible_check_mode=True)
    assert (tree(site), (tmp_path / "store").exists()) == (before, False)
    done = run()
    for result in (checked, done):
        result.pop("invocation")
    assert checked == done
    assert done["changed"] and "+    mark(batch)" in done["diff"]["prepared"]
    assert (site / "pkg/a.py").read_text() == "import mark\ndef f(batch):\n    mark(batch)\n    return batch\n"


def test_a_second_run_is_unchanged_and_back_is_byte_for_byte(run, site):
    before = tree(site)
    run()
    assert run()["changed"] is False
    assert run(state="verified")["changed"] is False
    assert run(state="absent", sets=None, definitions=None)["changed"] is True
    assert tree(site) == before
    assert run(state="absent", sets=None, definitions=None)["changed"] is False


def test_results_name_files_hashes_and_hooks(run):
    result = run()
    patched, added = result["files"]
    assert (patched["kind"], patched["state"], patched["hooks"]) == ("patched", "pristine", ["h"])
    assert patched["before"] == hashlib.sha256(SOURCE).hexdigest()
    assert (added["kind"], added["state"], added["before"]) == ("added", "absent", None)
    assert result["version"] == "1.5" and isinstance(result["store_same_filesystem"], bool)
    assert [one["name"] for one in result["sets"]] == ["one"]


def test_verified_fails_with_what_drifted(run, site):
    run()
    (site / "pkg/new.py").unlink()
    result = run(state="verified")
    assert result["failed"] and result["drift"] == ["pkg/new.py is absent, and would be added"]


def test_verified_without_sets_compares_with_what_was_applied(run, site):
    run()
    assert not run(state="verified", sets=None, definitions=None).get("failed")
    (site / "pkg/a.py").write_bytes(SOURCE)
    assert "pkg/a.py was put back" in run(state="verified", sets=None, definitions=None)["msg"]


def test_a_failing_verifier_fails_the_module_and_leaves_everything(run, site):
    before = tree(site)
    result = run(verifier=[[sys.executable, "-c", "raise SystemExit('no good')"]])
    assert result["failed"] and "no good" in result["msg"]
    assert tree(site) == before


def test_accepting_the_unknown_is_warned_about(run, site, monkeypatch):
    # Where a controller's Display was imported too, Ansible shows warnings there instead of returning them.
    warnings: list[str] = []
    monkeypatch.setattr(source_patch.AnsibleModule, "warn", lambda _, text: warnings.append(text))
    (site / "pkg/a.py").write_bytes(SOURCE + b"# by hand\n")
    assert "unknown content" in run()["msg"]
    assert not run(accept_unknown=True).get("failed")
    assert "UNKNOWN content was taken as the original" in warnings[0]


def test_a_lease_that_is_not_ours_any_more_stops_it_before_anything_changes(run, site, tmp_path):
    before = tree(site)
    owner = {"run": "1.2", "user": "ops", "controller": "deploy01"}
    (tmp_path / "lease.json").write_text(json.dumps({"owner": owner | {"run": "3.4"}, "seconds": 900, "expires": 9e9}))
    result = run(lease=owner, root=str(tmp_path))
    assert result["failed"] and "taken over by ops" in result["msg"]
    assert tree(site) == before


def test_sets_that_no_action_plugin_filled_in_are_refused(run):
    assert "definitions" in run(definitions=None)["msg"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("phase_profilr", "no patch set 'phase_profilr' in .*did you mean 'phase_profiler'"),
        ("phase_profiler", "eagle_worker_v2.py: the file isn't there, but hooks 'a prefill comes between two cycles'"),
    ],
)
def test_through_ansible_the_controller_reads_the_sets_and_ships_them(tmp_path, sets, message):
    project = Path(__file__).parents[2]
    (tmp_path / "site-packages/sglang").mkdir(parents=True)
    arguments = {"path": str(tmp_path / "site-packages"), "store": str(tmp_path / "store"), "version": "0.5.23", "sets": [sets]}
    plugins = {"ANSIBLE_ACTION_PLUGINS": "plugins/action", "ANSIBLE_LIBRARY": "library", "ANSIBLE_MODULE_UTILS": "module_utils"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ansible.cli.adhoc",
            "localhost",
            "-c",
            "local",
            "-i",
            "localhost,",
            "-m",
            "source_patch",
            "-a",
            json.dumps(arguments),
        ],
        env=os.environ
        | {name: str(project / path) for name, path in plugins.items()}
        | {"ANSIBLE_PYTHON_INTERPRETER": sys.executable, "ANSIBLE_LOCAL_TEMP": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(message, done.stdout), done.stdout + done.stderr
    assert not (tmp_path / "store/manifests").exists()


# Git checkouts


@pytest.fixture
def checkout(site: Path) -> Path:
    """The package as a git checkout of version 1.5 instead of an installed one."""
    shutil.rmtree(site / "pkg-1.5.dist-info")
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "first"], ["tag", "v1.5"]):
        subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments], cwd=site, check=True)
    return site


def test_a_git_checkout_is_patched_in_place_and_clean_again_afterwards(run, checkout):
    before = tree(checkout)
    done = run()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
    assert (done["origin"], done["commit"], done["version"], done["changed"]) == ("git", head, "1.5", True)
    assert run()["changed"] is False
    assert run(state="verified")["origin"] == "git"
    assert run(state="absent", sets=None, definitions=None)["changed"] is True
    assert tree(checkout) == before


def test_an_uncommitted_edit_is_refused_with_its_diff(run, checkout):
    (checkout / "pkg/a.py").write_bytes(SOURCE + b"# by hand\n")
    before = tree(checkout)
    result = run()
    assert result["failed"] and "+# by hand" in result["msg"] and "against HEAD" in result["msg"]
    assert tree(checkout) == before


def test_back_ups_made_by_hand_are_returned_and_warned_about_once(run, checkout, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(source_patch.AnsibleModule, "warn", lambda _, text: warnings.append(text))
    (checkout / "pkg/a.py.bak").write_bytes(SOURCE)
    (checkout / "pkg/a.py.orig").write_bytes(b"else\n")
    for _ in range(2):
        assert [(one["path"], one["file"], one["is"]) for one in run()["backups"]] == [
            ("pkg/a.py.bak", "pkg/a.py", "pristine"),
            ("pkg/a.py.orig", "pkg/a.py", "differs"),
        ]
    assert len(warnings) == 1 and "pkg/a.py.bak is the pristine file" in warnings[0]
    assert (checkout / "pkg/a.py.orig").read_bytes() == b"else\n"


def test_what_was_accepted_comes_back_byte_for_byte(run, checkout):
    (checkout / "pkg/a.py").write_bytes(SOURCE + b"# by hand\n")
    before = tree(checkout)
    done = run(accept_unknown=True)
    assert done["changed"]
    assert [one["path"] for one in done["files"] if one["accepted"]] == ["pkg/a.py"]
    assert run(state="absent", sets=None, definitions=None)["changed"]
    assert tree(checkout) == before


# Originals on the controller


def test_originals_are_brought_to_the_controller_once_and_checked_and_a_lost_store_can_be_had_from_them(site, tmp_path):
    project, copies = Path(__file__).parents[2], tmp_path / "copies"
    ours = tmp_path / "project"
    (ours / "patches/one/overlay/pkg").mkdir(parents=True)
    (ours / "patches/one/patchset.yml").write_text(json.dumps(SET["definition"]))
    (ours / "patches/one/overlay/pkg/new.py").write_text("x = 1\n")
    for name in ("plugins", "library", "module_utils"):
        (ours / name).symlink_to(project / name)
    store, sha256 = tmp_path / "store", hashlib.sha256(SOURCE).hexdigest()
    copy = copies / "sha256" / sha256[:2] / sha256
    patch = {"path": str(site), "package": "pkg", "store": str(store), "originals_on_controller": "copies"}

    def task(name: str, **arguments: Any) -> dict[str, Any]:
        return {"source_patch": patch | arguments, "register": name}

    def listed(name: str) -> dict[str, Any]:
        return {"ansible.builtin.find": {"paths": str(copies), "recurse": True}, "register": name}

    restored = f"rm -rf {store} && mkdir {store} && cp -r {copies}/sha256 {store} && cp -r {copies}/manifests/localhost {store}/manifests"
    tasks = [
        task("checked", sets=["one"]) | {"check_mode": True},
        listed("after_check"),
        task("first", sets=["one"]),
        listed("after_first"),
        task("second", sets=["one"]),
        listed("after_second"),
        {"ansible.builtin.shell": f"chmod u+w {copy} && echo rot > {copy}"},
        task("mended", state="verified"),
        {"ansible.builtin.shell": restored},
        task("back", state="absent"),
    ]
    names = [one["register"] for one in tasks if "register" in one]
    results = {
        "ansible.builtin.copy": {
            "dest": str(tmp_path / "results.json"),
            "content": f"{{{{ {{ {', '.join(f'{name!r}: {name}' for name in names)} }} }}}}",
        }
    }
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": [*tasks, results]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    plugins = {"ANSIBLE_ACTION_PLUGINS": "plugins/action", "ANSIBLE_LIBRARY": "library", "ANSIBLE_MODULE_UTILS": "module_utils"}
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", "-c", "local", "play.yml"],
        env={
            name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")
        }  # the project's own plugins would come first
        | {name: str(ours / path) for name, path in plugins.items()}
        | {"ANSIBLE_PYTHON_INTERPRETER": sys.executable, "ANSIBLE_LOCAL_TEMP": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert [found[name]["fetched"] for name in ("checked", "first", "second", "mended", "back")] == [0, 1, 0, 1, 0]
    assert found["after_check"]["matched"] == 0
    assert found["after_first"]["matched"] == 2
    keep = ("path", "inode", "mtime")
    first, second = ([[one[key] for key in keep] for one in found[name]["files"]] for name in ("after_first", "after_second"))
    assert first == second
    assert found["second"]["changed"] is False
    assert copy.read_bytes() == (site / "pkg/a.py").read_bytes() == SOURCE
    assert found["back"]["changed"] and not (site / "pkg/new.py").exists()
    (manifest,) = (copies / "manifests/localhost").iterdir()
    assert json.loads(manifest.read_text())["files"]["pkg/a.py"]["before"] == sha256
