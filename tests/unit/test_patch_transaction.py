"""A patched tree is exactly its originals with the wanted sets, or exactly what it was, whatever happens on the way."""

from __future__ import annotations

import base64
import hashlib
import os
import py_compile
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_plan, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from one_hook_set import patch_set

FILES = {
    "pkg/__init__.py": b"",
    "pkg/a.py": b'"""A."""\nimport os\n\n\ndef f(batch):\n    g(batch)\n    return os\n',
    "pkg/b.py": b"def h(x):\r\n    return x",
}
OWNER = {"run": "1.2", "user": "ops", "controller": "deploy01"}


ONE = patch_set("one", "mark_1", overlay={"pkg/new.py": "x = 1\n", "pkg/deep/er/new.py": "y = 1\n"})
TWO = patch_set("two", "mark_2")
THREE = patch_set("three", "mark_3", file="pkg/b.py", function="h")


class Site:
    """A site-packages with one package, its dist-info and a store."""

    def __init__(self, root: Path) -> None:
        self.path = root / "site-packages"
        self.store_path = root / "store"
        for name, data in FILES.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data)
        info = self.path / "pkg-1.5.post1.dist-info"
        info.mkdir()
        rows = [
            f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
            for name, data in FILES.items()
        ]
        (info / "RECORD").write_text("\n".join([*rows, "pkg-1.5.post1.dist-info/RECORD,,"]) + "\n")

    @property
    def tree(self) -> SourceTree:
        return SourceTree.open(self.path, "pkg")

    @property
    def store(self) -> PatchStore:
        return PatchStore.beside(self.tree, self.store_path)

    def plan(self, *sets: PatchSet, **asked: Any) -> patch_plan.Plan:
        return patch_plan.plan(self.tree, self.store, sets, **asked)

    def apply(
        self, *sets: PatchSet, verify: Callable[[], None] = lambda: None, step: Callable[[str], None] = lambda name: None, **asked: Any
    ) -> patch_plan.Plan:
        planned = self.plan(*sets, **asked)
        patch_transaction.apply(self.tree, self.store, planned, OWNER, verify, step)
        return planned

    def drift(self, *sets: PatchSet) -> list[str]:
        return patch_plan.drift(self.tree, self.store, sets)

    @property
    def content(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.path)): path.read_bytes() for path in sorted((self.path / "pkg").rglob("*")) if path.is_file()}

    @property
    def directories(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_dir()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in root.rglob("*")}


def test_hooks_and_overlays_are_applied(site):
    assert site.apply(ONE, THREE).changed
    assert site.content["pkg/a.py"] == b'"""A."""\nimport os\nimport mark_1\n\n\ndef f(batch):\n    mark_1()\n    g(batch)\n    return os\n'
    assert site.content["pkg/b.py"] == b"import mark_3\r\ndef h(x):\r\n    mark_3()\r\n    return x"
    assert site.content["pkg/deep/er/new.py"] == b"y = 1\n"


def test_a_second_run_changes_and_writes_nothing(site):
    site.apply(ONE, THREE)
    before = snapshot(site.path) | snapshot(site.store_path)
    assert not site.apply(ONE, THREE).changed
    assert snapshot(site.path) | snapshot(site.store_path) == before


def test_planning_writes_nothing(site):
    before = snapshot(site.path)
    assert site.plan(ONE).changed
    assert snapshot(site.path) == before
    assert not site.store_path.exists()


def test_sets_are_the_whole_state_and_come_from_the_originals(site, tmp_path):
    site.apply(ONE, TWO, THREE)
    site.apply(TWO)
    other = Site(tmp_path / "other")
    other.apply(TWO)
    assert site.content == other.content
    assert "pkg/deep" not in site.directories


def test_without_sets_everything_is_as_it_was(site):
    (site.path / "pkg/a.py").chmod(0o640)
    directories = site.directories
    site.apply(ONE, TWO, THREE)
    assert stat.S_IMODE((site.path / "pkg/a.py").stat().st_mode) == 0o640
    site.apply()
    assert site.content == FILES
    assert site.directories == directories
    assert stat.S_IMODE((site.path / "pkg/a.py").stat().st_mode) == 0o640
    assert not site.apply().changed


