"""A person sees before a run what the settings of all hosts amount to, or what is wrong with them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie import settings
from ansible.module_utils.aerie.measuring import experiment, ledger

from aerie_controller import experiment_duration, settings_overview, terminal

PROJECT_ROOT = Path(__file__).parents[2]
_action = importlib.util.spec_from_file_location("validation_report", PROJECT_ROOT / "plugins/action/validation_report.py")
assert _action is not None
assert _action.loader is not None
validation_report = importlib.util.module_from_spec(_action)
_action.loader.exec_module(validation_report)

EAGLE3 = {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}
EXPERIMENT = {
    "name": "night",
    "arms": ["baseline", "eagle3"],
    "workload": {"dataset": "random-ids", "input_len": 8, "output_len": 8, "concurrency": [1, 8]},
    "repeats": 2,
    "profile": {"arms": ["eagle3"]},
    "timeout_seconds": 300,
}
BUILD = {
    "lock": "locks/x.txt",
    "torch": "2.11.0",
    "torch_in_lock": True,
    "sglang_sha256": {"3.12": "0" * 64},
    "disk_gib": 25,
    "verified_on": ["sm90"],
}
VERSIONS = {
    "default": {"cpu": "0.5.23", "cuda": "0.5.15.post1"},
    "supervisor": {"lock": "locks/s.txt"},
    "versions": {
        "0.5.15.post1": {"kernel": "k", "builds": {"cuda": BUILD}},
        "0.5.23": {"kernel": "k", "builds": {"cpu": BUILD}},
    },
}
PROJECT = settings.Project(experiments={"nightly": EXPERIMENT}, versions=VERSIONS)
ARMS: dict[str, Any] = {"baseline": None, "eagle3": {"speculation": EAGLE3}}
PLAN = experiment.plan(experiment.validate(EXPERIMENT, ARMS), ARMS)


@pytest.fixture
def values(tmp_path) -> dict[str, Any]:
    return {
        "aerie_profile": "cuda",
        "aerie_results": str(tmp_path),
        "sglang_server_arms": ARMS,
        "sglang_server_flags": {"tp_size": 4},
        "sglang_server_instances": {
            "main": {"arm": "eagle3", "model": "target", "port": 30000},
            "second": {"arm": "baseline", "model": "target", "port": 30001, "gpus": [4, 6], "flags": {"tp-size": 2}},
        },
        "sglang_server_ready_seconds": 900,
        "sglang_release_version": None,
        "sglang_benchmark_experiment": "nightly",
        "sglang_benchmark_instance": "main",
    }


def records(cell_seconds: float = 20.0, start_seconds: int = 30) -> list[dict[str, Any]]:
    """Return the records of a run of PLAN: every cell took as long, every start as long."""
    clock, results = 0.0, []

    def stamp() -> str:
        minutes, seconds = divmod(clock, 60)
        return f"2026-01-01T00:{int(minutes):02d}:{seconds:06.3f}Z"

    for launch in PLAN.launches:
        clock += start_seconds
        for cell in launch.cells:
            started = stamp()
            clock += cell_seconds
            times = {"started": started, "finished": stamp(), "seconds": cell_seconds}
            about = {"launch": launch.launch, "concurrency": cell.concurrency, "kind": cell.kind, "times": times}
            results.append({"arm": {"name": cell.arm}, **about})
    return results


def test_instances_are_described_by_what_runs_there(values):
    rows = settings_overview.describe("gpu-01", values, PROJECT)["instances"]
    assert [list(row.values()) for row in rows] == [
        ["main", "eagle3", "EAGLE3 3/1/4", "target", "0–3", "30000", "0.5.15.post1"],
        ["second", "baseline", "none", "target", "4, 6", "30001", "0.5.15.post1"],
    ]
    assert list(rows[0]) == ["instance", "arm", "speculation", "model", "gpus", "port", "version"]


def test_a_host_of_the_cpu_profile_has_no_gpus_and_an_adopted_one_its_own_version(values):
    values |= {"aerie_profile": "cpu", "sglang_release_adopt_environment": "/opt/venv/bin/python"}
    rows = settings_overview.describe("gpu-01", values, PROJECT)["instances"]
    assert {(row["gpus"], row["version"]) for row in rows} == {("CPU", "the host's own")}


def test_an_experiment_is_described_by_its_starts_and_cells(values):
    described = settings_overview.describe("gpu-01", values, PROJECT)["experiment"]
    assert described == {
        "name": "nightly",
        "instance": "main",
        "arms": ["baseline", "eagle3"],
        "starts": 4,
        "cells": 10,
        "seconds": None,
        "limit_seconds": 4 * 900 + 10 * 300,
    }
    assert settings_overview.duration(described) == "not measured yet (limit 110 min)"


GPU_TABLES = {"cuda": yaml.safe_load((PROJECT_ROOT / "profiles/cuda/gpu_settings.yml").read_text())}
ON_TRITON = {"tp_size": 4, "attention_backend": "triton"}


@pytest.mark.parametrize(
    ("changes", "arms"),
    [
        ({"sglang_server_flags": ON_TRITON}, "arm eagle3"),
        ({"sglang_server_arms": {**ARMS, "eagle3": {"speculation": EAGLE3, "flags": {"attention-backend": "triton"}}}}, "arm eagle3"),
        # What GPU and model decide is not known here; the start says it.
        ({}, None),
        ({"sglang_server_flags": {**ON_TRITON, "prefill-attention-backend": "flashinfer"}}, None),
        ({"sglang_server_flags": ON_TRITON, "sglang_patches_sets": ["triton_target_verify"]}, None),
        ({"sglang_server_flags": ON_TRITON, "sglang_server_environment": {"AERIE_TARGET_VERIFY": "extend"}}, None),
        ({"sglang_server_flags": ON_TRITON, "sglang_server_arms": {"baseline": None, "eagle3": None}}, None),
        ({"sglang_server_flags": ON_TRITON, "sglang_release_adopt": "/sgl-workspace/sglang/python"}, None),
        ({"sglang_server_flags": ON_TRITON, "aerie_profile": "cpu"}, None),
    ],
)
def test_a_patch_set_is_recommended_as_far_as_settings_alone_say(values, changes, arms):
    project = dataclasses.replace(PROJECT, gpu_tables=GPU_TABLES)
    overview = settings_overview.describe("gpu-01", values | changes, project)
    starts = [text.partition(" is recommended: ")[0] for text in overview["recommendations"]]
    assert starts == ([f"{arms}: patch set triton_target_verify"] if arms else [])


def test_validate_shows_each_recommendation_with_its_hosts(values):
    project = dataclasses.replace(PROJECT, gpu_tables=GPU_TABLES)
    overview = settings_overview.describe("gpu-01", values | {"sglang_server_flags": ON_TRITON}, project)
    text = " ".join(terminal.render(validation_report.tables({"gpu-01": overview, "gpu-02": overview}), 100).split())
    assert text.count("arm eagle3: patch set triton_target_verify is recommended") == 1
    assert "gpu-01, gpu-02: arm eagle3" in text


def test_nothing_is_measured_without_an_experiment(values):
    assert settings_overview.describe("gpu-01", values | {"sglang_benchmark_experiment": None}, PROJECT)["experiment"] is None


def test_the_duration_is_that_of_the_last_run():
    assert experiment_duration.estimate(PLAN, records()) == 10 * 20 + 4 * 30


@pytest.mark.parametrize("lacking", [{"concurrency": 8}, {"kind": experiment.PROFILE}])
def test_there_is_no_duration_where_a_cell_was_not_measured(lacking):
    (key, value), *_ = lacking.items()
    measured = [record for record in records() if record[key] != value]
    assert experiment_duration.estimate(PLAN, measured) is None


def test_there_is_no_duration_of_a_single_start():
    assert experiment_duration.estimate(PLAN, [record for record in records() if record["launch"] == 1]) is None


def test_runs_are_read_from_the_ledger_the_newest_first(values, tmp_path):
    database = sqlite3.connect(tmp_path / "ledger.sqlite")
    database.executescript(ledger.SCHEMA)
    for run, seconds in (("20260101T000000Z", 5.0), ("20260102T000000Z", 20.0), ("20260103T000000Z", 60.0)):
        for host in ("gpu-01", "gpu-02"):
            # the newest run was cut off: it has no second launch
            rows = records(seconds)[: 2 if run == "20260103T000000Z" else None]
            for number, record in enumerate(rows):
                about = {"path": f"{run}/{host}/{number}", "experiment": "night", "run_id": run, "host": host}
                about |= {"sha256": "", "record_id": f"{run}{host}{number}", "record_schema": "", "cell": str(number)}
                about |= {"arm": "", "kind": "", "status": "completed", "release": None, "document": json.dumps(record)}
                names = ", ".join(about)
                places = ", ".join("?" * len(about))
                database.execute(f"INSERT INTO records ({names}) VALUES ({places})", tuple(about.values()))
    database.commit()
    database.close()
    described = settings_overview.describe("gpu-01", values, PROJECT)["experiment"]
    assert described["seconds"] == 10 * 20 + 4 * 30
    assert settings_overview.duration(described) == "about 5 min, as last time"
    assert settings_overview.describe("gpu-03", values, PROJECT)["experiment"]["seconds"] is None


def test_a_damaged_ledger_keeps_nobody_from_checking(values, tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"no database")
    assert settings_overview.describe("gpu-01", values, PROJECT)["experiment"]["seconds"] is None


def test_each_problem_is_told_once_with_its_hosts():
    text = settings_overview.problem_report(
        {"gpu-01": ["port", "version"], "gpu-02": ["port", "version"], "gpu-03": ["port"], "gpu-04": []}
    )
    assert text == (
        "these settings can't be used, and nothing was touched: 2 problems\n"
        "gpu-01, gpu-02 and gpu-03:\n"
        "  - port\n"
        "gpu-01 and gpu-02:\n"
        "  - version"
    )


def test_what_all_hosts_share_is_said_of_all():
    text = settings_overview.problem_report({f"gpu-{number}": ["port"] for number in range(10)})
    assert text == "these settings can't be used, and nothing was touched: 1 problem\nall 10 hosts:\n  - port"
