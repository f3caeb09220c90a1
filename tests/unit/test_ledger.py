"""The ledger holds exactly what the records say, however it came to be."""

from __future__ import annotations

import io
import json
import sqlite3
from pathlib import Path

import example_records
import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import ledger
from ansible.module_utils.testing import patch_module_args


@pytest.fixture
def results(tmp_path: Path) -> Path:
    example_records.write(tmp_path, example_records.campaign(repeats=2))
    return tmp_path


def update(results: Path) -> ledger.Change:
    file, wanted = results / ledger.LEDGER_NAME, ledger.scan(results)
    change = ledger.plan(file, wanted)
    ledger.apply(file, wanted, change)
    return change


def dump(results: Path) -> str:
    return ledger.dump(results / ledger.LEDGER_NAME)


def some_record(results: Path) -> Path:
    return min(results.rglob("record.json"))


def test_a_deleted_ledger_comes_back_with_equal_content(results):
    update(results)
    before = dump(results)
    (results / ledger.LEDGER_NAME).unlink()
    update(results)
    assert dump(results) == before
    assert "output_throughput_tok_s" in before


def test_growing_step_by_step_equals_rebuilding(results):
    update(results)
    example_records.write(results, example_records.campaign(run_id="20260101T000000-earlier", repeats=1))
    assert len(update(results).added) == 10
    grown = dump(results)
    ledger.rebuild(results / ledger.LEDGER_NAME, ledger.scan(results))
    assert dump(results) == grown


def test_nothing_changes_where_nothing_changed(results):
    assert update(results).any
    before = (results / ledger.LEDGER_NAME).read_bytes()
    assert not update(results).any
    assert (results / ledger.LEDGER_NAME).read_bytes() == before


def test_changed_and_removed_records_are_followed(results):
    update(results)
    file = some_record(results)
    record = json.loads(file.read_text())
    record["metrics"]["output_throughput_tok_s"] = 4321.5
    file.write_text(json.dumps(record))
    gone = max(results.rglob("record.json"))
    gone.unlink()
    change = update(results)
    assert (len(change.added), len(change.updated), len(change.removed)) == (0, 1, 1)
    assert "4321.5" in dump(results)
    assert gone.parent.name + "/record.json" not in dump(results)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"schema": "other/1"}', "not one of Aerie's records"),
        (b'{"schema": "aerie-record/9"}', "update Aerie"),
        (b'{"schema": "aerie-record/1", "record_id": "x"}', "experiment is missing"),
    ],
)
def test_a_foreign_or_damaged_record_is_reported_and_the_others_kept(results, content, reason):
    intruder = results / "aaa" / "record.json"
    intruder.parent.mkdir()
    intruder.write_bytes(content)
    update(results)
    found = ledger.scan(results)
    assert [problem.path for problem in found.problems] == ["aaa/record.json"]
    assert reason in found.problems[0].reason
    assert len(found.records) == 18
    assert "aaa/record.json" not in dump(results)


def test_a_copy_of_a_record_counts_once(results):
    original = some_record(results)
    copy = results / "zzz" / "record.json"
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    found = ledger.scan(results)
    assert len(found.records) == 18
    assert original.relative_to(results).as_posix() in found.problems[0].reason


@pytest.mark.parametrize("damage", ["cut", "noise", "table"])
def test_a_damaged_ledger_is_made_again(results, damage):
    update(results)
    before, file = dump(results), results / ledger.LEDGER_NAME
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:5000])
    elif damage == "noise":
        file.write_bytes(b"no database at all" * 100)
    else:
        with sqlite3.connect(file) as connection:
            connection.execute("DROP VIEW runs")
    assert update(results).remake
    assert dump(results) == before


def test_a_ledger_of_an_older_schema_is_made_again_from_the_records(results):
    update(results)
    before, file = dump(results), results / ledger.LEDGER_NAME
    file.unlink()
    with sqlite3.connect(file) as connection:
        connection.executescript(f"CREATE TABLE old (x); PRAGMA application_id = {ledger.APPLICATION_ID}; PRAGMA user_version = 0;")
    assert "schema 0" in (update(results).remake or "")
    assert dump(results) == before


@pytest.mark.parametrize(("pragma", "message"), [("application_id = 7", "not Aerie's ledger"), ("user_version = 99", "update Aerie")])
def test_what_is_not_ours_to_replace_is_refused_and_left_alone(results, pragma, message):
    update(results)
    file = results / ledger.LEDGER_NAME
    with sqlite3.connect(file) as connection:
        connection.execute(f"PRAGMA {pragma}")
    connection.close()
    before = file.read_bytes()
    with pytest.raises(AerieError, match=message):
        update(results)
    with pytest.raises(AerieError, match=message):
        ledger.rebuild(file, ledger.scan(results))
    assert file.read_bytes() == before


def test_a_reader_sees_the_old_state_until_the_new_one_is_whole(results):
    update(results)
    with sqlite3.connect(results / ledger.LEDGER_NAME) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM records").fetchone() == (18,)
        some_record(results).unlink()
        update(results)
        assert reader.execute("SELECT COUNT(*) FROM records").fetchone() == (18,)
        reader.execute("COMMIT")
        assert reader.execute("SELECT COUNT(*) FROM records").fetchone() == (17,)
    reader.close()


def test_the_newest_run_of_each_experiment_is_chosen(results):
    example_records.write(results, example_records.campaign(run_id="zzz-sorts-last", times={"started": "2025-12-31T00:00:00Z"}))
    content = ledger.scan(results)
    assert ledger.runs(content) == [("example", "20260102T030405-example"), ("example", "zzz-sorts-last")]
    assert {record["run_id"] for record in ledger.choose(content)} == {"20260102T030405-example"}
    assert {record["run_id"] for record in ledger.choose(content, ["zzz-sorts-last"])} == {"zzz-sorts-last"}


def test_an_unknown_run_is_refused_with_a_near_match(results):
    with pytest.raises(AerieError, match="did you mean '20260102T030405-example'"):
        ledger.choose(ledger.scan(results), ["20260102T030405-exmaple"])
    with pytest.raises(AerieError, match="experiment 'exampel' has no record; did you mean 'example'"):
        ledger.choose(ledger.scan(results), [], ["exampel"])


def test_the_real_recorder_and_the_ledger_name_the_same_schema():
    from ansible.module_utils.aerie.measuring import records

    assert records.SCHEMA in ledger.RECORD_SCHEMAS


def run_module(capsys, monkeypatch, **arguments) -> dict:
    import results_ledger

    monkeypatch.setattr("sys.stdin", io.StringIO())
    with patch_module_args(arguments), pytest.raises(SystemExit):
        results_ledger.main()
    return json.loads(capsys.readouterr().out)


def test_the_module_tells_changes_truly_and_check_mode_writes_nothing(results, capsys, monkeypatch):
    file = results / ledger.LEDGER_NAME
    rehearsed = run_module(capsys, monkeypatch, results=str(results), _ansible_check_mode=True)
    assert rehearsed["changed"]
    assert not file.exists()
    first = run_module(capsys, monkeypatch, results=str(results))
    assert (first["changed"], first["records"], first["added"], first["runs"]) == (True, 18, 18, 1)
    for state in ("present", "rebuilt"):
        again = run_module(capsys, monkeypatch, results=str(results), state=state)
        assert (again["changed"], again["records"], again["added"], again["remade"]) == (False, 18, 0, None)
    (some_record(results)).write_text("{")
    broken = run_module(capsys, monkeypatch, results=str(results), state="rebuilt")
    assert broken["changed"]
    assert broken["removed"] == 1
    assert "not JSON" in broken["problems"][0]["reason"]
