"""A host that can't take the deployment is refused with everything that stands in the way, before anything is touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ansible.module_utils.aerie.host import requirements
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.aerie.host.requirements import GIB, Wanted

HOSTS = Path(__file__).parents[1] / "fixtures/hosts"
CUDA = Wanted("cuda", "/opt/aerie", ports={"main": 30000}, models={"kimi": "/srv/models/Kimi-K2.5"})
CPU = Wanted("cpu", "/home/ops/aerie", python="python3.13", ports={"main": 30000}, memory_gib=1)


def info_of(name: str, wanted: Wanted) -> dict:
    paths = (wanted.root, f"{wanted.root}/current", *wanted.models.values())
    return survey(open_host(HOSTS / name), Question(aerie_root=Path(wanted.root), ports=tuple(wanted.ports.values()), paths=paths))


def problems(name: str, wanted: Wanted, **changes: object) -> list[str]:
    return list(requirements.check(info_of(name, wanted) | changes, wanted).problems)


@pytest.mark.parametrize(("name", "wanted"), [("rtx-pro-6000", CUDA), ("container", CPU)])
def test_a_fitting_host_has_no_problem_and_no_warning(name, wanted):
    assert requirements.check(info_of(name, wanted), wanted) == requirements.Findings((), ())


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("container", CUDA, "no GPU for the cuda profile (nvidia-smi: not found)"),
        ("rtx-pro-6000", dataclasses.replace(CUDA, gpus={"main": (0, 8)}), "instance 'main' asks for GPU 8, and the host has 0, 1,"),
        ("container", dataclasses.replace(CPU, root="/opt/aerie"), "aerie_root /opt/aerie can't be made: /opt is not writable for ops"),
        ("container", dataclasses.replace(CPU, root="/etc/os-release"), "aerie_root /etc/os-release is a file"),
        ("container", dataclasses.replace(CPU, python="python3.12"), "no Python answers to 'python3.12'"),
        ("container", dataclasses.replace(CPU, python="python3.12"), "set sglang_release_python to python3, python3.11 or python3.13"),
        ("container", dataclasses.replace(CPU, python="python3"), "lacks ensurepip: install python3.11-venv"),
        ("container", dataclasses.replace(CPU, python_versions=("3.11",)), "'python3.13' is Python 3.13.1, and 3.11 is needed"),
        (
            "driver-without-module",
            dataclasses.replace(CPU, root="/opt/a", python="python3"),
            "is Python 3.9.21, and 3.11 or newer is needed",
        ),
        (
            "rtx-pro-6000",
            dataclasses.replace(CUDA, models={"draft": "/srv/models/draft"}),
            "model 'draft': /srv/models/draft is not on the host",
        ),
        ("rtx-pro-6000", dataclasses.replace(CUDA, root="/srv/aerie"), "40 GiB needed, 12.0 GiB free at /srv"),
        ("container", dataclasses.replace(CPU, disk_gib=31), "31 GiB needed, 30.0 GiB free"),
        ("container", dataclasses.replace(CPU, memory_gib=None), "4 GiB needed, 1.0 GiB available (the control group's limit is 6.0 GiB)"),
    ],
)
def test_each_lack_is_named_with_what_is_there(name, wanted, message):
    assert [problem for problem in problems(name, wanted) if message in problem], problems(name, wanted)


def test_all_lacks_are_told_at_once():
    wanted = Wanted("cuda", "/opt/aerie", models={"kimi": "/srv/models/Kimi-K2.5"})
    # GPU, root, ensurepip, model, disk, memory
    assert len(problems("container", wanted)) == 6


@pytest.mark.parametrize(
    ("owner", "message"),
    [
        ({"pid": 7, "argv": ["nginx", "-g"], "instance": None, "root": None}, "in use by process 7 (nginx -g): stop it"),
        ({"pid": 7, "argv": ["python"], "instance": "other", "root": "/opt/aerie"}, "process 7 (python, instance 'other' of /opt/aerie)"),
        ({"pid": 7, "argv": ["python"], "instance": "main", "root": "/srv/else"}, "process 7 (python, instance 'main' of /srv/else)"),
        ({"pid": None, "argv": [], "instance": None, "root": None}, "a process that this user may not see"),
    ],
)
def test_a_port_in_use_is_told_with_who_uses_it(owner, message):
    (problem,) = problems("container", CPU, ports={"30000": [owner]})
    assert problem.startswith("port 30000 of instance 'main' is in use by ")
    assert message in problem


def test_the_instance_itself_may_hold_its_port():
    assert problems("container", CPU, ports={"30000": [{"pid": 7, "argv": [], "instance": "main", "root": CPU.root}]}) == []


def test_memory_is_not_asked_where_the_instance_runs_already():
    wanted = dataclasses.replace(CPU, memory_gib=100)
    assert len(problems("container", wanted)) == 1
    assert problems("container", wanted, servers={"main": [{"pid": 7, "argv": []}]}) == []
    assert len(problems("container", wanted, servers={"other": [{"pid": 7, "argv": []}]})) == 1


@pytest.mark.parametrize(("free_gib", "count"), [(1.5, 0), (0.5, 1)])
def test_a_host_with_a_release_needs_little_room(free_gib, count):
    info = info_of("rtx-pro-6000", CUDA)
    info["paths"]["/opt/aerie"]["free_bytes"] = int(free_gib * GIB)
    info["paths"]["/opt/aerie/current"]["exists"] = True
    assert len(requirements.check(info, CUDA).problems) == count


def test_an_untried_system_is_a_warning_and_no_problem():
    findings = requirements.check(info_of("driver-without-module", CUDA), CUDA)
    (warning,) = findings.warnings
    assert warning.startswith("Rocky Linux 9.6 has not been tried")
    assert not any("Rocky" in problem for problem in findings.problems)


def test_an_adopted_python_needs_no_lock_no_ensurepip_and_little_room():
    adopted = dataclasses.replace(CPU, python="python3", python_versions=("3.12",), adopted=True, memory_gib=1)
    assert problems("container", adopted) == []
    assert problems("rtx-pro-6000", dataclasses.replace(CUDA, root="/srv/aerie", adopted=True)) == []
    gone = dataclasses.replace(adopted, python="/opt/venv/bin/python", python_setting="sglang_release_adopt_environment")
    assert problems("container", gone) == [
        "no Python answers to '/opt/venv/bin/python': correct sglang_release_adopt_environment, which is to be adopted"
    ]


def test_a_driver_that_is_slow_to_answer_is_not_called_missing():
    (problem,) = problems("rtx-pro-6000", CUDA, gpus=[], gpu_reason="nvidia-smi: no answer within 4 s")
    assert "raise gpu_host_command_seconds" in problem
    assert "install the NVIDIA driver" not in problem


def test_a_path_that_gives_no_answer_is_refused_as_what_it_is():
    dead = {"exists": None, "kind": None, "nearest": None, "total_bytes": None, "free_bytes": None, "writable": None}
    paths = {"/opt/aerie": dead | {"reason": "/opt/aerie gave no answer within 4 s"}}
    assert problems("rtx-pro-6000", CUDA, paths=paths) == ["/opt/aerie gave no answer within 4 s: is it on a network mount that is dead?"]
