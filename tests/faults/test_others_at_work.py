"""What somebody else does meanwhile is never lost, and two runs at once never mix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_transaction, twin
from package import ANEW, NARROW, WAYS, WIDE, Site, ideal

EDIT = b"theirs = 1\n"


def in_place(path: Path) -> None:
    path.write_bytes(EDIT)


def by_rename(path: Path) -> None:
    beside = path.with_name("editing.tmp")
    beside.write_bytes(EDIT)
    beside.replace(path)


def steps_of(site: Site, wanted) -> list[str]:
    names: list[str] = []
    site.apply(*wanted, step=names.append)
    return names


def test_an_edit_between_plan_and_write_is_refused_and_kept(site, way):
    planned = site.plan(WIDE)
    in_place(site.path / "pkg/low/c.py")
    with pytest.raises(AerieError, match=r"pkg/low/c.py changed while it was being patched(.|\n)*everything else in .* was put back"):
        patch_transaction.apply(site.tree, site.store, planned)
    assert site.content == ideal(())[0] | {"low/c.py": (EDIT, 0o644)}
    assert site.store.journal() is None


@pytest.mark.parametrize("editing", [in_place, by_rename])
@pytest.mark.parametrize("name", ["pkg/low/c.py", "pkg/low/data.bin", "pkg/low/their_new.py", "pkg/__init__.py"])
@pytest.mark.parametrize("start", list(WAYS))
def test_an_edit_at_any_step_is_never_lost(site, memory, way, start, name, editing, everything):
    start, wanted = WAYS[start]
    site.apply(*start)
    site.copy_to(memory / "template")
    for number in range(0, len(steps_of(site, wanted)), 1 if everything else 6):
        site.restore_from(memory / "template")
        steps = iter(range(1000))

        def step(_name: str, steps=steps, number=number) -> None:
            if next(steps) == number:
                editing(site.path / name)

        refusal = ""
        try:
            site.apply(*wanted, step=step)
        except AerieError as error:
            refusal = str(error)
        assert site.content[name.removeprefix("pkg/")][0] == EDIT, (number, refusal)
        assert site.store.journal() is None
        there = {path: found for path, found in site.content.items() if f"pkg/{path}" != name}
        assert there == {path: found for path, found in ideal(start if refusal else wanted)[0].items() if f"pkg/{path}" != name}, refusal


@pytest.mark.parametrize("editing", [in_place, by_rename])
@pytest.mark.parametrize("name", ["pkg/low/c.py", "pkg/low/data.bin", "pkg/low/their_new.py"])
def test_an_edit_in_the_very_moment_before_the_exchange_is_never_lost(site, monkeypatch, name, editing):
    exchange, done = twin.exchange, []

    def edit_first(one: Path, other: Path) -> None:
        if not done:
            editing(site.path / name)
            done.append(name)
        exchange(one, other)

    monkeypatch.setattr(twin, "exchange", edit_first)
    if name == "pkg/low/data.bin" and editing is in_place:
        site.apply(WIDE)
    else:
        with pytest.raises(AerieError, match="changed while it was being patched"):
            site.apply(WIDE)
    assert site.content[name.removeprefix("pkg/")][0] == EDIT
    assert site.store.journal() is None


def together(*functions) -> list[str]:
    """Start each in a process of its own, at the same moment; return what each raised."""
    ready, start = os.pipe(), os.pipe()
    children = []
    for function in functions:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(start[1])
            os.write(ready[1], b".")
            os.read(start[0], 1)
            error = ""
            try:
                function()
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
            os.write(writer, error.encode())
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    for _ in functions:
        os.read(ready[0], 1)
    for end in (*start[::-1], *ready):
        os.close(end)
    errors = []
    for child, reader in children:
        with os.fdopen(reader) as stream:
            errors.append(stream.read())
        os.waitpid(child, 0)
    return errors


def test_two_runs_at_once_on_one_tree_end_in_one_of_their_states(site, everything):
    for _ in range(30 if everything else 8):
        errors = together(lambda: site.apply(WIDE), lambda: site.apply(ANEW))
        assert all(error == "" or "another run is patching it now" in error for error in errors)
        assert "" in errors
        assert site.content in (ideal((WIDE,))[0], ideal((ANEW,))[0])
        assert site.store.journal() is None
    site.assert_goes_on(WIDE)


def test_while_one_run_works_another_is_refused(site):
    def other(name: str) -> None:
        assert together(lambda: site.apply(NARROW)) == [
            f"AerieError: {site.tree.identity}: another run is patching it now: wait for that to end"
        ]

    site.apply(WIDE, step=other)
    site.assert_clean(WIDE)


def test_two_trees_with_one_store_are_patched_at_once(memory, everything):
    store = memory / "store"
    one, two = Site(memory / "one", store), Site(memory / "two", store)
    for number in range(30 if everything else 8):
        wanted = [(WIDE,), (ANEW,), (WIDE, NARROW), ()][number % 4]
        assert together(lambda sets=wanted: one.apply(*sets), lambda sets=wanted: two.apply(*sets)) == ["", ""]
        one.assert_clean(*wanted)
        two.assert_clean(*wanted)
