"""Prune frees what nothing needs and nothing else, can be killed anywhere, and has nothing to do the second time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import upkeep_example
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import prune
from ansible.module_utils.testing import patch_module_args
from upkeep_example import MARKS, WORKER

import host_prune
from aerie_controller import terminal
from aerie_controller.figures import human
from aerie_controller.terminal_reports import upkeep

LONG_AGO = time.time() - 40 * prune.DAY


@pytest.fixture
def root(tmp_path):
    return upkeep_example.make(tmp_path)


@pytest.fixture
def run(root, capsys):
    """Run the module as Ansible would; return its result."""

    def call(**arguments: Any) -> dict[str, Any]:
        with patch_module_args({"root": str(root.paths.root), **arguments}), pytest.raises(SystemExit):
            host_prune.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return call


def releases(root, count: int = 6):
    """Make releases a, b, c, …, each verified a day later than the one before."""
    return [root.release(letter * 12, MARKS, verified_at=f"2026-01-0{day}T00:00:00Z") for day, letter in enumerate("abcdef"[:count], 1)]


def aged(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def there(root) -> set[str]:
    return {path.name[-1] for path in root.paths.releases.iterdir()}


def removed(result: dict[str, Any]) -> dict[str, str]:
    return {item["path"]: item["why"] for item in result["removed"]}


def snapshot(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in directory.rglob("*"))


def test_the_newest_verified_releases_stay_and_so_does_whatever_a_link_or_a_person_names(root, run):
    made = releases(root)
    root.release("9" * 12, verified_at=None)
    root.link("current", made[0])
    root.link("previous", made[1])
    root.link("pins/nightly", made[2])
    assert run(keep=1, protect=[made[3].id])["changed"]
    assert there(root) == set("abcdf")
    assert run(keep=1, protect=[made[3].id])["changed"] is False


def test_check_mode_and_look_show_everything_and_free_nothing(root, run):
    releases(root)
    before = snapshot(root.paths.root)
    foreseen = run(keep=1, _ansible_check_mode=True)
    assert run(keep=1, look=True) == foreseen | {"invocation": run(keep=1, look=True)["invocation"]}
    assert snapshot(root.paths.root) == before
    done = run(keep=1)
    assert done["removed"] == foreseen["removed"]
    assert done["diff"]["before"].splitlines()[0] == f"releases/{upkeep_example.VERSION}-{'a' * 12} (not one of the 1 newest)"


def test_a_release_that_a_process_uses_stays_and_the_process_is_named(root, run):
    made = releases(root, 2)
    user = subprocess.Popen([str(made[0].path / "bin/python"), "-c", "import time; time.sleep(60)"])
    try:
        kept = {one["path"]: one["why"] for one in run(keep=1)["kept"]}
        assert f"used by process {user.pid}" in kept[f"releases/{made[0].id}"]
        assert there(root) == set("ab")
    finally:
        user.kill()
        user.wait()
    assert removed(run(keep=1)) != {}
    assert there(root) == {"b"}


def test_a_process_that_hid_its_arguments_is_seen_by_the_directory_that_it_works_in(root, run):
    made = releases(root, 2)
    argv, sleep = ["sglang::scheduler", "60"], shutil.which("sleep")
    user = subprocess.Popen(argv, executable=sleep, cwd=made[0].path, env={})
    try:
        run(keep=1)
        assert there(root) == set("ab")
    finally:
        user.kill()
        user.wait()


def test_a_release_that_an_instance_would_come_up_with_at_boot_stays(root, run):
    made = releases(root, 2)
    record = root.paths.instance("main") / "instance.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"release": made[0].id, "state": "ready"}))
    run(keep=1)
    assert there(root) == set("ab")
    record.write_text(json.dumps({"release": made[0].id, "state": "stopped"}))
    run(keep=1)
    assert there(root) == {"b"}


def test_what_only_gone_releases_needed_goes_with_them(root, run):
    old = root.release("a" * 12, MARKS, verified_at="2026-01-01T00:00:00Z", environment="cpu-000000000000")
    new = root.release("b" * 12, MARKS, verified_at="2026-01-02T00:00:00Z", environment="cpu-111111111111")
    root.link("current", new)
    store = root.store(old)
    manifest, kept = store.manifest_path, [path for path in (root.paths.originals / "sha256").rglob("*") if path.is_file()]
    unneeded, needed = root.environment("cpu-000000000000"), root.environment("cpu-111111111111")
    supervisors = [root.environment("supervisor-000000000000"), root.environment("supervisor-111111111111")]
    packages = [root.package("sglang-1.2.3-01234567"), root.package("sglang-1.2.2-01234567")]
    waiting = root.environment("cpu-222222222222")
    aged(*(path / ".aerie-environment.json" for path in (unneeded, needed, *supervisors)))
    aged(*(path / ".aerie-package.json" for path in packages))
    caches = [root.paths.caches / f"{one.id}-580.95" for one in (old, new)] + [
        root.paths.caches / f".aside/{new.id}-580.95.20260101T000000Z"
    ]
    foreign = root.paths.caches / "mine"
    for path in (*caches, foreign):
        path.mkdir(parents=True)
    result = run(keep=1)
    assert not any(path.exists() for path in (old.path, manifest, unneeded, supervisors[0], packages[1], caches[0], caches[2]))
    assert all(path.exists() for path in (new.path, needed, supervisors[1], packages[0], waiting, caches[1], foreign, *kept))
    assert "made less than a day ago" in {one["path"]: one["why"] for one in result["kept"]}["environments/cpu-222222222222"]
    assert run(keep=1)["changed"] is False


def test_kept_originals_go_when_nothing_has_needed_them_for_long(root, run):
    made = root.release("a" * 12, MARKS)
    root.link("current", made)
    store = root.store(made)
    put_away = store.object_path(store.put(b"an edit that gave way as asked\n"))
    published = store.object_path(store.put(upkeep_example.SOURCES["sglang/other.py"].encode()))
    needed = store.object_path(store.manifest()["files"][WORKER]["before"])
    assert run()["changed"] is False
    aged(put_away, published, needed)
    run()
    assert not put_away.exists()
    assert published.exists(), "a tree that stays was published with it"
    assert needed.exists()


def test_a_damaged_manifest_keeps_everything_that_is_kept(root, run):
    root.link("current", root.release("a" * 12, MARKS))
    store = root.paths.originals
    for path in (store / "sha256").rglob("*"):
        aged(path)
    (store / "manifests/0123456789abcdef.json").write_text("{")
    before = snapshot(store / "sha256")
    result = run()
    assert snapshot(store / "sha256") == before
    assert "nothing that is kept goes" in result["notes"][0]


def test_the_manifest_of_a_tree_elsewhere_stays_also_while_it_cannot_be_seen(root, run, tmp_path):
    root.link("current", root.release("a" * 12))
    checkout = tmp_path / "checkout"
    (checkout / "sglang").mkdir(parents=True)
    (checkout / "sglang/worker.py").write_text(upkeep_example.SOURCES[WORKER])
    made = upkeep_example.Made("", checkout, checkout)
    (checkout / "sglang-1.2.3.dist-info").mkdir()
    record = upkeep_example.fake_wheels.record_hash(upkeep_example.SOURCES[WORKER])
    (checkout / "sglang-1.2.3.dist-info/RECORD").write_text(f"{WORKER},{record},1\n")
    root.patch(made, MARKS)
    manifest = root.store(made).manifest_path
    checkout.rename(tmp_path / "unmounted")
    result = run()
    assert manifest.exists()
    assert "isn't there now" in result["kept"][-1]["why"]


def test_logs_and_jobs_that_ended_go_and_running_ones_stay(root, run):
    root.link("current", root.release("a" * 12))
    instance = root.paths.instance("main")
    instance.mkdir(parents=True)
    for name in ("server.log", "server.log.before", "server.log.1"):
        (instance / name).write_text("x" * 5000)
    jobs = {name: root.paths.jobs / f"sglang_server-{name}" for name in ("ended", "recent", "running")}
    for path in jobs.values():
        path.mkdir(parents=True)
        (path / "pid").write_text(str(processes.identify(os.getpid())))
    (jobs["ended"] / "result.json").write_text("{}")
    (jobs["recent"] / "result.json").write_text("{}")
    aged(jobs["ended"], jobs["running"])
    (root.paths.runs / "20200101").mkdir(parents=True)
    aged(root.paths.runs / "20200101")
    run()
    assert [path.name for path in sorted(instance.iterdir())] == ["server.log"]
    assert not jobs["ended"].exists()
    assert jobs["recent"].exists()
    assert jobs["running"].exists()
    assert (root.paths.runs / "20200101").exists(), "raw results are truth"


def test_half_made_things_go_unless_a_job_is_at_work(root, run):
    made = root.release("a" * 12)
    root.link("current", made)
    half = [root.paths.release("1.2.3-" + "b" * 12), root.paths.packages / ".incoming-x", root.environment("cpu-333333333333", whole=False)]
    for path in half:
        path.mkdir(parents=True, exist_ok=True)
    for name in ("sglang_release-1", "sglang_environment-1"):
        job = root.paths.jobs / name
        job.mkdir(parents=True)
        (job / "pid").write_text(str(processes.identify(os.getpid())))
    assert run()["changed"] is False
    for name in ("sglang_release-1", "sglang_environment-1"):
        (root.paths.jobs / name / "result.json").write_text("{}")
    run()
    assert not any(path.exists() for path in half)


def test_the_environment_of_a_release_that_cannot_be_read_stays(root, run):
    made = root.release("a" * 12)
    root.link("current", made)
    environment = root.environment("cpu-0123456789ab")
    aged(environment / ".aerie-environment.json")
    (made.path / "release.json").write_text("{")
    result = run()
    assert environment.exists()
    assert "can't be told" in {one["path"]: one["why"] for one in result["kept"]}["environments/cpu-0123456789ab"]


def test_symbolic_links_are_never_followed(root, run, tmp_path):
    root.link("current", root.release("a" * 12))
    outside = tmp_path / "outside"
    (outside / "cpu-000000000000/bin").mkdir(parents=True)
    (outside / "1.2.3-bbbbbbbbbbbb").mkdir()
    root.paths.environments.symlink_to(outside)
    (root.paths.releases / "1.2.3-bbbbbbbbbbbb").symlink_to(outside / "1.2.3-bbbbbbbbbbbb")
    root.paths.caches.mkdir()
    (root.paths.caches / "1.2.3-bbbbbbbbbbbb-none").symlink_to(outside)
    before = snapshot(outside)
    result = run(keep=0)
    assert snapshot(outside) == before
    assert result["changed"] is False
    assert f"{root.paths.environments} is a symbolic link" in result["notes"][0]


def test_a_link_that_appears_between_look_and_deed_is_not_followed(root, tmp_path):
    made = releases(root, 2)
    planned = prune.plan(root.paths, 1)
    root.paths.releases.rename(tmp_path / "outside")
    root.paths.releases.symlink_to(tmp_path / "outside")
    with pytest.raises(AerieError, match="a symbolic link leads there by now"):
        prune.apply(root.paths, planned)
    assert (tmp_path / "outside" / made[0].id / "release.json").exists()


def test_a_directory_that_is_no_root_of_ours_is_left_alone(tmp_path, capsys):
    (tmp_path / "jobs/old").mkdir(parents=True)
    aged(tmp_path / "jobs/old")
    with patch_module_args({"root": str(tmp_path)}), pytest.raises(SystemExit):
        host_prune.main()
    result = json.loads(capsys.readouterr().out)
    assert result["changed"] is False
    assert "holds no releases" in result["notes"][0]
    assert (tmp_path / "jobs/old").exists()


def test_what_is_mounted_inside_stays(root, monkeypatch):
    made = releases(root, 2)
    monkeypatch.setattr(prune, "_mounts", lambda: [made[0].path.resolve() / "models"])
    planned = prune.plan(root.paths, 1)
    assert planned.items == ()
    assert "another file system is mounted" in planned.kept[0].why


def test_a_file_with_two_names_counts_when_the_last_of_them_goes(root):
    made = releases(root, 3)
    large = made[0].path / "large.so"
    large.write_bytes(b"x" * 1_000_000)
    for one in made[1:]:
        (one.path / "large.so").hardlink_to(large)

    def freed(keep: int) -> int:
        return prune.plan(root.paths, keep).bytes

    assert freed(1) < 500_000, "the release that stays still has it"
    assert 1_000_000 < freed(0) < 1_500_000


def test_wherever_it_is_killed_nothing_looks_whole_that_is_not_and_the_next_run_goes_on(root):
    releases(root)
    root.environment("cpu-000000000000")
    aged(root.paths.environments / "cpu-000000000000/.aerie-environment.json")
    seen = set()
    for allowed in range(1, 60):
        pid = os.fork()
        if not pid:
            calls = iter(range(allowed))

            def step(event: str, _arguments: Any, calls: Any = calls) -> None:
                if event in ("os.remove", "os.rmdir", "os.rename") and next(calls, None) is None:
                    os._exit(9)

            sys.addaudithook(step)
            prune.apply(root.paths, prune.plan(root.paths, 1))
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        whole = {path.parent for path in root.paths.releases.glob("*/release.json")}
        assert all((path / "lib").is_dir() and (path / "bin/python").exists() for path in whole)
        assert all((path.parent / "bin/python").exists() for path in root.paths.environments.glob("*/.aerie-environment.json"))
        seen.add(killed)
        if not killed:
            break
    assert seen == {True, False}
    assert prune.plan(root.paths, 1).items == ()
    assert there(root) == {"f"}


def test_a_run_that_patches_a_tree_keeps_prune_waiting(root, run):
    made = releases(root, 2)
    with root.store(made[1]).locked():
        assert "is patching a tree" in run(keep=1)["msg"]
    assert there(root) == set("ab")


def test_a_lease_that_was_lost_stops_it(root, run):
    releases(root, 2)
    result = run(keep=1, lease=upkeep_example.OWNER)
    assert "our lease on this host is gone" in result["msg"]
    assert there(root) == set("ab")


def test_the_table_fits_a_terminal(root, run):
    made = releases(root)
    root.link("current", made[0])
    outcome = run(keep=1, protect=["1.2.3-" + "e" * 11])
    text = terminal.render(upkeep.pruned("gpu-01", outcome, done=False), 100)
    assert max(map(len, text.splitlines())) <= 100
    assert f"release {made[1].id}" in text
    assert "not one of the 1 newest" in text
    assert "! sglang_release_protect names" in text
    assert human(0) == "0 B"
    assert human(1536 << 20) == "1.5 GiB"
