"""A host is changed by one run at a time, and a dead run never holds it for good."""

from __future__ import annotations

import time
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


DAMAGED = {
    "torn": "{",
    "empty": "",
    "binary": "\udcff\x00",
    "no table": "[]",
    "a text": '"x"',
    "a number": "5",
    "no owner": '{"owner": null, "seconds": 900, "expires": 9e9}',
    "no expiry": '{"owner": {"run": "2.2", "user": "eve", "controller": "there"}, "seconds": 900}',
    "an expiry in words": '{"owner": {"run": "2.2", "user": "eve", "controller": "there"}, "seconds": 900, "expires": "soon"}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_lease_holds_nobody_up_and_is_reported(path, content):
    path.parent.mkdir()
    path.write_text(content, errors="surrogateescape")
    assert lease.holder(path) is None
    assert "is no lease" in (lease.check(path, OURS) or "")
    assert "is no lease" in (lease.acquire(path, OURS) or "")
    assert lease.acquire(path, OURS) is None
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(AerieError, match=r"is no lease .*, and was ours"):
        lease.renew(path, OURS)


def test_a_directory_in_its_place_is_refused_and_moved_aside_when_the_lease_is_broken(path):
    path.mkdir(parents=True)
    (path / "kept").touch()
    with pytest.raises(AerieError, match=r"is no lease \(a directory\): look what it is, .* aerie_lease_break=true"):
        lease.acquire(path, OURS)
    assert "moved aside" in (lease.acquire(path, OURS, breaking=True) or "")
    assert read_json(path)["owner"]["run"] == OURS.run
    (aside,) = path.parent.glob("lease.json.*")
    assert (aside / "kept").exists()


def test_a_lease_lasts_no_longer_than_it_was_taken_for_though_a_clock_was_set_back(path):
    lease.acquire(path, THEIRS, seconds=100)
    write_json(path, read_json(path) | {"expires": 32e9})
    with pytest.raises(AerieError, match="for another 100 s"):
        lease.acquire(path, OURS)


def test_a_lease_is_kept_while_work_lasts_longer_than_it_would(path):
    lease.acquire(path, OURS, seconds=1)
    lease.renew_if_given(path, {"run": OURS.run, "user": OURS.user, "controller": OURS.controller})
    try:
        first = read_json(path)["expires"]
        deadline = time.monotonic() + 20
        while read_json(path)["expires"] < first + 1.5:
            assert time.monotonic() < deadline, "the lease was not renewed"
            time.sleep(0.05)
        with pytest.raises(AerieError, match="held by ops"):
            lease.acquire(path, THEIRS)
    finally:
        lease.leave()


def test_what_keeps_a_lease_ends_when_it_is_taken_away_and_takes_nothing_back(path):
    lease.acquire(path, OURS, seconds=1)
    kept = lease.Keeper(path, OURS, seconds=1)
    lease.acquire(path, THEIRS, breaking=True)
    kept._thread.join(20)
    assert not kept._thread.is_alive()
    assert read_json(path)["owner"]["run"] == THEIRS.run


def test_the_lock_is_ours_alone(path):
    path.parent.mkdir()
    path.with_suffix(".lock").touch(mode=0o644)
    path.with_suffix(".lock").chmod(0o644)
    lease.acquire(path, OURS)
    assert path.with_suffix(".lock").stat().st_mode & 0o777 == 0o600
