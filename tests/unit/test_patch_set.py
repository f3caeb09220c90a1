"""patch_set reads a patch set whole or says everything that is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching.patch_set import PatchSet, selected
from ansible.module_utils.aerie.specifiers import Version

from aerie_controller import patch_sets

HOOK = {"name": "h", "file": "pkg/a.py", "at": [{"function": "f"}], "where": "start", "insert": "mark()"}


def made(name: str = "one", *, overlay: dict[str, str] | None = None, **changes: Any) -> PatchSet:
    definition = {"name": name, "summary": "s", "why": "w", "versions": ">=1", "hooks": [HOOK]} | changes
    return PatchSet.of(
        {"name": name, "definition": {key: value for key, value in definition.items() if value is not None}, "overlay": overlay or {}}
    )


def with_hook(**changes: Any) -> dict[str, Any]:
    hook = HOOK | changes
    return {"hooks": [{key: value for key, value in hook.items() if value is not None}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": ">=1"}, "unknown key 'version'; did you mean 'versions'"),
        ({"summary": None}, "summary is missing"),
        ({"name": "other"}, "name is 'other', but its folder is 'one'"),
        ({"versions": "1"}, "versions: '1' is no version specifier"),
        ({"versions": 1.0}, "versions must be text in quotes"),
        ({"needs": "two"}, "needs must be a list of names"),
        ({"hooks": []}, "neither hooks nor files"),
        ({"hooks": [HOOK, HOOK]}, "two hooks are named 'h'"),
        (with_hook(insrt="x"), "hook 'h': unknown key 'insrt'; did you mean 'insert'"),
        (with_hook(insert=None), "hook 'h': insert is missing"),
        (with_hook(where="befor"), "did you mean 'before'"),
        (with_hook(where="before"), "where: before needs call"),
        (with_hook(call="g"), "leave call out"),
        (with_hook(at=[{"functoin": "f"}]), "unknown step 'functoin'; did you mean 'function'"),
        (with_hook(at=[{"branch": "elif"}]), "branch must be 'if' or 'else'"),
        (with_hook(at=None), "where: start needs at"),
        (with_hook(file="../a.py"), "must be a plain relative path"),
        (with_hook(file="/etc/a.py"), "must be a plain relative path"),
        (with_hook(file="a.py"), "must lie inside the package"),
        (with_hook(versions="new"), "hook 'h': versions: 'new' is no version specifier"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(changes, message):
    name = changes.pop("name", None)
    with pytest.raises(AerieError, match=message):
        made(**changes) if name is None else PatchSet.of(
            {"name": "one", "definition": {"name": name, "summary": "s", "why": "w", "versions": "", "hooks": [HOOK]}, "overlay": {}}
        )


def test_all_mistakes_are_told_at_once():
    with pytest.raises(AerieError, match="2 problems"):
        made(summary=None, versions="1")


def test_the_hash_follows_what_can_change_a_tree_and_not_the_prose():
    one = made()
    assert one.sha256 == made(summary="t", why="v").sha256
    others = {
        made(**with_hook(insert="other()")).sha256,
        made(overlay={"pkg/b.py": ""}).sha256,
        made(overlay={"pkg/b.py": "x = 1\n"}).sha256,
        made(versions=">=2").sha256,
    }
    assert len(others | {one.sha256}) == 5


def test_hooks_are_chosen_by_version():
    hooks = [HOOK | {"name": "old", "versions": "<2"}, HOOK | {"name": "new", "versions": ">=2"}, HOOK | {"name": "both"}]
    chosen = made(hooks=hooks).hooks_for(Version.parse("2.0.post1"))
    assert [hook.name for hook in chosen] == ["new", "both"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([made(versions=">=2")], "one is for >=2, not for 1.5"),
        ([made(), made()], "one is given twice"),
        ([made(needs=["two"])], "one needs two: give it too"),
        ([made(needs=["two"]), made("two")], "one needs two, which must come before it"),
        ([made(conflicts=["two"]), made("two")], "one conflicts with two"),
    ],
)
def test_sets_that_do_not_go_together_are_refused(sets, message):
    with pytest.raises(AerieError, match=message):
        selected(sets, Version.parse("1.5"))


def test_what_upstream_has_is_left_out_with_a_note():
    kept, notes = selected([made(upstream_since="1.5", versions="<1.5"), made("two", needs=["one"])], Version.parse("1.5.post1"))
    assert [one.name for one in kept] == ["two"]
    assert notes == ["patch set one was left out: 1.5.post1 has it already (upstream since 1.5)"]


def test_folders_are_read_with_their_overlays(tmp_path):
    folder = tmp_path / "one"
    (folder / "overlay/pkg/__pycache__").mkdir(parents=True)
    (folder / "overlay/pkg/new.py").write_bytes(b"x = 1\r\n")
    (folder / "overlay/pkg/__pycache__/new.pyc").write_bytes(b"\xff")
    (folder / "patchset.yml").write_text("name: one\nsummary: s\nwhy: w\nversions: '>=1'\n")
    (one,) = patch_sets.load(["one"], tmp_path)
    assert one.overlay == {"pkg/new.py": "x = 1\r\n"}


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(AerieError, match=r"no patch set 'phase_profile' .*did you mean 'phase_profiler'"):
        patch_sets.load(["phase_profile"])


@pytest.mark.parametrize("name", patch_sets.available())
def test_every_patch_set_of_the_project_is_valid(name):
    (one,) = patch_sets.load([name])
    assert one.name == name
