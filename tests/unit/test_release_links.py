"""A switch that is taken back leaves no trace: the release that failed is not the one to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_json
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release

FIRST, GOOD, FAILED = "0.5.9-000000000000", "0.5.15-111111111111", "0.5.23-222222222222"


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    paths = HostPaths(tmp_path)
    for name in (FIRST, GOOD, FAILED):
        write_json(paths.release(name) / "release.json", {"id": name, "verified": True})
    return paths


def links(paths: HostPaths) -> tuple[str | None, str | None]:
    return release.linked(paths.current), release.linked(paths.previous)


@pytest.mark.parametrize("before", [[FIRST, GOOD], [GOOD]])
def test_a_switch_that_is_taken_back_restores_both_links(paths, before):
    for name in before:
        release.switch(paths, name)
    found = links(paths)
    release.switch(paths, FAILED)
    assert links(paths) == (FAILED, GOOD)
    release.switch(paths, GOOD, found[1] or "")
    assert links(paths) == found


class Killed(BaseException):
    """Stands for kill -9 at a system call."""


STEPS = ("write_json", "_point", "fsync_dir")


@pytest.mark.parametrize("call", range(1, 7))
def test_a_switch_that_is_cut_off_anywhere_is_finished_and_rollback_means_the_release_before(paths, monkeypatch, call):
    release.switch(paths, FIRST)
    release.switch(paths, GOOD)
    left = [call]

    def killed_at(name):
        function = getattr(release, name)

        def wrapped(*arguments):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return function(*arguments)

        return wrapped

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(release, name, killed_at(name))
        try:
            release.switch(paths, FAILED)
        except Killed:
            pass
        else:
            assert left[0] > 0
    intended = release.links(paths)
    assert intended in ({"current": GOOD, "previous": FIRST}, {"current": FAILED, "previous": GOOD})
    assert release.find(paths, "previous")["id"] == intended["previous"]
    release.switch(paths, intended["previous"])
    assert links(paths) == (intended["previous"], intended["current"])
    assert not (paths.releases / release.SWITCH).exists()


def test_what_a_killed_switch_left_beside_the_links_is_cleared_away(paths):
    for name in (".current.4711", ".previous.12"):
        (paths.root / name).symlink_to("releases/nothing")
    (paths.root / ".current.kept").touch()
    release.switch(paths, GOOD)
    assert {path.name for path in paths.root.iterdir() if path.name.startswith(".")} == {".current.kept"}


def test_previous_that_is_current_is_no_release_to_go_back_to(paths):
    release.switch(paths, GOOD)
    paths.previous.symlink_to(f"releases/{GOOD}")
    with pytest.raises(AerieError, match=r"leads to the current release, .* name it in sglang_patches_rollback_to: there is"):
        release.find(paths, "previous")


@pytest.mark.parametrize(
    "target", ["/elsewhere/{id}", "../elsewhere/{id}", "releases/../../other/releases/{id}", "{id}", "releases/{id}/bin"]
)
@pytest.mark.parametrize("name", ["current", "previous", "pins/kept"])
def test_a_link_that_leads_elsewhere_is_refused_though_the_name_is_right(paths, target, name):
    link = paths.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target.format(id=GOOD))
    with pytest.raises(AerieError, match=f"{name} leads to .*, which is no release below .*releases: point it to one of these"):
        release.linked(link)


@pytest.mark.parametrize(
    ("name", "target"), [("current", "releases/{id}"), ("current", "{root}/releases/{id}"), ("pins/kept", "../releases/{id}")]
)
def test_a_link_to_a_release_of_its_root_is_one_however_it_is_written(paths, name, target):
    link = paths.root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target.format(id=GOOD, root=paths.root))
    assert release.linked(link) == GOOD


def test_what_is_no_link_is_refused(paths):
    paths.current.mkdir()
    with pytest.raises(AerieError, match=r"current is a directory, and must be a link"):
        release.switch(paths, GOOD)
    assert paths.current.is_dir()
    assert not any(path.name.startswith(".current") for path in paths.root.iterdir())


@pytest.mark.parametrize("name", ["../../elsewhere/0.5.23-0123456789ab", "/elsewhere", "..", ".", "a/b", ""])
def test_an_id_that_is_a_path_is_no_release(paths, name):
    with pytest.raises(AerieError, match="is no release id"):
        release.switch(paths, name)


@pytest.mark.parametrize("content", ["", "[]", '{"current": "../x", "previous": null}', '{"current": 5}'])
def test_a_damaged_note_of_a_switch_is_reported(paths, content):
    release.switch(paths, GOOD)
    (paths.releases / release.SWITCH).write_text(content)
    with pytest.raises(AerieError, match="is damaged: look at"):
        release.switch(paths, FIRST)
    assert links(paths)[0] == GOOD
