"""A record is a pure function of a cell's raw files, and what a controller receives is exactly what the host had."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json
from ansible.module_utils.aerie.measuring import bench_runner, collection, placing, records

RESULT = {
    "completed": 10,
    "duration": 2.0,
    "output_throughput": 240.0,
    "input_throughput": 500.0,
    "mean_ttft_ms": 30.0,
    "median_ttft_ms": 28.0,
}
METRICS = (
    "sglang:num_requests_total {}\nsglang:generation_tokens_total {}\nsglang:spec_verify_calls_total {}\nsglang:prompt_tokens_total {}\n"
)
PHASES = {"target_verify": 4.0, "draft": 3.0, "draft_extend": 1.0, "tree_and_acceptance": 1.0, "kv": 0.5, "remainder": 0.5}
CYCLE = {
    "t": 1.0, "batch": 4, "steps": 3, "graph": False, "clock": "monotonic", "cycle_ms": 10.0, "gap_ms": 0.5, "phases": PHASES,
    "draft_steps_ms": [1.0, 1.0, 1.0],
}  # fmt: skip


def definition(**changes: object) -> dict:
    value = {
        "schema": bench_runner.SCHEMA,
        "run_id": "r1",
        "host": "gpu-01",
        "experiment": "demo",
        "plan": "p" * 64,
        "launch": 2,
        "cell": "eagle3-c4-r1",
        "arm": {"name": "eagle3", "speculation": {"algorithm": "EAGLE3", "steps": 3}},
        "workload": {"dataset": "sharegpt", "output_len": 48, "dataset_sha256": "d" * 64},
        "concurrency": 4,
        "repeat": 1,
        "kind": "measure",
        "seed": 5,
        "requests": 10,
        "instance": "main",
        "argv": ["python", "-m", "sglang.launch_server", "--api-key", "s3cret"],
        "environment": {"HF_TOKEN": "s3cret", "OMP_NUM_THREADS": "1"},
        "release": {"id": "0.5.23-abc", "sglang_version": "0.5.23", "torch_version": "2.13.0", "python_version": "3.11.2"},
        "models": {"target": {"name": "target", "identity": "t" * 64}},
        "host_info": {"fingerprint": "f" * 64},
        "host_fingerprint": {"fingerprint": "f" * 64},
        "client": {"name": "sglang-rust", "version": "0.5.23", "sha256": "c" * 64},
        "timeout_seconds": 60,
    } | changes
    return value | {"identity": bench_runner.identity(value)}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def cell(runs: Path, status: str = "completed", reason: str | None = None, **changes: object) -> Path:
    made = definition(**changes)
    directory = runs / "r1" / made["cell"]
    write_json(directory / "definition.json", made)
    (directory / "client.jsonl").write_text(json.dumps(RESULT) + "\n")
    (directory / "metrics_before.txt").write_text(METRICS.format(5, 100, 50, 1000))
    (directory / "metrics_after.txt").write_text(METRICS.format(15, 580, 285, 2500))
    write_json(directory / "server_before.json", {"version": "0.5.23", "internal_states": [{}]})
    write_json(directory / "server_after.json", {"version": "0.5.23", "internal_states": [{"avg_spec_accept_length": 2.2}]})
    times = {"started": "2026-06-01T22:00:00.000Z", "finished": "2026-06-01T22:00:02.500Z"}
    write_json(directory / "outcome.json", {"status": status, "reason": reason, "exit_status": 0, "seconds": 2.5} | times)
    return directory


def test_a_record_holds_the_cells_own_figures_and_all_that_defines_it(runs):
    record = records.make(cell(runs))
    metrics = record["metrics"]
    assert (metrics["output_throughput_tok_s"], metrics["total_throughput_tok_s"], metrics["ttft_ms"]["median"]) == (240.0, 740.0, 28.0)
    assert metrics["accept_length"] == pytest.approx((480 - 10) / 235) == 1 + metrics["accepted_tokens"] / metrics["verify_steps"]
    assert metrics["accept_source"] == "metrics" and metrics["cached_tokens"] == 0
    assert (record["status"], record["times"]["seconds"], record["versions"]["sglang_served"]) == ("completed", 2.5, "0.5.23")
    assert record["raw"]["client.jsonl"]["bytes"] == len(json.dumps(RESULT)) + 1
    assert record["schema"] == "aerie-record/1" and not record["acceptance_simulated"]


def test_the_same_raw_files_give_the_same_record_byte_for_byte_wherever_they_lie(runs, tmp_path):
    directory = cell(runs)
    first = records.dump(records.make(directory))
    (directory / "record.json").write_text(first)
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory, moved)
    assert records.dump(records.make(moved)) == first
    (moved / "metrics_after.txt").write_text(METRICS.format(15, 581, 285, 2500))
    assert records.dump(records.make(moved)) != first


def test_no_secret_reaches_a_record(runs):
    assert "s3cret" not in records.dump(records.make(cell(runs)))


def test_records_of_two_runs_or_hosts_differ_in_name_and_agree_in_what_was_measured(runs):
    first, other_run, other_host = (records.make(cell(runs, **changes)) for changes in ({}, {"run_id": "r2"}, {"host": "gpu-02"}))
    assert len({record["record_id"] for record in (first, other_run, other_host)}) == 3
    assert first["identity"] == other_run["identity"]


def test_a_failed_cell_is_a_record_with_its_reason_and_without_figures(runs):
    directory = cell(runs, status="failed", reason="the server died")
    (directory / "client.jsonl").unlink()
    record = records.make(directory)
    assert (record["status"], record["reason"], record["metrics"]) == ("failed", "the server died", None)


def test_an_interrupted_cell_is_told_as_such(runs):
    directory = cell(runs)
    (directory / "outcome.json").unlink()
    assert records.make(directory)["status"] == "interrupted"


def test_a_profile_cell_tells_its_phases_by_share_and_in_milliseconds(runs):
    directory = cell(runs, cell="eagle3-c4-r1-profile", kind="profile")
    (directory / "phases.jsonl").write_text((json.dumps(CYCLE) + "\n") * 3)
    phases = records.make(directory)["phases"]
    assert phases["cycles"] == 3 and phases["phases_ms"] == PHASES
    assert phases["phases"]["draft"]["share"] == pytest.approx(0.3)
    assert sum(part["share"] for part in phases["phases"].values()) == pytest.approx(1)


def test_pinned_acceptance_is_told(runs):
    assert records.make(cell(runs, environment={"SGLANG_SIMULATE_ACC_LEN": "2.4"}))["acceptance_simulated"]


@pytest.mark.parametrize(("value", "mode"), [(None, "grouped"), ("0", "extend"), ("check", "check")])
def test_a_record_says_how_a_patch_set_ran_and_whether_that_was_a_test(runs, value, mode):
    release = {"id": "r", "sglang_version": "0.5.23", "patch_sets": [{"name": "triton_target_verify", "sha256": "s"}]}
    environment = {"AERIE_TARGET_VERIFY": value} if value else {}
    record = records.make(cell(runs, environment=environment, release=release))
    assert record["patch_modes"] == {"triton_target_verify": mode}
    assert record["patch_sets_in_check"] == (["triton_target_verify"] if mode == "check" else [])


def test_a_record_of_a_release_without_such_patch_sets_has_no_modes(runs):
    record = records.make(cell(runs, environment={"AERIE_TARGET_VERIFY": "extend"}))
    assert (record["patch_modes"], record["patch_sets_in_check"]) == ({}, [])


def test_a_definition_of_another_schema_is_refused(runs):
    with pytest.raises(AerieError, match="aerie-cell/9"):
        records.make(cell(runs, schema="aerie-cell/9"))


# ---- collecting ----


def placed(found: collection.Collected) -> tuple[placing.Entry, ...]:
    return placing.of_cells(found.files, found.records, "gpu-01", None).entries


def collected(runs: Path, dest: Path, tmp_path: Path) -> list[placing.Entry]:
    lacking = collection.missing(placed(collection.collect(runs, None, write=True)), dest)
    if lacking:
        collection.archive(runs, [entry.path for entry in lacking], tmp_path / "a.tar.gz")
        assert collection.unpack(tmp_path / "a.tar.gz", lacking, dest, collection.cell_agrees) == ()
    return lacking


def test_all_files_reach_the_controller_unchanged_and_only_once(runs, tmp_path):
    directory, dest = cell(runs), tmp_path / "results"
    raw = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert len(collected(runs, dest, tmp_path)) == len(raw) + 1
    place = dest / "demo/r1/gpu-01/eagle3-c4-r1"
    assert {name: (place / name).read_bytes() for name in raw} == raw == {name: (directory / name).read_bytes() for name in raw}
    assert (place / "record.json").read_text() == records.dump(records.make(place))
    assert collected(runs, dest, tmp_path) == []
    assert sorted(path.name for path in dest.iterdir()) == ["demo"]


def test_collecting_again_writes_no_record_and_a_dry_run_writes_none_at_all(runs):
    directory = cell(runs)
    assert collection.collect(runs, "r1", write=False).written == ("r1/eagle3-c4-r1",)
    assert not (directory / "record.json").exists()
    assert collection.collect(runs, "r1", write=True).written == ("r1/eagle3-c4-r1",)
    assert collection.collect(runs, "r1", write=True).written == ()


def test_a_file_that_was_damaged_on_the_controller_is_brought_again(runs, tmp_path):
    cell(runs)
    dest = tmp_path / "results"
    collected(runs, dest, tmp_path)
    (dest / "demo/r1/gpu-01/eagle3-c4-r1/outcome.json").write_text("{}")
    assert [entry.path for entry in collected(runs, dest, tmp_path)] == ["r1/eagle3-c4-r1/outcome.json"]
    assert read_json(dest / "demo/r1/gpu-01/eagle3-c4-r1/outcome.json")["status"] == "completed"


def test_of_a_cell_that_arrives_damaged_nothing_is_placed_and_the_others_are_there(runs, tmp_path):
    cell(runs)
    cell(runs, cell="baseline-c4-r1", arm={"name": "baseline", "speculation": None})
    found = collection.collect(runs, None, write=True)
    collection.archive(runs, [entry["path"] for entry in found.files], tmp_path / "a.tar.gz")
    entries = [replace(entry, sha256="0" * 64) if entry.path == "r1/eagle3-c4-r1/outcome.json" else entry for entry in placed(found)]
    dest = tmp_path / "results"
    problems = collection.unpack(tmp_path / "a.tar.gz", entries, dest, collection.cell_agrees)
    assert len(problems) == 1 and "outcome.json arrived damaged" in problems[0] and "nothing of it was placed" in problems[0]
    assert [path.name for path in (dest / "demo/r1/gpu-01").iterdir()] == ["baseline-c4-r1"]
    assert sorted(path.name for path in dest.iterdir()) == ["demo"]


def test_what_is_no_cell_is_left_alone_and_nothing_leads_out_of_the_runs(runs, tmp_path):
    cell(runs)
    (runs / "r1" / "datasets").mkdir()
    (runs / "r1" / ".superseded" / "eagle3-c4-r1.1").mkdir(parents=True)
    (runs / "linked").symlink_to(runs / "r1")
    (runs / "r1" / "linked").symlink_to(runs / "r1" / "eagle3-c4-r1")
    assert len(collection.collect(runs, None, write=False).records) == 1
    assert collection.collect(tmp_path / "none", None, write=True).records == ()
    with pytest.raises(AerieError, match="leads out"):
        collection.collect(runs, "../r1", write=False)


def test_records_are_made_again_from_the_raw_files_where_they_are_missing_or_were_changed(runs, tmp_path):
    cell(runs)
    cell(runs, cell="baseline-c4-r1", arm={"name": "baseline", "speculation": None})
    collected(runs, dest := tmp_path / "results", tmp_path)
    before = {path: path.read_bytes() for path in dest.rglob(records.RECORD)}
    lost, edited = sorted(before)
    lost.unlink()
    edited.write_text(edited.read_text().replace("240.0", "999.0"))
    name = lost.relative_to(dest).as_posix()
    assert collection.remake(dest, everything=False, write=False).changed == (name,)
    assert not lost.exists()
    assert collection.remake(dest, everything=False, write=True).changed == (name,)
    assert collection.remake(dest, everything=True, write=True).changed == (edited.relative_to(dest).as_posix(),)
    assert {path: path.read_bytes() for path in dest.rglob(records.RECORD)} == before
    assert collection.remake(dest, everything=True, write=True) == collection.Remade((), ())
