"""A git checkout that Python imports a package from is patched in place: HEAD says what is pristine, and git notices nothing afterwards."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import git_checkout, patch_plan, patch_store, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from one_hook_set import patch_set

A = b'"""A."""\nimport os\n\n\ndef f(batch):\n    g(batch)\n    return os\n'
B = b"def h(x):\n    return x\n"
FILES = {"pkg/__init__.py": b"", "pkg/a.py": A, "pkg/b.py": B, "pkg/c.py": b"c = 1\n", "pkg/sub/d.py": b"d = 1\n"}
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


ONE = patch_set("one", "one_mark", overlay={"pkg/new.py": "x = 1\n", "pkg/deep/new.py": "y = 1\n"})
TWO = patch_set("two", "two_mark", file="pkg/b.py", function="h")


class Checkout:
    """A repository with a package below python/, tagged v1.5, beside a store."""

    def __init__(self, root: Path) -> None:
        self.top = root / "checkout"
        self.path = self.top / "python"
        self.store_path = root / "store"
        self.top.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.write(FILES)
        self.commit("first")
        self.git("tag", "v1.5")

    def git(self, *arguments: str, **options: Any) -> str:
        argv = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-c", f"safe.directory={self.top}", *arguments]
        return subprocess.run(argv, cwd=self.top, check=True, capture_output=True, text=True, **options).stdout

    def write(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data)

    def commit(self, message: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", message)
        return self.git("rev-parse", "HEAD").strip()

    @property
    def tree(self) -> SourceTree:
        return SourceTree.open(self.path, "pkg")

    @property
    def store(self) -> PatchStore:
        return PatchStore.beside(self.tree, self.store_path)

    def plan(self, *sets: PatchSet, **asked: Any) -> patch_plan.Plan:
        return patch_plan.plan(self.tree, self.store, sets, **asked)

    def apply(self, *sets: PatchSet, step: Callable[[str], None] = lambda name: None, **asked: Any) -> patch_plan.Plan:
        planned = self.plan(*sets, **asked)
        patch_transaction.apply(self.tree, self.store, planned, {"user": "ops"}, step=step)
        return planned

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    @property
    def everything(self) -> dict[str, tuple[str, int, int, int]]:
        """The whole checkout, .git too: each file's hash, mode and owner."""
        found = {}
        for path in self.top.rglob("*"):
            facts = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(facts.st_mode) else "directory"
            found[str(path.relative_to(self.top))] = (content, facts.st_mode, facts.st_uid, facts.st_gid)
        return found

    @property
    def status(self) -> str:
        """What a person sees; read without a refresh of the index, so that the test changes nothing either."""
        return self.git("--no-optional-locks", "status", "--porcelain")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


# What a checkout is known to be


def test_head_says_what_each_file_was(checkout):
    tree = checkout.tree
    assert (tree.origin, tree.commit) == ("git", checkout.git("rev-parse", "HEAD").strip())
    (checkout.path / "pkg/a.py").write_bytes(b"edited = 1\n")
    assert tree.pristine("pkg/a.py") == A
    assert tree.recorded("pkg/a.py") == hashlib.sha256(A).hexdigest()
    assert tree.recorded("pkg/none.py") is None and tree.pristine("pkg/none.py") is None
    assert tree.files == sorted(FILES)


def test_many_files_are_read_with_few_commands(checkout, monkeypatch):
    many = {f"pkg/many/m{number}.py": b"n\n" * number for number in range(200)}
    checkout.write(many)
    checkout.commit("many")
    tree, calls = checkout.tree, []
    run = git_checkout._git
    monkeypatch.setattr(git_checkout, "_git", lambda *arguments, **options: calls.append(arguments) or run(*arguments, **options))
    assert {name: tree.pristine(name) for name in many} == many
    assert len(calls) <= git_checkout.LOOKUPS + 1


