"""A recording holds what a survey read and no more, tells nothing of anybody, and replays to the same; dead tools are given up."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import anonymize, recordings
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.aerie.host.recordings import RECORDING, RecordedHost

HOSTS = Path(__file__).parents[1] / "fixtures/hosts"
NAMES = sorted(path.parent.name for path in HOSTS.glob(f"*/{RECORDING}"))
QUESTION = Question(aerie_root=Path("/data/aerie"), ports=(30000,), paths=("/", "/opt/aerie/x"), models=("/data/models/Kimi-K2.5",))
ANOTHER_NAME = ("hostname", "machine_id_hash", "fingerprint", "user", "survey")


def write(directory: Path, recording: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RECORDING).write_text(json.dumps(recording))
    return directory


def without_names(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in ANOTHER_NAME} | {"gpus": [gpu | {"uuid": None} for gpu in info["gpus"]]}


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_replays_to_what_was_surveyed_also_without_its_personal_details(name, tmp_path):
    recording: dict[str, Any] = {}
    info = survey(open_host(HOSTS / name), QUESTION, recording)
    again = survey(open_host(write(tmp_path / "raw", recording)), QUESTION)
    assert {**again, "survey": None} == {**info, "survey": None}
    stripped = survey(open_host(write(tmp_path / "stripped", anonymize.anonymize(recording))), QUESTION)
    assert without_names(stripped) == without_names(info)


def test_a_live_host_replays_to_what_was_surveyed(live_host, tmp_path):
    recording: dict[str, Any] = {}
    (tmp_path / "model").mkdir()
    question = Question(aerie_root=tmp_path, paths=(str(tmp_path / "x"), "/"), models=(str(tmp_path / "model"),))
    info = survey(live_host, question, recording)
    again = survey(open_host(write(tmp_path / "recorded", json.loads(json.dumps(recording)))), question)
    assert {**again, "survey": None} == json.loads(json.dumps({**info, "survey": None}))


PERSONAL = {
    "host": "kestrel-07.lab.example",
    "short host": "kestrel-07",
    "domain": "lab.example",
    "user": "alice",
    "serial": "1653724025364",
    "device": "be0d3b95bd40a36b",
    "uuid": "b226c03d-98d5-aaff-f57c-8cd874d83c3e",
    "disk": "5d3c8a52-0b1e-4a0e-9d5e-0f4e1a2b3c4d",
    "machine": "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "mac": "3c:ec:ef:12:34:56",
    "dashed mac": "3c-ec-ef-12-34-57",
    "ipv4": "10.20.30.40",
    "ipv6": "fd12:3456:789a::17",
    "key": "sk-very-secret",
    "token": "hf_alsosecret",
    "name of somebody's file": "holiday-photos",
}
DMESG = """\
[ 0.0] Linux version 6.14 (alice@kestrel-07)
[ 1.0] eth0: 3c:ec:ef:12:34:56 link up
[ 2.0] NVRM: Xid (PCI:0000:03:00): 79, kestrel-07 lost it
"""
PROCESSES = """<processes>
<process_info><pid>7</pid><process_name>/home/alice/venv/bin/python</process_name></process_info>
</processes>"""


@pytest.fixture
def somebodys(tmp_path: Path) -> Path:
    """A host with something personal wherever a survey looks."""
    xml = json.loads((HOSTS / "rtx-pro-6000" / RECORDING).read_text())["commands"]["nvidia-smi -q -x"]["stdout"]
    xml = xml.replace("1790000000000", PERSONAL["serial"]).replace("00000000-1111-2222-3333-444444444444", PERSONAL["uuid"])
    xml = xml.replace("<minor_number>0</minor_number>", f"<pdi>0x{PERSONAL['device']}</pdi>")
    xml = xml.replace("<processes></processes>", PROCESSES, 1)
    argv = ["python", "--api-key", PERSONAL["key"], f"--hf-token={PERSONAL['token']}", "--host", PERSONAL["ipv4"]]
    return write(
        tmp_path / "somebodys",
        {
            "base": str(HOSTS / "rtx-pro-6000"),
            "files": {
                "/proc/sys/kernel/hostname": f"{PERSONAL['host']}\n",
                "/etc/machine-id": f"{PERSONAL['machine']}\n",
                "/proc/cmdline": f"root=UUID={PERSONAL['disk']} ip={PERSONAL['ipv4']} BOOTIF={PERSONAL['dashed mac']} iommu=off\n",
                "/proc/1/environ": f"TOKEN={PERSONAL['token']}\0container=lxc\0",
                "/etc/environment": f"HF_TOKEN={PERSONAL['token']}\nLD_LIBRARY_PATH=/home/alice/lib\n",
                "/etc/nccl.conf": f"NCCL_COMM_ID=[{PERSONAL['ipv6']}]:1\n",
                "/etc/modprobe.d/mine.conf": f"# {PERSONAL['user']}\noptions nvidia NVreg_X=1\n",
            },
            "directories": {"/tmp": ["torchinductor_alice", PERSONAL["name of somebody's file"]], "/home/alice/lib": ["libcudart.so.12"]},
            "stats": {"/tmp/torchinductor_alice": {"kind": "directory", "age_s": 5}},
            "environment": {"HOME": "/home/alice", "PATH": "/home/alice/bin:/usr/bin", "NCCL_SOCKET_IFNAME": "eth0"},
            "commands": {
                "id -un": {"rc": 0, "stdout": "alice\n"},
                "dmesg": {"rc": 0, "stdout": DMESG},
                "nvidia-smi -q -x": {"rc": 0, "stdout": xml},
            },
            "processes": [
                {"pid": 7, "argv": argv, "environment": {"AERIE_INSTANCE": "main", "AERIE_ROOT": "/data/aerie"}, "ports": [30000]}
            ],
        },
    )


def test_what_was_read_of_somebodys_host_is_personal_to_begin_with(somebodys):
    held = json.dumps(open_host(somebodys).recording.as_dict())  # type: ignore[attr-defined]
    assert [what for what, detail in PERSONAL.items() if detail not in held] == []


def test_nothing_personal_remains_in_a_recording(somebodys, tmp_path):
    recording: dict[str, Any] = {}
    survey(open_host(somebodys), QUESTION, recording)
    stripped = json.dumps(anonymize.anonymize(recording))
    assert [what for what, detail in PERSONAL.items() if detail.lower() in stripped.lower()] == []


def test_what_is_not_personal_remains_and_one_detail_has_one_other_name(somebodys, tmp_path):
    recording: dict[str, Any] = {}
    survey(open_host(somebodys), QUESTION, recording)
    info = survey(open_host(write(tmp_path / "stripped", anonymize.anonymize(recording))), QUESTION)
    assert info["hostname"] == "host1"
    assert info["user"]["name"] == "user1"
    assert [library["path"] for library in info["libraries"]["cuda"] if library["major"] == 12] == ["/home/user1/lib/libcudart.so.12"]
    assert info["gpus"][0]["processes"][0]["name"] == "/home/user1/venv/bin/python"
    assert info["kernel_parameters"]["ip"][0] == info["servers"]["main"][0]["argv"][-1]
    assert info["kernel_parameters"]["iommu"] == ["off"]
    assert (info["container"]["kind"], [xid["xid"] for xid in info["driver"]["xids"]]) == ("lxc", [79])
    assert len({gpu["uuid"] for gpu in info["gpus"]}) == 8
    assert "/tmp/torchinductor_user1" in [cache["path"] for cache in info["caches"]]


@pytest.mark.parametrize("version", ["13.1.0.3-1", "98.02.55.00.01", "580.105.08", "2.28.3-1+cuda13.0", "nvidia_x-13.1.0.3.dist-info"])
def test_a_version_is_no_address(version):
    assert anonymize.Pseudonyms().text(f"libcublas {version} here") == f"libcublas {version} here"


@pytest.mark.parametrize("place", ["00000000:03:00.0", "0000:41:00.0", "21:11:06", "PCI:0000:41:00"])
def test_a_place_on_the_bus_is_no_address(place):
    assert anonymize.Pseudonyms().text(f"at ({place}) now") == f"at ({place}) now"


@pytest.mark.parametrize("name", ["vm", "gpu.local", "nvidia", "Server", "10.0.0.4", "be:ef::13"])
def test_a_host_named_after_something_general_or_by_its_address_spoils_nothing(tmp_path, name):
    host = write(tmp_path / "general", {"base": str(HOSTS / "rtx-pro-6000"), "files": {"/proc/sys/kernel/hostname": f"{name}\n"}})
    recording: dict[str, Any] = {}
    info = survey(open_host(host), QUESTION, recording)
    again = survey(open_host(write(tmp_path / "stripped", anonymize.anonymize(recording, besides=(name,)))), QUESTION)
    assert without_names(again) == without_names(info)
    assert again["hostname"] == "host1"


@pytest.mark.parametrize(
    ("recording", "message"),
    [
        ({"base": str(HOSTS / "h200"), "files": {"/proc/cmdline": {"replace": {"nosuch": "x"}}}}, "the base does not have 'nosuch'"),
        ({"base": str(HOSTS / "h200"), "files": {"/etc/nosuch": {"replace": {"a": "b"}}}}, "the base has no text to change"),
        ({"base": str(HOSTS / "h200"), "commands": {"nvidia-smi -q -x": {"xml": {"gpu[9]": None}}}}, "no element 'gpu[9]'"),
        ({"base": "nowhere"}, "must be a host's recording"),
        ({"base": "here"}, "it is based on itself"),
        ({"format": 2}, "no recording of format 1"),
        ([], "no recording of format 1"),
    ],
)
def test_a_recording_that_can_not_be_worked_out_is_refused(tmp_path, recording, message):
    with pytest.raises(AerieError, match=message.replace("[", r"\[")):
        open_host(write(tmp_path / "here", recording))


def test_a_recording_worked_out_needs_no_base(tmp_path):
    whole = recordings.load(HOSTS / "bar1-256-mib").as_dict()
    info = survey(open_host(write(tmp_path, whole)), Question())
    assert {gpu["bar1_total_mib"] for gpu in info["gpus"]} == {256}


def tools(directory: Path, programs: dict[str, str]) -> Path:
    for name, program in programs.items():
        path = directory / name
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return directory


HANGS = "trap '' TERM; sleep 600 & sleep 600; wait"
XML = (
    "<nvidia_smi_log><driver_version>1.2</driver_version><gpu id='00000000:03:00.0'><product_name>GPU</product_name></gpu></nvidia_smi_log>"
)


def test_tools_that_hang_are_given_up_and_the_rest_is_told(live_host, tmp_path, monkeypatch):
    dead = tools(tmp_path, dict.fromkeys(("nvidia-smi", "lspci", "dmesg", "journalctl", "ldconfig", "dpkg-query", "nvcc"), HANGS))
    monkeypatch.setenv("PATH", f"{dead}:{os.environ['PATH']}")
    info = survey(live_host, Question(command_seconds=0.5))
    assert info["gpu_reason"] == "nvidia-smi: no answer within 0.5 s"
    assert "no answer within 0.5 s" in info["topology"]["reason"]
    assert info["tools"]["nvcc"] == {"path": f"{dead}/nvcc", "version": None}
    assert info["survey"]["commands"]["lspci -Dvvvnn"]["reason"] == "lspci: no answer within 0.5 s"
    recorded = survey(open_host(live_host.root), Question())
    assert recorded["kernel"] and recorded["memory"]["total_bytes"]
    assert {key: info[key] for key in ("kernel", "memory", "cpu", "container")} == {
        key: recorded[key] for key in ("kernel", "memory", "cpu", "container")
    }


def test_what_one_tool_tells_is_kept_when_another_hangs(live_host, tmp_path, monkeypatch):
    answering = tools(tmp_path, {"nvidia-smi": f'case "$*" in "-q -x") echo "{XML}";; *) sleep 600;; esac'})
    monkeypatch.setenv("PATH", f"{answering}:{os.environ['PATH']}")
    info = survey(live_host, Question(command_seconds=0.5))
    assert [(gpu["name"], gpu["pci_bus_id"]) for gpu in info["gpus"]] == [("GPU", "00000000:03:00.0")]
    assert info["driver"]["version"] == "1.2"
    assert "no answer" in info["survey"]["commands"]["nvidia-smi topo -m"]["reason"]


def test_commands_run_at_once(live_host, tmp_path, monkeypatch):
    """Each tool answers only after the others have begun: one after another, none would."""
    names = ("lspci", "dmesg", "ldconfig", "dpkg-query")
    all_began = " ".join(f"{tmp_path}/{name}.began" for name in names)
    waits = f'touch "{tmp_path}/$(basename $0).began"; while ! ls {all_began} >/dev/null 2>&1; do sleep 0.02; done'
    monkeypatch.setenv("PATH", f"{tools(tmp_path, dict.fromkeys(names, waits))}:{os.environ['PATH']}")
    commands = survey(live_host, Question(command_seconds=30))["survey"]["commands"]
    assert {argv.split()[0]: answer["rc"] for argv, answer in commands.items() if argv.split()[0] in names} == dict.fromkeys(names, 0)


class DeadMount(RecordedHost):
    """A host one of whose file systems never answers."""

    def disk(self, path: str) -> dict[str, Any]:
        threading.Event().wait()
        raise AssertionError(path)

    def model(self, path: str, root: str | None = None, *, weights: bool = True) -> dict[str, Any]:  # noqa: ARG002
        return self.disk(path)


def test_a_mount_that_is_dead_is_told_and_the_rest_too():
    question = Question(paths=("/mnt/x",), models=("/mnt/m",), command_seconds=0.1)
    info = survey(DeadMount(recordings.load(HOSTS / "rtx-pro-6000")), question)
    assert info["paths"]["/mnt/x"]["reason"] == "/mnt/x gave no answer within 0.1 s"
    assert info["models"]["/mnt/m"]["problems"] == ["/mnt/m gave no answer within 0.1 s"]
    assert len(info["gpus"]) == 8