def test_the_diff_is_what_is_applied(site):
    planned = site.plan(ONE, THREE)
    site.apply(ONE, THREE)
    assert planned.diff() == "".join(
        patch_plan.unified(name, FILES.get(name), data)
        for name, data in sorted(site.content.items(), key=lambda one: (one[0] not in FILES, one[0]))
    )
    assert "+    mark_1()\n" in planned.diff()


def test_the_manifest_says_who_when_and_what(site):
    site.apply(ONE)
    manifest = site.store.manifest()
    assert manifest["owner"] == OWNER
    assert manifest["sets"] == [{"name": "one", "sha256": ONE.sha256}]
    assert manifest["files"]["pkg/a.py"]["before"] == hashlib.sha256(FILES["pkg/a.py"]).hexdigest()
    assert manifest["files"]["pkg/a.py"]["after"] == hashlib.sha256(site.content["pkg/a.py"]).hexdigest()


@pytest.mark.parametrize("sets", [(ONE,), ()])
def test_unknown_content_is_refused_with_a_diff_and_nothing_is_touched(site, sets):
    site.apply(ONE)
    edited = site.path / "pkg/a.py"
    edited.write_bytes(edited.read_bytes() + b"# by hand\n")
    before = site.content
    with pytest.raises(AerieError, match=r"pkg/a.py: unknown content(.|\n)*\+# by hand"):
        site.apply(*sets)
    assert site.content == before


