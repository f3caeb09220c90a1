"""The survey tells what a host is, from live and recorded hosts, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import anonymize, gpus, host_info, occupancy, system
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.aerie.host.hosts import LiveHost
from ansible.module_utils.aerie.releases import model_identity

from ports import free_port

HOSTS = Path(__file__).parents[1] / "fixtures/hosts"
MODEL = Path(__file__).parents[2] / "models/tiny/target"


def recorded(name: str, question: Question | None = None) -> dict:
    return survey(open_host(HOSTS / name), question or Question())


def test_gpus_are_reported_with_what_tells_them_apart():
    info = recorded("rtx-pro-6000")
    assert [gpu["index"] for gpu in info["gpus"]] == list(range(8))
    expected = {
        "index": 1,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": "GPU-00000001-1111-2222-3333-444444444444",
        "driver": "580.105.08",
        "memory_total_mib": 97887,
        "memory_used_mib": 5,
        "compute_capability": "12.0",
        "pci_bus_id": "00000000:04:00.0",
    }
    assert {key: info["gpus"][1][key] for key in expected} == expected
    assert (info["gpu_reason"], info["cuda_driver_version"]) == (None, "13.0")


@pytest.mark.parametrize(
    ("name", "reason"), [("container", "nvidia-smi: not found"), ("driver-without-module", "couldn't communicate with the NVIDIA driver")]
)
def test_a_host_without_gpus_says_why(name, reason):
    info = recorded(name)
    assert info["gpus"] == []
    assert info["cuda_driver_version"] is None
    assert reason in info["gpu_reason"]


def test_values_that_the_driver_does_not_know_are_null(tmp_path):
    shutil.copytree(HOSTS / "rtx-pro-6000", tmp_path, dirs_exist_ok=True)
    path = tmp_path / host_info.RECORDING
    recording = json.loads(path.read_text())
    recording["commands"][" ".join(gpus.GPU_QUERY)]["stdout"] = (
        "0, NVIDIA X, GPU-1, 580.105.08, [N/A], [Not Supported], 12.0, 00000000:03:00.0\n"
    )
    path.write_text(json.dumps(recording))
    gpu = survey(open_host(tmp_path), Question())["gpus"][0]
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "cpu"),
    [
        ("rtx-pro-6000", {"model": "AMD EPYC 9575F 64-Core Processor", "sockets": 2, "cores": 4, "logical": 8, "available": 6}),
        ("container", {"model": "Intel(R) Xeon(R) Gold 6430", "sockets": 1, "cores": 2, "logical": 2, "available": 1}),
    ],
)
def test_cpus_are_counted_by_socket_core_and_thread_and_the_allowed_ones_told_apart(name, cpu):
    found = recorded(name)["cpu"]
    assert {key: found[key] for key in cpu} == cpu


@pytest.mark.parametrize(
    ("name", "available", "limit"),
    [
        ("rtx-pro-6000", 1550000000 * 1024, None),
        ("container", 2**30, 6 * 2**30),  # 6 GiB allowed, 5 in use, though the machine has 57 GiB free
        ("driver-without-module", 40 * 2**30, 48 * 2**30),  # cgroup v1, the limit is the parent's, 8 GiB in use
    ],
)
def test_available_memory_heeds_the_control_group(name, available, limit):
    memory = recorded(name)["memory"]
    assert (memory["available_bytes"], memory["cgroup_limit_bytes"]) == (available, limit)


@pytest.mark.parametrize(
    ("name", "systemd", "pid1", "container"),
    [("rtx-pro-6000", True, "systemd", None), ("container", False, "sh", "docker"), ("driver-without-module", True, "systemd", None)],
)
def test_service_manager_and_container_are_told_from_evidence(name, systemd, pid1, container):
    info = recorded(name)
    assert info["service_manager"] == {"systemd": systemd, "pid1": pid1}
    assert info["container"]["kind"] == container


@pytest.mark.parametrize(
    ("file", "text", "kind"),
    [
        ("run/.containerenv", "", "podman"),
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        ("proc/1/environ", "PATH=/bin\0container=lxc\0", "lxc"),
        ("proc/1/cgroup", "0::/kubepods/pod1\n", "kubepods"),
    ],
)
def test_each_kind_of_container_is_known(tmp_path, file, text, kind):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (tmp_path / host_info.RECORDING).write_text("{}")
    found = system.read_container(open_host(tmp_path))
    assert found == {"kind": kind, "evidence": f"/{file}"}


def test_pythons_that_answer_are_told_with_their_modules_and_others_left_out():
    assert recorded("container")["pythons"] == {
        "python3": {"version": "3.11.2", "executable": "/usr/bin/python3", "venv": True, "ensurepip": False},
        "python3.11": {"version": "3.11.2", "executable": "/usr/bin/python3.11", "venv": True, "ensurepip": False},
        "python3.13": {"version": "3.13.1", "executable": "/usr/local/bin/python3.13", "venv": True, "ensurepip": True},
    }


def test_a_path_that_is_missing_is_told_by_its_nearest_parent_and_its_file_system():
    paths = recorded("rtx-pro-6000", Question(paths=("/opt/aerie/x", "/srv/models/Kimi-K2.5", "/srv/models/Kimi-K2.5/config.json")))[
        "paths"
    ]
    assert paths["/opt/aerie/x"] == {
        "exists": False,
        "kind": None,
        "nearest": "/opt",
        "total_bytes": 900 * 2**30,
        "free_bytes": 700 * 2**30,
        "writable": True,
    }
    assert (paths["/srv/models/Kimi-K2.5"]["kind"], paths["/srv/models/Kimi-K2.5"]["free_bytes"]) == ("directory", 12 * 2**30)
    assert paths["/srv/models/Kimi-K2.5/config.json"]["kind"] == "file"


IDENTITY = "3f0c5e2b9d77ab01c4de551f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b"


@pytest.fixture
def survey_models(live_host: LiveHost) -> Callable[[Path, dict], dict]:
    return lambda root, catalog: survey(live_host, Question(aerie_root=root, catalog=catalog, pythons=()))


def test_a_models_identity_is_the_one_that_is_known_and_no_weights_are_hashed_for_it(survey_models, live_host, tmp_path, monkeypatch):
    model = tmp_path / "aerie/models/target"
    shutil.copytree(MODEL, model)
    catalog = {"target": {"source": "controller", "path": "/elsewhere/target"}}
    with monkeypatch.context() as patched:
        patched.setattr(model_identity, "sha256_file", lambda path: pytest.fail(f"{path} was hashed"))
        assert survey_models(tmp_path / "aerie", catalog)["models"][str(model)]["identity"] is None
    kept = model_identity.read(live_host.root / str(model).lstrip("/"))
    model_identity.remember(kept, tmp_path / "aerie/models/identities")
    with monkeypatch.context() as patched:
        patched.setattr(model_identity, "sha256_file", lambda path: pytest.fail(f"{path} was hashed"))
        found = survey_models(tmp_path / "aerie", catalog)
        assert found["models"][str(model)] == {"problems": [], "bytes": kept.as_dict()["bytes"], "identity": kept.identity}
        os.utime(model / "config.json", (1, 1))
        assert survey_models(tmp_path / "aerie", catalog)["models"][str(model)]["identity"] is None


def test_models_are_looked_for_where_each_source_puts_them_and_those_to_be_brought_are_not_missed(survey_models, tmp_path):
    (tmp_path / "dummy").mkdir()
    (tmp_path / "dummy/config.json").write_text("{}")
    (tmp_path / "aerie/models/half").mkdir(parents=True)
    catalog = {
        "gone": {"source": "host", "path": str(tmp_path / "gone")},
        "dummy": {"source": "host", "path": str(tmp_path / "dummy"), "weights": False},
        "half": {"source": "rsync", "from": "gpu-01:/m/half"},
        "later": {"source": "hub", "repository": "lab/tiny", "revision": "0" * 40},
    }
    info = survey_models(tmp_path / "aerie", catalog)
    problems = {Path(path).name: bool(model["problems"]) for path, model in info["models"].items()}
    assert problems == {"gone": True, "dummy": False, "half": True}
    there = {Path(path).name: about["exists"] for path, about in info["paths"].items()}
    assert there == {"gone": False, "dummy": True, "half": True}


def test_a_recorded_host_tells_the_identity_that_was_recorded_else_none(tmp_path):
    path = "/data/models/Kimi-K2.5"
    asked = Question(aerie_root=Path("/data/aerie"), models=(path,))
    assert recorded("rtx-pro-6000", asked)["models"][path]["identity"] is None
    recording = {"base": str(HOSTS / "rtx-pro-6000"), "models": {path: {"problems": [], "bytes": 1, "identity": IDENTITY}}}
    (tmp_path / host_info.RECORDING).write_text(json.dumps(recording))
    kept: dict = {}
    assert survey(open_host(tmp_path), asked, kept)["models"][path]["identity"] == IDENTITY
    assert anonymize.anonymize(kept)["models"][path]["identity"] == IDENTITY


def test_a_relative_path_is_refused():
    with pytest.raises(AerieError, match="models is not absolute"):
        recorded("container", Question(paths=("models",)))


def test_the_fingerprint_is_the_same_from_run_to_run_and_differs_with_the_driver(tmp_path):
    first = recorded("rtx-pro-6000")["fingerprint"]
    shutil.copytree(HOSTS / "rtx-pro-6000", tmp_path, dirs_exist_ok=True)
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text(meminfo.read_text().replace("1550000000", "900000000"))
    assert survey(open_host(tmp_path), Question())["fingerprint"] == first
    recording = tmp_path / host_info.RECORDING
    recording.write_text(recording.read_text().replace("580.105.08", "595.58.03"))
    assert survey(open_host(tmp_path), Question())["fingerprint"] != first


@pytest.mark.parametrize(
    ("name", "fingerprint"),
    [
        ("rtx-pro-6000", "3d3bbd38e2b86a6a29f2bae01738d1bd3bd0e9f4ed2f540f4a49c81ba5d52b99"),
        ("container", "2a82190c89c3cf038d951377b8082233c64e4b94c73cbdcc0e84f5a47f1f61d3"),
        ("driver-without-module", "8e0ae32b0312fa80a790d5c7e70c0178d27710b4e17e8655fac3322fe7d5552c"),
    ],
)
def test_a_host_keeps_the_fingerprint_that_its_old_figures_carry(name, fingerprint):
    assert recorded(name)["fingerprint"] == fingerprint


def test_the_fingerprint_comes_from_either_answer_of_the_driver(tmp_path):
    """What the CSV query and the document both tell is told alike."""
    recording = {"base": str(HOSTS / "h200"), "commands": {" ".join(gpus.GPU_QUERY): None}}
    (tmp_path / host_info.RECORDING).write_text(json.dumps(recording))
    by_document, by_query = survey(open_host(tmp_path), Question())["gpus"][0], recorded("h200")["gpus"][0]
    assert by_query["compute_capability"] == "9.0"
    assert by_document == by_query | {"compute_capability": None}


def test_the_machine_id_itself_is_not_shown():
    info = recorded("rtx-pro-6000")
    assert info["machine_id_hash"]
    assert "0123456789abcdef0123456789abcdef" not in str(info)


def test_the_current_release_is_named(tmp_path):
    shutil.copytree(HOSTS / "container", tmp_path, dirs_exist_ok=True)
    (tmp_path / "home/ops/aerie/releases/0.5.23-abc").mkdir(parents=True)
    (tmp_path / "home/ops/aerie/current").symlink_to("releases/0.5.23-abc")
    assert survey(open_host(tmp_path), Question(aerie_root=Path("/home/ops/aerie")))["release"] == "0.5.23-abc"
    assert survey(open_host(tmp_path), Question(aerie_root=Path("/home/ops/other")))["release"] is None


def test_a_directory_that_is_no_recording_is_refused(tmp_path):
    with pytest.raises(AerieError, match="must be a host's recording"):
        open_host(tmp_path)


@pytest.fixture
def server():
    """A live process that listens on a port of its own and carries an instance's name."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {host_info.INSTANCE_VARIABLE: "survey-test", host_info.ROOT_VARIABLE: "/srv/here"},
    )
    yield process.pid, int(process.stdout.readline())
    process.kill()
    process.wait()