def test_a_wheels_record_goes_before_git_and_that_of_an_editable_install_does_not(checkout):
    info = checkout.path / "pkg-1.7.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("pkg-1.7.dist-info/METADATA,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    assert (checkout.tree.origin, checkout.tree.version.text) == ("git", "1.7")
    (info / "RECORD").write_text("pkg/a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n")
    assert (checkout.tree.origin, checkout.tree.commit) == ("record", None)


def test_a_package_that_git_does_not_track_has_no_origin(checkout):
    site = checkout.top / "venv/site-packages"
    shutil.copytree(checkout.path / "pkg", site / "pkg")
    assert SourceTree.open(site, "pkg", "1.5").origin == "none"


def test_the_version_comes_from_the_first_that_knows_it(checkout):
    assert checkout.tree.version.text == "1.5"
    checkout.write(
        {"pkg/version.py": b"try:\n    from pkg._version import __version__\nexcept ImportError:\n    __version__ = '0.0.0.dev0'\n"}
    )
    commit = checkout.commit("version.py")
    assert checkout.tree.version.text == f"1.5+1.g{commit[:7]}"
    checkout.write({"pkg/_version.py": b"__version__ = version = '1.6.dev1+gabc'\n"})
    assert checkout.tree.version.text == "1.6.dev1+gabc"
    (checkout.path / "pkg-0.0.0.dist-info").mkdir()
    assert checkout.tree.version.text == "1.6.dev1+gabc"
    (checkout.path / "pkg-0.0.0.dist-info").rename(checkout.path / "pkg-1.7.dist-info")
    assert checkout.tree.version.text == "1.7"
    assert SourceTree.open(checkout.path, "pkg", "1.8").version.text == "1.8"


def test_a_version_that_the_tag_at_head_contradicts_is_told(checkout):
    checkout.write({"pkg/_version.py": b"__version__ = '1.4'\n"})
    assert any("taken for version 1.4, but its HEAD has the tag of 1.5" in note for note in checkout.plan(ONE).notes)


def test_a_shallow_clone_is_fine_and_needs_its_version_said(checkout, tmp_path):
    checkout.write({"pkg/c.py": b"c = 2\n"})
    checkout.commit("second")
    shallow = tmp_path / "shallow"
    checkout.git("clone", "--quiet", "--depth=1", "--no-tags", f"file://{checkout.top}", str(shallow))
    with pytest.raises(AerieError, match="git checkout is shallow and has no tag: give version"):
        SourceTree.open(shallow / "python", "pkg")
    assert SourceTree.open(shallow / "python", "pkg", "1.5").pristine("pkg/a.py") == A


@pytest.mark.parametrize("kind", ["worktree", "submodule"])
def test_a_worktree_and_a_submodule_are_checkouts_too(checkout, tmp_path, kind):
    if kind == "worktree":
        place = tmp_path / "beside"
        checkout.git("worktree", "add", "--quiet", "--detach", str(place))
    else:
        outer = tmp_path / "outer"
        subprocess.run(["git", "init", "--quiet", str(outer)], check=True)
        argv = ["git", "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(checkout.top), "inner"]
        subprocess.run(argv, cwd=outer, check=True)
        place = outer / "inner"
    assert (place / ".git").is_file()
    tree = SourceTree.open(place / "python", "pkg")
    assert (tree.origin, tree.version.text, tree.pristine("pkg/a.py")) == ("git", "1.5", A)


def test_git_variables_of_the_environment_mislead_nobody(checkout, tmp_path, monkeypatch):
    other = Checkout(tmp_path / "other")
    other.write({"pkg/a.py": b"other = 1\n"})
    other.commit("other")
    monkeypatch.setenv("GIT_DIR", str(other.top / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.top))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other.top / ".git/index"))
    assert checkout.tree.pristine("pkg/a.py") == A
    assert checkout.tree.edited() == []


