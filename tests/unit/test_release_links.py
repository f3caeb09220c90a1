"""A switch that is taken back leaves no trace: the release that failed is not the one to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest
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
