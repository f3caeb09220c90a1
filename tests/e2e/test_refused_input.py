"""What can't work is refused with one clear error, and nothing on the host has changed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from runs import PROJECT, processes_of, snapshot

MODELS = PROJECT / "models/tiny"


def model(path: Path | str) -> dict[str, str]:
    return {"path": str(path), "source": "host"}


def instance(**more: Any) -> dict[str, Any]:
    return {"arm": "eagle3", "model": "target", "port": 30000, **more}


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "in names and values": (
        {
            "sglang_server_armz": {},
            "aerie_root_dir": "/x",
            "sglang_release_version": "9.9.9",
            "sglang_benchmark_experiment": "smoked",
            "sglang_patches_sets": ["phase_profilr"],
            "sglang_server_instances": {
                "arm": instance(arm="eagle"),
                "model": instance(model="targets", port=30001),
                "port": instance(port="many"),
                "exposed": instance(host="0.0.0.0", port=30002),
            },
        },
        (
            "did you mean 'sglang_server_arms'",
            "aerie_root_dir",
            "9.9.9",
            "did you mean 'smoke'",
            "did you mean 'phase_profiler'",
            "did you mean 'eagle3'",
            "did you mean 'target'",
            "many",
            "sglang_server_api_key",
        ),
    ),
    "in the profile": ({"aerie_profile": "gpu"}, ("cuda, cpu",)),
    "in a flag": ({"sglang_server_flags": {"max_runing_requests": 8}}, ("max-running-requests",)),
    "about the host": (
        {
            "gpu_host_memory_required_gib": 100000,
            "gpu_host_disk_required_gib": 200000,
            "sglang_models_catalog": {"target": model("/nowhere/target"), "draft": model(MODELS / "draft-eagle3")},
        },
        ("100000 GiB needed", "200000 GiB needed", "/nowhere/target"),
    ),
}
"""Variables with mistakes that are found together, and what is said of each."""


@pytest.fixture(scope="module")
def stopped(deployed, demo):
    """A host on which nothing runs, so that whatever changes on it was changed by the refused run."""
    return demo.run("playbooks/stop.yml").require_success()


@pytest.fixture
def refused(stopped, demo):
    """Run the whole deploy, which must fail with all of ``texts`` and leave the host as it was."""

    def run(variables: dict[str, Any], *texts: str) -> str:
        before = host_state(demo.root)
        done = demo.run("deploy_eagle3.yml", **variables)
        assert done.status != 0
        assert [text for text in texts if text not in done.output] == [], done.output[-3000:]
        assert host_state(demo.root) == before
        assert processes_of(demo.root) == []
        return done.output

    return run


def host_state(root: Path) -> dict[str, str]:
    """All that a host is, but for what coordinates runs: the lease and the files of jobs."""
    return {path: what for path, what in snapshot(root).items() if not path.startswith(("lease.", "jobs/"))}


@pytest.mark.parametrize(("variables", "texts"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_all_told_at_once_before_anything_changes(refused, variables, texts):
    refused(variables, *texts)


def test_a_host_without_a_gpu_is_refused_by_the_cuda_profile(refused):
    refused({"aerie_profile": "cuda", "sglang_release_version": None}, "GPU")


def test_a_draft_that_does_not_fit_its_target_is_refused(refused, tmp_path):
    draft = shutil.copytree(MODELS / "draft-eagle3", tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    catalog = {"target": model(MODELS / "target"), "draft": model(draft)}
    refused({"sglang_models_catalog": catalog}, "arm eagle3", "the draft reads hidden states of 64, the target's have 128")


def test_a_port_in_use_is_refused_with_who_has_it(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        refused({"sglang_server_instances": {"main": instance(port=port)}}, f"port {port}", f"process {os.getpid()}")


def test_a_file_that_is_neither_the_wheels_nor_ours_is_refused_with_its_difference(deployed, refused, demo):
    worker = next((demo.root / "current").resolve().glob("lib/python*/site-packages/sglang/srt/speculative/eagle_worker_v2.py"))
    kept = worker.read_bytes()
    worker.write_bytes(kept + b"# edited by hand\n")
    try:
        refused({}, "eagle_worker_v2.py", "+# edited by hand", "accept_unknown")
    finally:
        worker.write_bytes(kept)


def test_a_live_lease_of_another_controller_is_refused(refused, demo):
    lease = demo.root / "lease.json"
    owner = {"run": "1.1", "user": "eve", "controller": "elsewhere"}
    lease.write_text(json.dumps({"owner": owner, "seconds": 900, "expires": time.time() + 900}))
    try:
        refused({}, "held by eve on elsewhere", "aerie_lease_break=true")
    finally:
        lease.unlink()


def test_a_server_that_dies_while_starting_is_reported_with_its_last_lines(stopped, demo):
    dies = instance(port=demo.port, environment={"SGLANG_EXTERNAL_MODEL_PACKAGE": "no_such_package"})
    done = demo.run("playbooks/start.yml", sglang_server_instances={"main": dies})
    assert done.status != 0
    assert "no_such_package" in done.output
    assert processes_of(demo.root) == []


def test_a_server_that_never_gets_ready_is_given_up_in_bounded_time(stopped, demo):
    started = time.monotonic()
    done = demo.run("playbooks/start.yml", sglang_server_ready_seconds=1)
    assert done.status != 0
    assert "sglang_server_ready_seconds" in done.output
    assert processes_of(demo.root) == []
    assert time.monotonic() - started < 120  # not a measurement: the test's own proof that it was given up