def test_the_diff_of_a_file_edited_after_it_was_patched_shows_the_edit_and_not_the_patch(site):
    site.apply(ONE)
    edited = site.path / "pkg/a.py"
    edited.write_bytes(edited.read_bytes() + b"# by hand\n")
    with pytest.raises(AerieError) as refusal:
        site.apply(ONE)
    added = [line for line in str(refusal.value).splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == ["+# by hand"]


def test_unknown_content_in_a_file_never_patched_becomes_the_original_when_accepted(site):
    edited = site.path / "pkg/a.py"
    edited.write_bytes(FILES["pkg/a.py"] + b"# by hand\n")
    with pytest.raises(AerieError, match="to take it as the original"):
        site.apply(ONE)
    assert "UNKNOWN content was taken" in site.apply(ONE, accept_unknown=True).warnings[0]
    assert site.content["pkg/a.py"].endswith(b"# by hand\n") and b"mark_1()" in site.content["pkg/a.py"]
    assert not site.apply(ONE).changed
    site.apply()
    assert site.content["pkg/a.py"] == FILES["pkg/a.py"] + b"# by hand\n"


def test_unknown_content_over_ours_is_replaced_and_kept_when_accepted(site):
    site.apply(ONE)
    wanted = site.content
    edited = site.path / "pkg/a.py"
    edited.write_bytes(by_hand := edited.read_bytes() + b"# by hand\n")
    site.apply(ONE, accept_unknown=True)
    assert site.content == wanted
    assert site.store.get(hashlib.sha256(by_hand).hexdigest()) == by_hand


def test_an_overlay_never_overwrites_a_file_of_somebody_else(site):
    (site.path / "pkg/new.py").write_text("theirs\n")
    with pytest.raises(AerieError, match=r"pkg/new.py: unknown content"):
        site.apply(ONE)
    with pytest.raises(AerieError, match="the package has one of that name"):
        site.plan(patch_set("four", "mark_4", overlay={"pkg/b.py": ""}))


def test_a_file_put_back_by_hand_is_patched_again(site):
    site.apply(ONE)
    wanted = site.content
    (site.path / "pkg/a.py").write_bytes(FILES["pkg/a.py"])
    assert [file.state for file in site.apply(ONE).changed_files] == ["pristine"]
    assert site.content == wanted


def test_all_problems_are_told_at_once(site):
    (site.path / "pkg/b.py").write_text("edited = 1\n")
    with pytest.raises(AerieError) as raised:
        site.apply(THREE, patch_set("four", "mark_4", function="missing"))
    assert "pkg/b.py: unknown content" in str(raised.value) and "function 'missing'" in str(raised.value)


def test_a_failed_verifier_puts_everything_back_and_says_why(site):
    directories = site.directories
    command = [sys.executable, "-c", "import pkg.new, sys; print('loaded', pkg.new.x); sys.exit(3)"]
    with pytest.raises(AerieError, match=r"exit status 3:\n    loaded 1\neverything in .* was put back"):
        site.apply(ONE, THREE, verify=lambda: patch_transaction.run_verifiers([command], site.path))
    assert (site.content, site.directories) == (FILES, directories)
    assert site.store.journal() is None and site.store.manifest() is None


def test_verifiers_see_the_new_files_and_leave_no_bytecode(site):
    site.apply(ONE, verify=lambda: patch_transaction.run_verifiers([[sys.executable, "-c", "import pkg.new"]], site.path))
    assert "pkg/__pycache__" not in site.directories


def test_stale_bytecode_of_changed_files_is_removed(site):
    for name in ("a", "b"):
        py_compile.compile(str(site.path / f"pkg/{name}.py"))
    site.apply(ONE)
    assert [path.name.partition(".")[0] for path in (site.path / "pkg/__pycache__").iterdir()] == ["b"]


def test_originals_are_kept_before_the_first_file_goes(site):
    def check(name: str) -> None:
        assert site.store.get(hashlib.sha256(FILES["pkg/a.py"]).hexdigest()) == FILES["pkg/a.py"]
        if name == "originals kept":
            assert site.content == FILES

    site.apply(ONE, step=check)


def test_a_damaged_original_is_never_used(site):
    site.apply(ONE)
    kept = site.store.object_path(hashlib.sha256(FILES["pkg/a.py"]).hexdigest())
    kept.chmod(0o644)
    kept.write_bytes(b"rot")
    before = site.content
    with pytest.raises(AerieError, match="this kept original is damaged"):
        site.apply()
    assert site.content == before


def test_a_store_inside_the_tree_is_refused(site):
    with pytest.raises(AerieError, match="lies inside"):
        PatchStore.beside(site.tree, site.path / "store")


def test_a_symbolic_link_is_refused_as_the_tree_would_not_own_it(site, tmp_path):
    (tmp_path / "shared.py").write_bytes(FILES["pkg/a.py"])
    (site.path / "pkg/a.py").unlink()
    (site.path / "pkg/a.py").symlink_to(tmp_path / "shared.py")
    with pytest.raises(AerieError, match="is a symbolic link"):
        site.apply(ONE)


def test_a_hard_link_is_broken_and_its_other_end_stays(site, tmp_path):
    os.link(site.path / "pkg/a.py", tmp_path / "other.py")
    site.apply(ONE)
    assert (tmp_path / "other.py").read_bytes() == FILES["pkg/a.py"]


def test_a_directory_without_permission_is_told_before_anything_is_touched(site, tmp_path):
    (site.path / "pkg").chmod(0o555)
    for directory in [tmp_path, *tmp_path.parents]:
        if directory.is_relative_to("/tmp/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(AerieError, match="pkg: no permission to replace files here"):
            site.plan(ONE)
    finally:
        if is_root:
            os.seteuid(0)
        (site.path / "pkg").chmod(0o755)


def test_two_runs_at_once_on_one_tree_are_refused(site):
    with site.store.locked(), pytest.raises(AerieError, match="another run is patching it now"), site.store.locked():
        pass


def test_drift_names_every_file_that_is_not_as_it_should_be(site):
    site.apply(ONE, THREE)
    assert site.drift(ONE, THREE) == []
    assert patch_plan.drift(site.tree, site.store, None) == []
    (site.path / "pkg/a.py").write_bytes(FILES["pkg/a.py"])
    (site.path / "pkg/new.py").unlink()
    assert [line.partition(" ")[0] for line in site.drift(ONE, THREE)] == ["pkg/a.py", "pkg/new.py"]
    assert [line.partition(" since")[0] for line in patch_plan.drift(site.tree, site.store, None)] == [
        "pkg/a.py was put back",
        "pkg/new.py is not there",
    ]
    assert "applied are one" in site.drift(ONE)[-1]


def test_another_version_in_the_same_place_is_not_taken_for_ours(site):
    site.apply(ONE)
    record = next(site.path.glob("*.dist-info")) / "RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"newer").digest()).decode().rstrip("=")
    record.write_text(f"pkg/a.py,sha256={digest},5\n")
    with pytest.raises(AerieError, match=r"pkg/a.py: unknown content"):
        site.plan(ONE)


def test_a_tree_without_dist_info_needs_its_version_said(site):
    for path in site.path.glob("*.dist-info/*"):
        path.unlink()
    next(site.path.glob("*.dist-info")).rmdir()
    with pytest.raises(AerieError, match="give version"):
        SourceTree.open(site.path, "pkg")
    assert SourceTree.open(site.path, "pkg", "1.6").version.text == "1.6"


# Killed at any point


def killed_at(site: Site, number: int, *sets: PatchSet) -> bool:
    """Apply ``sets`` in a process that is killed (SIGKILL) after its ``number``-th durable step; say whether it came that far."""
    child = os.fork()
    if child == 0:
        steps = iter(range(1, 1000))

        def step(name: str) -> None:
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            site.apply(*sets, step=step)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("start", "wanted"), [((), (ONE, THREE)), ((TWO, THREE), (ONE, THREE)), ((TWO, THREE), ())], ids=["patch", "patch anew", "take back"]
)
def test_killed_at_any_point_the_next_run_ends_in_the_wanted_state(tmp_path, start, wanted):
    ideal = Site(tmp_path / "ideal")
    ideal.apply(*wanted)
    outcomes = []
    for number in range(1, 100):
        site = Site(tmp_path / str(number))
        site.apply(*start)
        before = site.content
        if not killed_at(site, number, *wanted):
            break
        # A look changes nothing, and sees what the next run will start from.
        torn = snapshot(site.path)
        planned = site.plan(*wanted)
        assert snapshot(site.path) == torn
        outcomes.append(planned.interrupted.as_result()["outcome"] if planned.interrupted else None)
        if planned.interrupted and not planned.interrupted.finished:
            assert {file.path: file.found for file in planned.files if file.found is not None}.items() <= before.items()
            assert "was cut off" in site.drift(*wanted)[0]
        # The next run goes on to what is wanted, …
        again = site.apply(*wanted)
        assert again.interrupted == planned.interrupted
        assert (site.content, site.directories) == (ideal.content, ideal.directories), number
        assert site.store.journal() is None
        assert not site.apply(*wanted).changed
        # … and everything can still be taken back.
        site.apply()
        assert site.content == FILES
    assert number > 8
    assert None in outcomes and "undone" in outcomes
    assert "finished" in outcomes


def test_killed_while_undoing_the_run_after_undoes_the_rest(tmp_path):
    for first in range(4, 12):
        for second in range(1, 100):
            site = Site(tmp_path / f"{first}-{second}")
            site.apply(TWO)
            before = site.content
            assert killed_at(site, first, ONE, THREE)
            if not killed_at(site, second, TWO):
                break
            site.apply(TWO)
            assert site.content == before
            site.apply()
            assert site.content == FILES


def test_what_was_edited_after_the_kill_is_never_overwritten(site):
    assert killed_at(site, 9, ONE, THREE)
    (site.path / "pkg/a.py").write_text("edited = 1\n")
    with pytest.raises(AerieError, match=r"pkg/a.py is neither what that run found"):
        site.apply(ONE)
    assert site.content["pkg/a.py"] == b"edited = 1\n"
