"""What somebody else wrote is read within bounds and by its shape: a bad file is a problem of that file alone, at every boundary.

Inputs tried, at each of record, definition, outcome, other files of a cell, job result, release.json, survey and profile: every text
of ``hostile.RAW`` as the file, and every value of ``hostile.WRONG`` at every place of a good one. Each test counts its own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import example_records
import hostile
import pytest
from ansible.module_utils.aerie import lease_file, untrusted
from ansible.module_utils.aerie.host import capture, host_info, survey_shape
from ansible.module_utils.aerie.measuring import collection, ledger, records, verdict
from ansible.module_utils.aerie.profiling import profile_levels
from ansible.module_utils.aerie.releases import release_file
from test_capture import INFO
from test_records import cell

from aerie_controller import detached, terminal
from aerie_controller.preflight import results, rules
from aerie_controller.terminal_reports import experiment, preflight

HOSTS = sorted(path for path in (hostile.PROJECT / "tests/fixtures/hosts").iterdir() if path.is_dir())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def broken(good: Any) -> Iterator[bytes]:
    """Yield files that are not as ``good`` is."""
    yield from hostile.RAW
    for where in hostile.mutations(good):
        for value in hostile.WRONG:
            yield json.dumps(hostile.replaced(good, where, value)).encode()


# ---- the reader ----


@pytest.mark.parametrize("content", hostile.RAW, ids=range(len(hostile.RAW)))
def test_what_is_no_json_within_bounds_is_refused_in_one_line_that_is_safe_to_show(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(untrusted.Malformed, match=r"file\.json") as raised:
        untrusted.read(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def test_links_pipes_and_directories_are_no_files(tmp_path):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises((untrusted.Malformed, IsADirectoryError)):
            untrusted.read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        untrusted.read(tmp_path / "none")
    assert untrusted.read(tmp_path / "link", follow=True) == {}


def test_bounds_are_bounds():
    assert untrusted.parse("[" * 32 + "]" * 32) is not None
    for text, limits in (
        ("[" * 33 + "1" + "]" * 33, untrusted.RECORD),
        ("[1,2,3]", untrusted.Limits(values=3)),
        ("123", untrusted.Limits(size=2)),
    ):
        with pytest.raises(untrusted.Malformed):
            untrusted.parse(text, limits)


def test_a_large_file_is_refused_unread(tmp_path):
    path = tmp_path / "server_before.json"
    with path.open("wb") as stream:
        stream.truncate(300 << 20)
    with pytest.raises(untrusted.Malformed, match="more than 16,777,216 bytes"):
        untrusted.read(path)


def test_a_shape_names_what_is_wrong_and_where():
    shape = {"a": untrusted.WORD, "b?": untrusted.ListOf({"c": untrusted.Maybe(untrusted.WHOLE)})}
    untrusted.require({"a": "x", "b": [{"c": 1}, {"c": None}], "more": 1}, shape)
    with pytest.raises(untrusted.Malformed, match=r"^a is missing and b\.1\.c is text, not a whole number"):
        untrusted.require({"b": [{"c": 1}, {"c": "1"}]}, shape)
    assert untrusted.conform({"a": "x", "b": [{"c": 1}, 5, {"c": "1"}]}, shape)[0] == {"a": "x", "b": [{"c": 1}, {"c": None}]}


# ---- records, definitions, outcomes ----


def test_a_bad_record_is_left_out_and_the_others_are_in_the_ledger_and_the_report(tmp_path, record_property):
    good = example_records.campaign(repeats=1)
    example_records.write(tmp_path, good)
    bad = tmp_path / "bad/r/h/c/record.json"
    bad.parent.mkdir(parents=True)
    count = taken = 0
    for content in broken(good[0] | {"experiment": "bad", "run_id": "r", "host": "h", "cell": "c"}):
        bad.write_bytes(content)
        found = ledger.read_record(tmp_path, bad)
        count += 1
        if isinstance(found, ledger.Problem):
            assert found.path == "bad/r/h/c/record.json" and found.reason.isprintable() and len(found.reason) < 600
            continue
        taken += 1
        values, metrics = found
        content_of = ledger.Content({values[0]: values}, {values[0]: metrics})
        if taken % 10 == 0:
            ledger.rebuild(tmp_path / "ledger.sqlite", content_of)
        if taken % 4 == 0:
            problems: list[str] = []
            groups = verdict.groups(ledger.choose(content_of), None, problems)
            text = terminal.render(experiment.parts(groups, {}), 100) if groups else ""
            assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    bad.write_bytes(b"[" * 100_000)
    assert len(ledger.scan(tmp_path).records) == len(good)
    assert [problem.path for problem in ledger.scan(tmp_path).problems] == ["bad/r/h/c/record.json"]
    assert count > 1000
    record_property("counted records of hostile hosts", count)


def test_a_record_that_says_it_is_another_hosts_than_where_it_lies_is_left_out(tmp_path):
    one = example_records.record("eagle3", 4, 100.0)
    example_records.write(tmp_path, [one])
    (path,) = tmp_path.rglob("record.json")
    path.write_text(json.dumps(one | {"host": "gpu-2"}))
    (problem,) = ledger.scan(tmp_path).problems
    assert "gpu-2" in problem.reason and "lies elsewhere" in problem.reason


FILES = ("definition.json", "outcome.json", "client.jsonl", "server_after.json", "metrics_after.txt", "phases.jsonl")


@pytest.mark.parametrize("file", FILES)
def test_a_bad_file_of_a_cell_is_that_cells_problem_and_the_other_cell_is_collected(file, runs, record_property):
    cell(runs)
    bad = cell(runs, cell="bad-c4-r1", arm={"name": "bad", "speculation": None}, kind="profile")
    (bad / "phases.jsonl").touch()
    target, count = bad / file, 0
    try:
        good = json.loads(target.read_text() or "{}")
    except ValueError:
        good = {}
    for content in broken(good):
        target.write_bytes(content)
        found = collection.collect(runs, None, write=False)
        count += 1
        assert [one["cell"] for one in found.records][-1] == "eagle3-c4-r1"
        assert len(found.records) + len(found.problems) == 2
        assert all(problem.isprintable() and problem.startswith("r1/bad-c4-r1: ") for problem in found.problems)
        assert all("NaN" not in records.dump(record) and "Infinity" not in records.dump(record) for record in found.records)
    record_property("counted files of hostile cells", count)


def test_a_file_of_a_cell_that_leads_elsewhere_or_has_no_name_of_ours_is_not_collected(runs, tmp_path):
    directory = cell(runs)
    (tmp_path / "shadow").write_text("root:x")
    (directory / "leads").symlink_to(tmp_path / "shadow")
    (directory / "a b").write_text("x")
    Path(os.fsdecode(os.fsencode(directory) + b"/\xff")).write_text("x")
    os.mkfifo(directory / "pipe")
    (record,) = collection.collect(runs, None, write=False).records
    assert not {"leads", "a b", "pipe", "\udcff"} & set(record["raw"])
    (directory / "outcome.json").unlink()
    (directory / "outcome.json").symlink_to(tmp_path / "shadow")
    found = collection.collect(runs, None, write=False)
    assert found.records == () and "symbolic link" in found.problems[0] and "root:x" not in found.problems[0]


def test_records_that_can_not_be_made_again_are_told_and_the_others_are_made(runs):
    cell(runs)
    (cell(runs, cell="bad-c4-r1") / "outcome.json").write_text('{"status": "completed"}')
    found = collection.remake(runs, everything=True, write=True)
    assert found.changed == ("r1/eagle3-c4-r1/record.json",)
    assert len(found.problems) == 1 and "bad-c4-r1" in found.problems[0] and "reason is missing" in found.problems[0]


# ---- release.json ----


def test_a_release_that_says_something_else_is_none(tmp_path, record_property):
    good = {"id": "0.5.23-0123456789ab", "sglang_version": "0.5.23", "verified": True, "environment": {}, "patch_sets": [{"name": "a"}]}
    path, count = tmp_path / str(good["id"]) / "release.json", 0
    path.parent.mkdir()
    for content in broken(good):
        path.write_bytes(content)
        count += 1
        with contextlib.suppress(untrusted.Malformed):
            assert release_file.read(path.parent)["id"] == good["id"]
    for change, said in (({"id": "../../elsewhere"}, "its directory is"), ({"verified": "false"}, "verified is text")):
        path.write_text(json.dumps(good | change))
        with pytest.raises(untrusted.Malformed, match=said):
            release_file.read(path.parent)
    record_property("counted release.json of hostile hosts", count)


# ---- leases ----


def test_a_lease_that_is_none_is_told_as_such(tmp_path, record_property):
    good = {"owner": {"run": "1.2", "user": "ops", "controller": "deploy"}, "seconds": 900, "expires": 1.5e9}
    path, count = tmp_path / "lease.json", 0
    for content in (*broken(good), b"[]", b'"x"', b"5", b'{"owner":null}', b"{}"):
        path.write_bytes(content)
        count += 1
        with contextlib.suppress(untrusted.Malformed):
            assert set(lease_file.read(path)) >= set(good)
    path.write_text(json.dumps(good))
    assert lease_file.read(path) == good
    record_property("counted leases of hostile hosts", count)


# ---- job results ----


def test_a_jobs_state_is_read_by_its_shape(monkeypatch, record_property):
    progress = {"number": 1, "message": "x", "done": 0, "total": 1, "started": 1.0, "time": 2.0}
    good = {"progress": progress, "result": {"ok": True, "msg": "m", "changed": True, "ansible_facts": {}}, "running": True}
    said: list[str] = []
    monkeypatch.setattr(terminal, "progress", lambda host, text: said.append(f"{host} {text}"))
    monkeypatch.setattr(detached.time, "sleep", lambda _: 1 / 0)
    count = 0
    for content in broken(good):
        made = hostile.action("sglang_release", {}, lambda _: {})
        answer = {"stdout": content.decode(errors="surrogateescape"), "stderr": ""}
        made._low_level_execute_command = lambda *_, answer=answer, **__: answer
        made._python = lambda _: "python3"
        count += 1
        try:
            result = made._follow("/jobs/1", {})
        except ZeroDivisionError:  # it goes on waiting
            continue
        assert isinstance(result, dict) and not set(result) & set(detached.NOT_OF_A_HOST)
        assert result.get("failed") in (None, True)
    assert max(map(len, said)) < 600
    record_property("counted job results of hostile hosts", count)


# ---- surveys ----


def test_a_survey_of_any_shape_is_judged_captured_and_shown(record_property):
    """Every wrong value at every place of a survey: what is wrong is unknown, and nothing raises."""
    known = rules.load(rules.RULES)
    count = 0
    for where in hostile.mutations(INFO):
        for value in hostile.WRONG:
            count += 1
            try:
                survey, problems = survey_shape.checked(hostile.replaced(INFO, where, value))
            except untrusted.Malformed:
                continue
            assert all(problem.isprintable() for problem in problems)
            if count % 3 == 0:
                capture.sections(survey, [], {}, [])
            if count % 7 == 0:
                text = terminal.render(preflight.parts([results.examine(known, "gpu-01", survey, {"profile": "cuda"})]), 100)
                assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    assert count > 1000
    record_property("counted surveys of hostile hosts", count)


@pytest.mark.parametrize("host", HOSTS, ids=lambda path: path.name)
def test_a_recorded_host_is_as_documented(host):
    question = host_info.Question(aerie_root=Path("/opt/aerie"), paths=("/opt/aerie",), catalog={}, ports=(30000,))
    survey = host_info.survey(host_info.open_host(host), question)
    assert survey_shape.checked(survey) == (survey, [])


# ---- profiles ----


def test_a_bad_arm_is_a_problem_and_the_other_is_reported(tmp_path, record_property):
    def arm(name: str) -> Path:
        made = tmp_path / "run/gpu-01" / name
        (made / "c1").mkdir(parents=True)
        (made / "launch.json").write_text(json.dumps({"arm": {"name": name}, "started": "2026"}))
        (made / "c1/level.json").write_text(json.dumps({"concurrency": 1, "status": "completed", "reason": None}))
        windows = [{"pair": 0, "state": state, "start": start, "end": start + 1} for state, start in (("on", 1.0), ("off", 2.0))]
        (made / "c1/windows.json").write_text(json.dumps({"windows": windows}))
        line = {"t": 1.5, "kind": "decode", "running": 1, "tok_s": 10.0, "accept": 2.0}
        (made / "c1/decode.jsonl").write_text(f"{json.dumps(line)}\n")
        return made

    arm("good")
    bad, count = arm("bad"), 0
    for file in ("launch.json", "c1/level.json", "c1/windows.json", "c1/decode.jsonl"):
        good = json.loads((bad / file).read_text())
        for content in broken(good):
            (bad / file).write_bytes(content)
            found = profile_levels.whole(tmp_path / "run")
            count += 1
            assert "good" in [one["arm"]["name"] for one in found["hosts"]["gpu-01"]["arms"]]
            assert all(problem.isprintable() for problem in found.get("problems", []))
        (bad / file).write_text(json.dumps(good))
    record_property("counted files of hostile profiles", count)
