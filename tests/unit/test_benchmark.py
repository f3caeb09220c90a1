"""A launch is measured on the instance that serves it, with the data set that the controller checked, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_bytes, write_json
from ansible.module_utils.aerie.measuring import benchmark, experiment, records
from ansible.module_utils.aerie.paths import HostPaths

ARM = {"speculation": {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3}, "environment": {"MY_TOKEN": "s3cret"}}
DATASET = b"[]"
WORKLOAD = {"dataset": "sharegpt", "path": "p.json", "output_len": 48, "concurrency": [1, 4]}
INFO = {
    "fingerprint": "f" * 64,
    "kernel": "6.14",
    "cpu": {"model": "EPYC", "sockets": 2, "cores": 128, "logical": 256, "available": 3},
    "memory": {"available_bytes": 7},
    "gpus": [{"index": 0, "name": "RTX PRO 6000", "driver": "580.1", "temperature_c": 61}],
}


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    made = HostPaths(tmp_path / "aerie")
    client = made.release("0.5.23-abc") / "lib/python3.11/site-packages/sglang/benchmark/serving.py"
    client.parent.mkdir(parents=True)
    client.touch()
    write_json(made.release("0.5.23-abc") / "release.json", {"id": "0.5.23-abc", "sglang_version": "0.5.23"})
    made.current.symlink_to(made.release("0.5.23-abc"))
    serve(made)
    return made


def serve(paths: HostPaths, **changes: Any) -> None:
    instance = {
        "state": "ready",
        "arm": {"name": "eagle3"},
        "argv": ["python", "-m", "sglang.launch_server"],
        "environment": {"OMP_NUM_THREADS": "1"},
        "release": "0.5.23-abc",
        "host": "0.0.0.0",
        "port": 30000,
    }
    write_json(paths.instance("main") / "instance.json", instance | changes)


def request(tmp_path: Path, **changes: Any) -> benchmark.Request:
    target = str(tmp_path / "models/target")
    staged = tmp_path / "staged"
    staged.write_bytes(DATASET)
    wanted = experiment.validate({"name": "demo", "arms": ["eagle3"], "workload": WORKLOAD}, ["eagle3"])
    plan = experiment.plan(wanted, {"eagle3": ARM}).as_dict()
    given = {
        "run_id": "r1",
        "host": "gpu-01",
        "instance": "main",
        "experiment": plan["experiment"],
        "plan": plan["identity"],
        "launch": plan["launches"][0],
        "arm": ARM,
        "models": {"target": {"identity": "t", "path": target}, "draft": {"identity": "d"}},
        "target": "target",
        "settings": {"flags": {"mem_fraction_static": 0.8}},
        "host_info": INFO,
        "dataset": {"path": "p.json", "sha256": sha256_bytes(DATASET)},
        "staged_dataset": str(staged),
        "api_key": None,
    }
    return benchmark.Request.of(given | changes)


def test_a_cells_definition_holds_all_that_defines_it_and_no_secret(paths, tmp_path):
    job = benchmark.prepare(paths, request(tmp_path))
    definition = job.definitions[1]
    assert [item["cell"] for item in job.definitions] == ["eagle3-c1-r1", "eagle3-c4-r1"]
    assert definition["models"] == {"target": {"name": "target", "identity": "t"}, "draft": {"name": "draft", "identity": "d"}}
    assert definition["workload"]["dataset_sha256"] == sha256_bytes(DATASET) and "concurrency" not in definition["workload"]
    assert definition["arm"]["environment"] == {"MY_TOKEN": "<redacted>"}
    assert (job.server.host, job.server.port, job.timeout_seconds) == ("127.0.0.1", 30000, experiment.DEFAULT_TIMEOUT)


def test_the_fingerprint_holds_nothing_that_moves_by_itself(paths, tmp_path):
    first = benchmark.prepare(paths, request(tmp_path)).definitions[0]
    later = INFO | {"memory": {"available_bytes": 1}, "gpus": [INFO["gpus"][0] | {"temperature_c": 30}]}  # type: ignore[index]
    second = benchmark.prepare(paths, request(tmp_path, host_info=later)).definitions[0]
    assert first["host_fingerprint"]["gpus"][0]["driver"] == "580.1"
    assert first["host_fingerprint"] == second["host_fingerprint"] and first["identity"] == second["identity"]
    other = benchmark.prepare(paths, request(tmp_path, host_info=INFO | {"fingerprint": "0" * 64})).definitions[0]
    assert other["identity"] != first["identity"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": {"name": "baseline"}}, "serves arm baseline, not eagle3"),
        ({"state": "failed"}, "is failed, not ready"),
        ({"release": "0.5.9-gone"}, "release that is served is gone"),
    ],
)
def test_an_instance_that_does_not_serve_the_launch_is_not_measured(paths, tmp_path, changes, message):
    serve(paths, **changes)
    with pytest.raises(AerieError, match=message):
        benchmark.prepare(paths, request(tmp_path))


def test_an_instance_that_does_not_exist_is_refused(paths, tmp_path):
    with pytest.raises(AerieError, match="instance other does not exist"):
        benchmark.prepare(paths, request(tmp_path, instance="other"))


def test_what_is_left_to_measure_is_known_before_the_server_is_started(paths, tmp_path):
    for definition in benchmark.prepare(paths, request(tmp_path)).definitions[:1]:
        write_json(paths.runs / "r1" / definition["cell"] / "definition.json", definition)
        write_json(paths.runs / "r1" / definition["cell"] / "outcome.json", {"status": "completed"})
    serve(paths, state="stopped", arm={"name": "baseline"}, argv=["other"])
    assert benchmark.pending(paths, request(tmp_path)) == ["eagle3-c4-r1"]
    assert benchmark.pending(paths, request(tmp_path, settings={"flags": {}})) == ["eagle3-c1-r1", "eagle3-c4-r1"]
    assert benchmark.pending(paths, request(tmp_path, run_id="r2")) == ["eagle3-c1-r1", "eagle3-c4-r1"]
    paths.current.unlink()
    assert benchmark.pending(paths, request(tmp_path)) == ["eagle3-c1-r1", "eagle3-c4-r1"]


def test_a_server_that_did_not_start_is_the_outcome_of_its_cells_and_not_of_those_measured_before(paths, tmp_path):
    done, left = benchmark.prepare(paths, request(tmp_path)).definitions
    write_json(paths.runs / "r1" / done["cell"] / "definition.json", done)
    write_json(paths.runs / "r1" / done["cell"] / "outcome.json", {"status": "completed"})
    serve(paths, state="failed")
    cells = benchmark.record_not_started(paths, request(tmp_path), "out of memory")
    assert [(cell["id"], cell["status"], cell["earlier"]) for cell in cells] == [
        (done["cell"], "completed", True),
        (left["cell"], "failed", False),
    ]
    record = records.make(paths.runs / "r1" / left["cell"])
    assert (record["status"], record["reason"], record["metrics"]) == ("failed", "the server did not start: out of memory", None)
    assert benchmark.pending(paths, request(tmp_path)) == [left["cell"]], "it is tried again when the run is gone on with"


def test_a_run_id_that_leads_out_of_the_runs_is_refused(tmp_path):
    with pytest.raises(AerieError, match="names a directory"):
        request(tmp_path, run_id="../r1")


def test_the_data_set_is_the_one_that_was_checked_and_stays_for_the_next_launch(paths, tmp_path):
    asked = request(tmp_path)
    benchmark.place_dataset(paths, asked)
    there = benchmark.dataset_path(paths, asked)
    assert there and there.read_bytes() == DATASET
    benchmark.place_dataset(paths, request(tmp_path, staged_dataset=None))
    there.write_bytes(b"[1]")
    with pytest.raises(AerieError, match="not what the controller checked"):
        benchmark.place_dataset(paths, asked)
    benchmark.place_dataset(paths, asked)
    assert there.read_bytes() == DATASET


def test_a_data_set_that_was_never_sent_is_missed(paths, tmp_path):
    with pytest.raises(AerieError, match="none was sent"):
        benchmark.place_dataset(paths, request(tmp_path, staged_dataset=None))