def test_line_endings_are_those_of_a_clean_checkout(checkout):
    checkout.git("config", "core.autocrlf", "true")
    for name in FILES:
        (checkout.path / name).unlink()
    checkout.git("checkout", "--", ".")
    crlf = A.replace(b"\n", b"\r\n")
    assert checkout.read("pkg/a.py") == crlf == checkout.tree.pristine("pkg/a.py")
    checkout.apply(ONE, TWO)
    assert b"    one_mark()\r\n" in checkout.read("pkg/a.py")
    checkout.apply()
    assert (checkout.read("pkg/a.py"), checkout.status) == (crlf, "")


def test_line_endings_alone_are_told_as_such(checkout):
    (checkout.path / "pkg/a.py").write_bytes(A.replace(b"\n", b"\r\n"))
    with pytest.raises(AerieError, match="only line endings differ"):
        checkout.plan(ONE)


def test_a_missing_git_is_told(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AerieError, match=r"checkout is a git checkout, but there is no git on this host.*install git"):
        SourceTree.open(checkout.path, "pkg")


def test_a_checkout_without_a_commit_is_told(checkout, tmp_path):
    shutil.rmtree(checkout.top / ".git")
    checkout.git("init", "--quiet")
    with pytest.raises(AerieError, match="its HEAD can't be read"):
        SourceTree.open(checkout.path, "pkg")


@pytest.mark.parametrize("damage", ["gone", "garbage"])
def test_a_damaged_repository_is_told_and_nothing_is_touched(checkout, damage):
    sha = checkout.git("rev-parse", "HEAD:python/pkg/a.py").strip()
    loose = checkout.top / ".git/objects" / sha[:2] / sha[2:]
    loose.chmod(0o644)
    if damage == "gone":
        loose.unlink()
    else:
        loose.write_bytes(b"rot")
    before = checkout.everything
    with pytest.raises(AerieError, match=r"checkout: .*(damaged or partial clone\?|can't be used)"):
        checkout.apply(ONE)
    assert checkout.everything == before


# Patched and put back


def test_the_whole_checkout_is_byte_for_byte_what_it_was_and_git_was_only_read(checkout):
    (checkout.path / "pkg/a.py").chmod(0o755)
    checkout.commit("mode")
    before = checkout.everything
    planned = checkout.apply(ONE, TWO)
    assert {file.path: file.state for file in planned.files} == {
        "pkg/a.py": "pristine",
        "pkg/b.py": "pristine",
        "pkg/new.py": "absent",
        "pkg/deep/new.py": "absent",
    }
    assert b"one_mark()" in checkout.read("pkg/a.py") and b"two_mark()" in checkout.read("pkg/b.py")
    assert {name: facts for name, facts in checkout.everything.items() if name.startswith(".git/")} == {
        name: facts for name, facts in before.items() if name.startswith(".git/")
    }
    assert [line[3:] for line in checkout.status.splitlines()] == [
        "python/pkg/a.py",
        "python/pkg/b.py",
        "python/pkg/deep/",
        "python/pkg/new.py",
    ]
    assert {file.path: file.state for file in checkout.plan(ONE, TWO).files} == dict.fromkeys(
        ["pkg/a.py", "pkg/b.py", "pkg/deep/new.py", "pkg/new.py"], "ours"
    )
    assert not checkout.apply(ONE, TWO).changed
    assert checkout.store.manifest()["commit"] == checkout.tree.commit
    assert checkout.apply().changed
    assert (checkout.everything, checkout.status) == (before, "")