def test_a_live_listener_is_named_with_its_instance(server, live_host):
    pid, port = server
    info = survey(live_host, Question(ports=(port,)))
    assert [(owner["pid"], owner["instance"]) for owner in info["ports"][str(port)]] == [(pid, "survey-test")]
    assert info["ports"][str(port)][0]["argv"][:2] == [sys.executable, "-c"]
    assert info["ports"][str(port)][0]["root"] == "/srv/here"
    assert [process["pid"] for process in info["servers"]["survey-test"]] == [pid]


def test_a_server_of_another_root_is_not_one_of_ours(server, live_host):
    pid, _ = server
    ours, others = (survey(live_host, Question(aerie_root=Path(root)))["servers"] for root in ("/srv/here", "/srv/else"))
    assert [process["pid"] for process in ours["survey-test"]] == [pid]
    assert "survey-test" not in others


def test_a_free_port_has_no_listener(live_host):
    port = free_port()
    assert survey(live_host, Question(ports=(port,)))["ports"] == {str(port): []}


def test_a_command_that_hangs_is_given_up():
    answer = LiveHost(seconds=0.2).run(("sleep", "30"))
    assert (answer.rc, answer.reason) == (None, "sleep: no answer within 0.2 s")


@pytest.mark.parametrize(("ranges", "count"), [("0", 1), ("0-3", 4), ("0-1,4,6-7", 5)])
def test_cpu_lists_are_counted(ranges, count):
    assert system.count_cpus(ranges) == count


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_path_that_the_user_may_not_see_is_told_by_what_it_may_see():
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        hidden = Path(name) / "hidden/aerie"
        hidden.mkdir(parents=True)
        hidden.parent.chmod(0o700)
        child = os.fork()
        if child == 0:
            os.setuid(nobody)
            found = occupancy.read_path(LiveHost(), str(hidden))
            os._exit(0 if (found["exists"], found["nearest"], found["writable"]) == (False, str(hidden.parent), False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
