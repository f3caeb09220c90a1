"""A host is changed by one run at a time, and a dead run never holds it for good."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json

OURS = lease.Owner(run="1.1", user="ops", controller="here")
THEIRS = lease.Owner(run="2.2", user="eve", controller="there")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "root" / "lease.json"


def expire(path: Path) -> None:
    write_json(path, read_json(path) | {"expires": 0})


def test_a_free_host_is_taken_and_taken_again_by_the_same_run(path):
    assert lease.acquire(path, OURS) is None
    assert lease.acquire(path, OURS) is None
    assert read_json(path)["owner"]["user"] == "ops"


def test_a_live_lease_of_another_run_is_refused_with_its_owner_and_the_cure(path):
    lease.acquire(path, THEIRS)
    before = path.read_bytes()
    with pytest.raises(AerieError, match=r"held by eve on there.*aerie_lease_break=true"):
        lease.acquire(path, OURS)
    with pytest.raises(AerieError, match="held by eve"):
        lease.check(path, OURS)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("prepare", "arguments", "why"),
    [
        (expire, {}, "it expired"),
        (lambda _: None, {"breaking": True}, "broken as asked"),
        (lambda _: None, {"dead_runs": ("2.2",)}, "its run has ended"),
    ],
)
def test_a_lease_that_no_longer_counts_is_taken_over_with_a_message(path, prepare, arguments, why):
    lease.acquire(path, THEIRS)
    prepare(path)
    assert why in (lease.acquire(path, OURS, **arguments) or "")
    assert read_json(path)["owner"]["run"] == "1.1"


def test_a_run_whose_lease_was_taken_stops_before_it_changes_anything_more(path):
    lease.acquire(path, OURS)
    lease.acquire(path, THEIRS, breaking=True)
    with pytest.raises(AerieError, match="taken over by eve"):
        lease.renew(path, OURS)
    assert read_json(path)["owner"]["run"] == "2.2"


def test_renewing_prolongs_the_lease(path):
    lease.acquire(path, OURS, seconds=100)
    expire(path)
    lease.renew(path, OURS)
    assert read_json(path)["expires"] > 0


def test_only_the_owner_gives_a_lease_back(path):
    lease.acquire(path, THEIRS)
    assert lease.release(path, OURS) is False
    assert path.exists()
    assert lease.release(path, THEIRS) is True
    assert not path.exists()


def test_a_torn_lease_file_holds_nobody_up(path):
    path.parent.mkdir()
    path.write_text("{")
    assert lease.acquire(path, OURS) is None