@root_only
def test_a_checkout_of_another_user_is_patched_and_stays_theirs(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where no configuration says that it is safe
    for path in [checkout.top, *checkout.top.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    before = checkout.everything
    assert subprocess.run(["git", "status"], cwd=checkout.top, capture_output=True, check=False).returncode != 0
    checkout.apply(ONE, TWO)
    assert {facts[2:] for facts in checkout.everything.values()} == {(NOBODY, NOBODY)}
    checkout.apply()
    assert checkout.everything == before


def test_a_store_inside_the_checkout_is_refused(checkout):
    with pytest.raises(AerieError, match="lies inside"):
        PatchStore.beside(checkout.tree, checkout.top / "originals")


def test_stale_bytecode_is_gone_after_either_way(checkout):
    (checkout.top / ".gitignore").write_text("__pycache__/\n")
    checkout.commit("ignore")

    def value() -> str:
        argv = [sys.executable, "-c", "import pkg.a, inspect; print('one_mark' in inspect.getsource(pkg.a), 'one_mark' in dir(pkg.a))"]
        environment = os.environ | {"PYTHONPATH": f"{checkout.path}:{checkout.top}"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    (checkout.top / "one_mark.py").write_text("")
    assert value() == "False False"
    checkout.apply(ONE)
    assert value() == "True True"
    checkout.apply()
    assert value() == "False False"


def killed_at(checkout: Checkout, last: int | str, *sets: PatchSet) -> bool:
    """Apply ``sets`` in a process that is killed after its step of that number or name; say whether it came that far."""
    child = os.fork()
    if child == 0:
        steps = iter(range(1, 1000))

        def step(name: str) -> None:
            if last in (next(steps), name):
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            checkout.apply(*sets, step=step)
        finally:
            os._exit(0)
    _, ended = os.waitpid(child, 0)
    return os.WIFSIGNALED(ended)


@pytest.mark.parametrize("sets", [(ONE,), ()], ids=["patched", "put back"])
def test_killed_at_any_point_the_next_run_settles_it(checkout, sets):
    before = checkout.everything
    for number in range(1, 100):
        if not sets:
            checkout.apply(ONE)
        if not killed_at(checkout, number, *sets):
            break
        checkout.apply(*sets)
        assert (b"one_mark()" in checkout.read("pkg/a.py")) is bool(sets)
        checkout.apply()
        assert (checkout.everything, checkout.status) == (before, "")
    assert number > 5


# Edits by hand


def test_an_uncommitted_edit_of_a_touched_file_is_refused_with_the_diff(checkout):
    (checkout.path / "pkg/a.py").write_bytes(A + b"# by hand\n")
    before = checkout.everything
    with pytest.raises(AerieError) as refusal:
        checkout.apply(ONE, TWO)
    said = str(refusal.value)
    assert "pkg/a.py: unknown content" in said and f"HEAD (commit {checkout.tree.commit[:12]})" in said
    assert [line for line in said.splitlines() if line.startswith("+") and not line.startswith("+++")] == ["+# by hand"]
    assert f"git -C {checkout.top} checkout HEAD -- python/pkg/a.py" in said and "commit it" in said
    assert "pkg/b.py" not in said
    assert checkout.everything == before
    assert not checkout.store_path.exists()


def test_an_edit_that_is_staged_is_uncommitted_and_one_that_is_committed_is_pristine(checkout):
    (checkout.path / "pkg/a.py").write_bytes(A + b"# by hand\n")
    checkout.git("add", "--all")
    with pytest.raises(AerieError, match="unknown content"):
        checkout.plan(ONE)
    checkout.commit("by hand")
    checkout.apply(ONE)
    checkout.apply()
    assert (checkout.read("pkg/a.py"), checkout.status) == (A + b"# by hand\n", "")


def test_edits_elsewhere_are_told_once_and_stay(checkout):
    checkout.write({"pkg/c.py": b"c = 2\n", "pkg/scratch.py": b""})
    (checkout.path / "pkg/sub/d.py").unlink()
    before = checkout.everything
    planned = checkout.apply(ONE)
    assert planned.warnings == ()
    (note,) = planned.notes
    assert "uncommitted edits of 2 files (pkg/c.py, pkg/sub/d.py), which no set touches" in note
    assert checkout.plan(ONE).notes == ()
    assert "2 files (pkg/c.py, pkg/sub/d.py)" in checkout.apply().notes[0]
    assert checkout.everything == before


def test_a_deleted_file_is_told_with_the_way_to_get_it_back(checkout):
    (checkout.path / "pkg/a.py").unlink()
    with pytest.raises(AerieError, match=r"the file isn't there, but .*: HEAD \(commit \w+\) has it: put back what HEAD has \(git -C"):
        checkout.plan(ONE)


def test_an_overlay_never_overwrites_an_untracked_file(checkout):
    checkout.write({"pkg/new.py": b"theirs\n"})
    with pytest.raises(AerieError, match=r"pkg/new.py: unknown content .*which has no such file(.|\n)*move it away"):
        checkout.apply(ONE)
    assert checkout.read("pkg/new.py") == b"theirs\n"


BACKUPS = ["a.py.bak", "a.py.bak2", "a.py.orig", "a.py.bak.20260101", "a.py~", "a.bak.py"]


def test_back_ups_are_recognised_and_compared(checkout):
    by_hand = A.replace(b"    g(batch)\n", b"    one()\n    two()\n    three()\n")
    checkout.write({f"pkg/{name}": A for name in BACKUPS[:3]} | {f"pkg/{name}": by_hand for name in BACKUPS[3:]} | {"pkg/aa.py.bak": b""})
    before = checkout.everything
    planned = checkout.apply(ONE)
    assert {one.path: one.state for one in planned.backups} == {f"pkg/{name}": "pristine" for name in BACKUPS[:3]} | {
        f"pkg/{name}": "differs" for name in BACKUPS[3:]
    }
    (note,) = planned.notes
    assert "pkg/a.py.bak is the pristine file" in note and "pkg/a.py~ differs from the pristine file: +3 -1" in note
    again = checkout.plan(ONE)
    assert (len(again.backups), again.notes) == (6, ())
    checkout.apply()
    assert checkout.everything == before


def hand_patched(checkout: Checkout) -> bytes:
    """The way of the original campaign: a back-up beside, then an edit with sed."""
    shutil.copy2(checkout.path / "pkg/a.py", checkout.path / "pkg/a.py.bak")
    (checkout.path / "pkg/a.py").write_bytes(data := A.replace(b"    g(batch)\n", b"    patched_by_hand(batch)\n    g(batch)\n"))
    return data


def test_a_hand_patched_file_is_refused_with_what_its_back_up_is(checkout):
    hand_patched(checkout)
    with pytest.raises(AerieError) as refusal:
        checkout.plan(ONE)
    assert "+    patched_by_hand(batch)" in str(refusal.value)
    assert "beside it: pkg/a.py.bak is the pristine file" in str(refusal.value)


def test_hand_patched_content_that_is_accepted_is_the_original_and_comes_back_byte_for_byte(checkout):
    data = hand_patched(checkout)
    before, status = checkout.everything, checkout.status
    planned = checkout.apply(ONE, accept_unknown=True)
    assert "UNKNOWN content was taken as the original" in planned.warnings[0] and "+1 -0 against HEAD" in planned.warnings[0]
    assert b"patched_by_hand(batch)" in checkout.read("pkg/a.py") and b"one_mark()" in checkout.read("pkg/a.py")
    assert not checkout.apply(ONE).changed
    assert [file.state for file in checkout.plan(ONE).files if file.path == "pkg/a.py"] == ["ours"]
    checkout.apply(ONE, TWO)
    checkout.apply()
    assert checkout.read("pkg/a.py") == data
    assert (checkout.everything, checkout.status) == (before, status)


def test_a_wheels_pristine_back_up_gives_the_diff_that_its_record_can_not(tmp_path):
    site = tmp_path / "site-packages"
    info = site / "pkg-1.5.dist-info"
    info.mkdir(parents=True)
    (site / "pkg").mkdir()
    (site / "pkg/a.py.bak").write_bytes(A)
    (site / "pkg/a.py").write_bytes(A + b"# by hand\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(A).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"pkg/a.py,sha256={digest},{len(A)}\n")
    tree = SourceTree.open(site, "pkg")
    with pytest.raises(AerieError, match=r"\+# by hand(.|\n)*pkg/a.py.bak is the pristine file"):
        patch_plan.plan(tree, PatchStore.beside(tree, tmp_path / "store"), [ONE])


# HEAD moves under a patched tree


def moved(checkout: Checkout, files: dict[str, bytes]) -> str:
    """Move HEAD to a commit that changes ``files``, without touching the work tree, and then those of them that nobody patched."""
    other = checkout.top.with_name("upstream")
    checkout.git("clone", "--quiet", str(checkout.top), str(other))
    for name, data in files.items():
        (other / "python" / name).write_bytes(data)
    argv = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "-m", "upstream"]
    subprocess.run(argv, cwd=other, check=True)
    checkout.git("fetch", "--quiet", str(other), "main")
    checkout.git("reset", "--quiet", "--soft", "FETCH_HEAD")
    return checkout.git("rev-parse", "HEAD").strip()


def test_pulled_files_that_no_set_touches_change_nothing(checkout):
    checkout.apply(ONE, TWO)
    other = checkout.top.with_name("upstream")
    checkout.git("clone", "--quiet", str(checkout.top), str(other))
    (other / "python/pkg/c.py").write_bytes(b"c = 3\n")
    subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "commit", "--quiet", "--all", "-m", "c"], cwd=other, check=True
    )
    checkout.git("pull", "--quiet", "--ff-only", str(other), "main")
    assert {file.state for file in checkout.plan(ONE, TWO).files} == {"ours"}
    assert patch_plan.drift(checkout.tree, checkout.store, None) == []
    assert not checkout.apply(ONE, TWO).changed
    checkout.apply()
    assert checkout.status == ""


NEWER = A.replace(b"    return os\n", b"    return os.path\n")


def test_a_patched_file_that_head_has_anew_is_explained(checkout):
    first = checkout.tree.commit
    checkout.apply(ONE, TWO)
    second = moved(checkout, {"pkg/a.py": NEWER})
    with pytest.raises(AerieError) as refusal:
        checkout.apply(ONE, TWO)
    said = str(refusal.value)
    assert f"which is what Aerie wrote at commit {first[:12]}, and HEAD (commit {second[:12]}) has another content of it now" in said
    assert "what changed in between:" in said and "+    return os.path" in said and "one_mark" not in said
    assert f"git -C {checkout.top} checkout HEAD -- python/pkg/a.py" in said
    assert "pkg/b.py" not in said
    assert "from another content than HEAD" in patch_plan.drift(checkout.tree, checkout.store, None)[0]


def test_what_the_explanation_advises_works(checkout):
    checkout.apply(ONE, TWO)
    moved(checkout, {"pkg/a.py": NEWER})
    checkout.git("checkout", "HEAD", "--", "python/pkg/a.py")
    assert checkout.apply(ONE, TWO).changed
    assert b"return os.path" in checkout.read("pkg/a.py") and b"one_mark()" in checkout.read("pkg/a.py")
    checkout.apply()
    assert (checkout.read("pkg/a.py"), checkout.status) == (NEWER, "")


def test_or_accept_unknown_takes_heads_content_and_keeps_the_other(checkout):
    checkout.apply(ONE)
    old = checkout.read("pkg/a.py")
    moved(checkout, {"pkg/a.py": NEWER})
    checkout.apply(ONE, accept_unknown=True)
    assert b"return os.path" in checkout.read("pkg/a.py") and checkout.read("pkg/a.py").count(b"one_mark()") == 1
    assert checkout.store.get(hashlib.sha256(old).hexdigest()) == old
    checkout.apply()
    assert checkout.read("pkg/a.py") == NEWER


def test_taking_the_sets_back_gives_what_was_there_and_says_that_head_moved(checkout):
    checkout.apply(ONE)
    moved(checkout, {"pkg/a.py": NEWER})
    planned = checkout.apply()
    assert checkout.read("pkg/a.py") == A
    assert "put back to what it was before it was patched" in planned.warnings[0] and "HEAD" in planned.warnings[0]


def test_a_merge_of_ours_with_upstream_is_refused_with_its_diff(checkout):
    checkout.apply(ONE)
    ours = checkout.read("pkg/a.py")
    moved(checkout, {"pkg/a.py": NEWER})
    (checkout.path / "pkg/a.py").write_bytes(ours.replace(b"return os\n", b"return os.path\n"))
    with pytest.raises(AerieError, match=r"neither what Aerie wrote nor what it was made from at commit(.|\n)*\+    one_mark\(\)"):
        checkout.apply(ONE)
    with pytest.raises(AerieError, match="neither what Aerie wrote"):
        checkout.apply()


def test_what_was_written_and_then_committed_is_ours_still_and_no_original(checkout):
    checkout.apply(ONE, TWO)
    patched = checkout.everything
    checkout.commit("everything")
    assert {file.state for file in checkout.plan(ONE, TWO).files} == {"ours"}
    assert not checkout.apply(ONE, TWO).changed
    assert patch_plan.drift(checkout.tree, checkout.store, None) == []
    planned = checkout.apply(ONE)
    assert "somebody committed what Aerie wrote in 4 files" in planned.notes[0]
    assert checkout.read("pkg/a.py").count(b"one_mark()") == 1
    checkout.apply()
    assert {name: checkout.read(name) for name in FILES} == FILES and not (checkout.path / "pkg/new.py").exists()
    checkout.git("checkout", "--", ".")
    assert {name: facts for name, facts in checkout.everything.items() if not name.startswith(".git/")} == {
        name: facts for name, facts in patched.items() if not name.startswith(".git/")
    }


# The store


def damage(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(b"rot")


def test_a_damaged_original_is_named_and_nothing_is_written(checkout):
    checkout.apply(ONE, TWO)
    path = checkout.store.object_path(hashlib.sha256(A).hexdigest())
    damage(path)
    before = checkout.everything
    for attempt in (checkout.plan, checkout.apply):
        for sets in ((ONE, TWO), (TWO,), ()):
            with pytest.raises(AerieError, match=f"{path}: this kept original is damaged"):
                attempt(*sets)
    assert any(f"{path}: this kept original is damaged" in one for one in patch_plan.drift(checkout.tree, checkout.store, None))
    assert any(f"{path}: this kept original is damaged" in one for one in patch_plan.drift(checkout.tree, checkout.store, [ONE, TWO]))
    assert (checkout.everything, path.read_bytes()) == (before, b"rot")


def test_a_damaged_original_is_not_overwritten_by_the_run_that_would_keep_it(checkout):
    checkout.apply(ONE)
    checkout.apply()
    path = checkout.store.object_path(hashlib.sha256(A).hexdigest())
    damage(path)
    before = checkout.everything
    with pytest.raises(AerieError, match=f"{path}: this kept original is damaged"):
        checkout.apply(ONE)
    assert (checkout.everything, path.read_bytes(), checkout.store.journal()) == (before, b"rot", None)


def test_an_original_that_the_store_lost_comes_from_git(checkout):
    before = checkout.everything
    checkout.apply(ONE, TWO)
    shutil.rmtree(checkout.store_path / "sha256")
    assert patch_plan.drift(checkout.tree, checkout.store, None) == []
    checkout.apply()
    assert checkout.everything == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "aerie-patches/1", "files": {"pkg/a.py": {}}}', '{"schema": "other/2"}'])
@pytest.mark.parametrize("kind", ["manifest_path", "journal_path"])
def test_a_damaged_manifest_or_journal_is_never_taken_for_none(checkout, kind, text):
    checkout.apply(ONE)
    path = getattr(checkout.store, kind)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    before = checkout.everything
    for attempt in (checkout.plan, checkout.apply):
        with pytest.raises(AerieError, match=f"{path}: .*damaged"):
            attempt()
    with pytest.raises(AerieError, match=f"{path}: .*damaged"):
        patch_plan.drift(checkout.tree, checkout.store, None)
    assert (checkout.everything, path.read_text()) == (before, text)


def test_the_inventory_tells_what_needs_which_object(tmp_path):
    one, two = Checkout(tmp_path / "one"), Checkout(tmp_path / "two")
    two.store_path = one.store_path
    one.apply(ONE)
    two.apply(ONE, TWO)
    found = patch_store.inventory(one.store_path)
    sha_a, sha_b = (hashlib.sha256(data).hexdigest() for data in (A, B))
    assert {one.sha256: one.needed_by for one in found.objects} == {
        sha_a: tuple(sorted((one.store.key, two.store.key))),
        sha_b: (two.store.key,),
    }
    assert {(kept.tree, kept.sets, kept.tree_exists) for kept in found.manifests} == {
        (one.tree.identity, ("one",), True),
        (two.tree.identity, ("one", "two"), True),
    }
    key = two.store.key
    shutil.rmtree(two.top)
    found = patch_store.inventory(one.store_path)
    assert found.gone == (key,)
    assert found.unneeded() == ()
    assert [kept.sha256 for kept in found.unneeded(found.gone)] == [sha_b]
    assert all(kept.intact for kept in found.objects)
    one.store.object_path(sha_a).unlink()
    assert patch_store.inventory(one.store_path).missing == (sha_a,)


def test_nothing_is_thought_unneeded_while_a_manifest_can_not_be_read(checkout):
    checkout.apply(ONE)
    checkout.apply()
    assert len(patch_store.inventory(checkout.store_path).unneeded()) > 0
    checkout.store.manifest_path.write_text("{")
    found = patch_store.inventory(checkout.store_path)
    assert len(found.problems) == 1
    with pytest.raises(AerieError, match="nothing may be removed"):
        found.unneeded()


def test_what_a_cut_off_run_needs_is_needed(checkout):
    assert killed_at(checkout, "journal written", ONE)
    found = patch_store.inventory(checkout.store_path)
    assert [one.journal for one in found.manifests] == [True]
    assert found.unneeded() == ()


def test_the_store_is_tidied_and_used_one_after_the_other(checkout):
    with patch_store.alone(checkout.store_path), pytest.raises(AerieError, match="being tidied up now"), checkout.store.locked():
        pass
    with checkout.store.locked(), pytest.raises(AerieError, match="a run is patching a tree"), patch_store.alone(checkout.store_path):
        pass


def test_a_large_checkout_is_looked_at_quickly(checkout):
    checkout.write({f"pkg/m{one}/n{two}.py": b"x = 1\n" * 50 for one in range(30) for two in range(50)})
    checkout.commit("large")
    started = time.monotonic()
    checkout.plan(ONE, TWO)
    assert time.monotonic() - started < 5


@root_only
def test_programs_that_another_users_checkout_names_are_not_run(tmp_path):
    """A filter is a command in the checkout's own configuration: its owner would have it run by root."""
    site = Checkout(tmp_path)
    (site.top / ".gitattributes").write_text("*.py filter=mine\n")
    site.commit("filtered")
    ran = tmp_path / "ran"
    site.git("config", "filter.mine.smudge", f"touch {ran}; cat")
    assert git_checkout.GitCheckout.find(site.path, "pkg").content("pkg/a.py") == A
    assert ran.exists(), "our own checkout's filters are part of what a clean checkout has"
    ran.unlink()
    for path in [site.top, *site.top.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    git_checkout._filters.cache_clear()
    assert git_checkout.GitCheckout.find(site.path, "pkg").content("pkg/a.py") == A
    site.tree.edited()
    assert not ran.exists()
