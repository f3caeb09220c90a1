"""A server is started, watched and stopped for real: supervisor's own program, real processes, real sockets."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible.module_utils.aerie import jobs, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.serving import server, server_plan, server_processes
from sglang_example import ARGUMENTS, BASELINE, DRAFT, EAGLE3, make_host, make_models, make_release, make_request, supervisord

from ports import free_port

STATUS_TASKS = Path(__file__).parents[2] / "roles/sglang_server/tasks/status.yml"
_action = importlib.util.spec_from_file_location("sglang_server_action", Path(__file__).parents[2] / "plugins/action/sglang_server.py")
assert _action is not None
assert _action.loader is not None
sglang_server_action = importlib.util.module_from_spec(_action)
_action.loader.exec_module(sglang_server_action)


class Bench:
    """One root with a release, whose servers are stopped when the test ends."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.host = make_host(root)
        self.messages: list[str] = []

    def plan(self, arm: dict[str, Any] = EAGLE3, behaviour: str = "", **changes: Any) -> server_plan.Plan:
        instance = {"port": self.port, "environment": {"FAKE_BEHAVIOUR": behaviour}, **changes.pop("instance", {})}
        return server_plan.plan(self.host, make_request(self.root, arm, instance=instance, **changes))

    def start(self, arm: dict[str, Any] = EAGLE3, behaviour: str = "", seconds: float = 30, **changes: Any) -> dict[str, Any]:
        return server.start(self.plan(arm, behaviour, **changes), seconds, self.messages.append)

    def stop(self) -> dict[str, Any]:
        return server.stop(self.host, "main")

    @property
    def status(self) -> dict[str, Any]:
        return server.status(self.host, "main")

    @property
    def supervisor_pid(self) -> int:
        return int((self.root / "supervisor/supervisord.pid").read_text())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    make_release(tmp_path)
    monkeypatch.setattr(server, "LEFTOVER_SECONDS", 0.5)
    made = Bench(tmp_path)
    yield made
    made.stop()


def of_root(root: Path) -> list[int]:
    """Return every process that runs from ``root``, supervisord included."""
    return [process.pid for process in processes.scan() if any(str(root) in word for word in process.argv)]


def test_a_start_is_ready_when_a_generation_succeeded_and_a_stop_leaves_nothing(bench):
    result = bench.start()
    assert result["changed"]
    assert result["accept_length"] == 2.5
    assert bench.status["ready"]
    assert bench.status["arm"] == "eagle3"
    assert bench.status["pid"] == result["pid"]
    assert processes.listeners(bench.port)[0].pid == result["pid"]
    stopped = bench.stop()
    assert stopped["changed"]
    assert of_root(bench.root) == []
    assert not processes.is_listening(bench.port)
    assert (bench.status["state"], bench.status["running"]) == ("stopped", False)
    assert not bench.stop()["changed"]


def test_a_gpu_of_an_instance_that_runs_is_refused_to_another(bench):
    bench.start(instance={"gpus": [0]})
    instance = {"port": free_port(), "gpus": [0]}
    with pytest.raises(AerieError, match="instance other: GPU 0 is used by instance main, which runs on this host"):
        server_plan.plan(bench.host, make_request(bench.root, name="other", instance=instance))
    server_plan.plan(bench.host, make_request(bench.root, name="other", instance=instance | {"gpus": [1]}))
    without_gpus = {"name": "cpu", "environment": {"CUDA_VISIBLE_DEVICES": ""}}
    server_plan.plan(bench.host, make_request(bench.root, name="other", instance={"port": instance["port"]}, profile=without_gpus))
    bench.stop()
    server_plan.plan(bench.host, make_request(bench.root, name="other", instance=instance))


def test_a_server_that_runs_as_asked_is_left_alone_and_another_arm_replaces_it(bench):
    first = bench.start()
    assert server.is_running_as_planned(bench.plan())
    assert server.file_changes(bench.plan()) == []
    other = bench.plan(BASELINE)
    assert not server.is_running_as_planned(other)
    assert {path.name for path, _, _ in server.file_changes(other)} == {"launch"}
    second = server.start(other, 30)
    assert second["restarted"]
    assert second["accept_length"] is None
    assert not processes.alive(first["pid"])
    assert bench.status["arm"] == "baseline"


def test_a_model_that_changed_in_place_is_another_definition(bench):
    models = make_models(bench.root)
    changed = models | {"target": models["target"] | {"identity": "another"}}
    assert bench.plan(models=models).definition != bench.plan(models=changed).definition


def test_a_server_that_dies_while_it_starts_is_noticed_at_once_with_its_last_words(bench):
    started = time.monotonic()
    with pytest.raises(AerieError, match="the server died while it started") as raised:
        bench.start(behaviour="dies", seconds=300)
    assert time.monotonic() - started < 30
    assert "RuntimeError: not enough memory for the KV cache" in str(raised.value)
    assert of_root(bench.root) == []
    assert bench.status["state"] == "failed"
    assert "died" in bench.status["reason"]


def test_a_server_that_never_gets_ready_is_given_up_in_time_and_stopped(bench):
    with pytest.raises(AerieError, match=r"not ready after 2 s: /health answered 503"):
        bench.start(behaviour="never-ready", seconds=2)
    assert of_root(bench.root) == []


def test_a_stop_ends_children_that_left_the_session_and_hid_their_environment(bench):
    bench.start(behaviour="leaves-children")
    pids = bench.status["pids"]
    assert len(pids) == 3
    assert len(bench.stop()["killed"]) == 2
    assert not any(processes.alive(pid) for pid in pids)


def test_orphans_of_a_killed_server_and_supervisor_are_found_and_ended(bench):
    pid = bench.start(behaviour="leaves-children")["pid"]
    pids = set(bench.status["pids"])
    for victim in (bench.supervisor_pid, pid):
        os.kill(victim, signal.SIGKILL)
    processes.wait_gone([found for found in [processes.read(pid)] if found], 5)
    orphans = {process.pid for process in server_processes.of_instance(bench.host.paths, "main")}
    assert orphans == pids - {pid}
    assert bench.status["state"] == "dead"
    bench.stop()
    assert not any(processes.alive(orphan) for orphan in orphans)


def test_a_persons_shell_in_the_instances_directory_is_not_ours(bench):
    bench.start()
    shell = subprocess.Popen(["sleep", "60"], cwd=bench.root / "instances/main")
    try:
        bench.stop()
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_the_status_has_the_modes_of_patch_sets_and_what_is_recommended(bench):
    plan = dataclasses.replace(
        bench.plan(BASELINE),
        patch_modes={"triton_target_verify": "check"},
        recommendations=({"patch_set": "other", "source": "measured: x"},),
    )
    server.start(plan, 30)
    assert bench.status["patch_modes"] == {"triton_target_verify": "check"}
    assert bench.status["recommendations"] == [{"patch_set": "other", "source": "measured: x"}]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "systemd"),
        ({"patch_modes": {"triton_target_verify": "grouped"}}, "systemd, triton_target_verify grouped"),
        (
            {"patch_modes": {"triton_target_verify": "check"}},
            "systemd, triton_target_verify check (a test: its speeds are no results)",
        ),
        (
            {"recommendations": [{"patch_set": "triton_target_verify", "source": "measured: x"}]},
            "systemd; recommended: patch set triton_target_verify (measured: x)",
        ),
    ],
)
def test_a_person_sees_them_in_the_status(facts, words):
    (task,) = [task for task in yaml.safe_load(STATUS_TASKS.read_text()) if task["name"] == "Show them"]
    status = {"name": "main", "ready": True, "running": True, "arm": "a", "port": 1, "release": "r", "uptime_seconds": 2}
    status |= {"pid": 3, "service_manager": "systemd", "patch_modes": {}, "recommendations": []} | facts
    text = jinja2.Environment().from_string(task["ansible.builtin.debug"]["msg"]).render(item={"status": status})
    assert " ".join(text.split()).endswith(f"process 3, {words}")


def test_supervisor_stays_while_another_instance_runs(bench):
    bench.start()
    port = free_port()
    second = server_plan.plan(bench.host, make_request(bench.root, BASELINE, name="second", instance={"port": port, "gpus": [1]}))
    server.start(second, 30)
    try:
        bench.stop()
        assert server.status(bench.host, "second")["ready"]
    finally:
        server.stop(bench.host, "second")
    assert of_root(bench.root) == []


def test_a_root_too_deep_for_a_socket_still_serves(tmp_path):
    root = tmp_path / ("d" * 110)
    make_release(root)
    deep = Bench(root)
    try:
        deep.start(BASELINE)
        assert deep.status["ready"]
    finally:
        socket = deep.host.service().socket
        deep.stop()
    assert of_root(root) == []
    assert not socket.parent.exists()


def test_the_api_key_is_in_force_and_only_in_private_files(bench):
    result = bench.start(api_key="sesame")
    assert not server.Endpoint("127.0.0.1", bench.port).answers()
    assert not any("sesame" in word for word in processes.read(result["pid"]).argv)
    holders = [path for path in bench.root.rglob("*") if path.is_file() and b"sesame" in path.read_bytes()]
    assert {path.name for path in holders} == {"secret.yml", "server.log"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holders)
    assert server.is_running_as_planned(bench.plan(api_key="sesame"))
    assert not server.is_running_as_planned(bench.plan(api_key="another"))
    bench.start()
    assert not (bench.root / "instances/main/secret.yml").exists()


def test_a_useless_draft_is_a_warning(bench):
    result = bench.start(environment={"FAKE_ACCEPT_LENGTH": "1.02"})
    assert "accept length 1.02" in result["warnings"][0]


def test_progress_is_told(bench):
    bench.start()
    assert bench.messages[0] == f"main: starting arm eagle3 on port {bench.port}"
    assert bench.messages[-1].startswith("main: ready after")


def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_touched(bench):
    arm = {"name": "odd", "speculation": EAGLE3["speculation"] | {"draft_tokens": 9}, "flags": {"dtyp": "half"}}
    models = make_models(bench.root, draft=DRAFT | {"hidden_size": 64})
    with pytest.raises(AerieError) as raised:
        bench.plan(arm, instance={"host": "0.0.0.0", "gpus": [0, 1]}, models=models, environment={"X": True})
    text = str(raised.value)
    for part in (
        "nothing was touched",
        "draft_tokens to 4",
        "--dtyp",
        "hidden states of 64",
        "sglang_server_api_key",
        "tp-size to 2",
        "X: needs text",
    ):
        assert part in text
    assert not (bench.root / "instances").exists()


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ({"prot": 1}, "prot: no such setting of an instance; did you mean 'port'"),
        ({"port": None}, "port is missing"),
        ({"port": 70000}, "is not a port"),
        ({"gpus": "0"}, "gpus: needs a list"),
        ({"model": "targt"}, "no model 'targt' in sglang_models_catalog; did you mean 'target'"),
        ({"environment": {"AERIE_ROOT": "/x"}}, "AERIE_ROOT is Aerie's own"),
        ({"environment": {"A-B": "x"}}, "'A-B' is no name for a variable"),
    ],
)
def test_a_wrong_instance_is_refused(bench, instance, message):
    with pytest.raises(AerieError, match=message):
        bench.plan(instance=instance)


def test_without_a_release_the_cure_is_named(tmp_path):
    with pytest.raises(AerieError, match="run the install and patch playbooks first"):
        server_plan.plan(make_host(tmp_path), make_request(tmp_path))


def test_flags_and_variables_of_later_layers_win(bench):
    plan = bench.plan(
        {"name": "a", "flags": {"dtype": "half"}, "environment": {"A": "arm", "B": "arm"}},
        profile={"name": "p", "flags": {"dtype": "auto", "device": "cpu"}, "environment": {"A": "profile", "C": "profile", "D": 1}},
        flags={"dtype": "float"},
        environment={"A": "common", "C": None},
        instance={"flags": {"dtype": "float32"}, "environment": {"B": "instance"}},
    )
    assert plan.argv[-2:] == ("--dtype", "float32")
    assert "--enable-metrics" in plan.argv
    assert {name: plan.environment.get(name) for name in "ABCD"} == {"A": "arm", "B": "instance", "C": None, "D": "1"}
    assert plan.environment["AERIE_PROFILE_DIR"] == str(bench.root / "instances/main/profile")
    assert plan.environment["TRITON_CACHE_DIR"] == f"{bench.root}/caches/0.5.23-0123456789ab-580.95/triton"


def test_a_launch_s_own_flags_win_over_common_ones_in_either_spelling_and_an_arm_s_over_both(bench):
    common, launch = {"max_running_requests": 48}, {"max-running-requests": 4}
    assert bench.plan(BASELINE, flags=common, launch_flags=launch).argv[-2:] == ("--max-running-requests", "4")
    arm = {**BASELINE, "flags": {"max_running_requests": 7}}
    assert bench.plan(arm, flags=common, launch_flags=launch).argv[-2:] == ("--max-running-requests", "7")


def test_gpus_become_visible_devices_in_the_order_of_the_bus(bench):
    plan = bench.plan({**EAGLE3, "flags": {"tp-size": 2}}, instance={"gpus": [2, 3]})
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with pytest.raises(AerieError, match="profile cpu serves without GPUs"):
        bench.plan(instance={"gpus": [0]}, profile={"name": "cpu", "environment": {"CUDA_VISIBLE_DEVICES": ""}})


def test_the_shell_reads_the_files_back_exactly(tmp_path):
    odd = 'it\'s "odd" $HOME `id` \\ \n*; é'
    (tmp_path / "environment").write_text(server_plan.environment_text({"ODD": odd, "PATH": os.environ["PATH"]}))
    launch = tmp_path / "launch"
    launch.write_text(server_plan.launch_text(tmp_path, ("printf", "%s|", "--x", odd, f"--y={odd}")))
    answer = subprocess.run(["sh", str(launch)], capture_output=True, text=True, check=True)
    assert answer.stdout == f"--x|{odd}|--y={odd}|"
    script = f"set -a; . {shlex.quote(str(tmp_path / 'environment'))}; printenv ODD"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == f"{odd}\n"


def test_a_release_without_config_files_takes_the_key_as_an_argument_and_says_so(tmp_path):
    make_release(tmp_path, [row for row in ARGUMENTS if row["dest"] != "config"])
    plan = server_plan.plan(make_host(tmp_path), make_request(tmp_path, api_key="sesame", instance={"port": free_port()}))
    assert plan.argv[plan.argv.index("--api-key") :][:2] == ("--api-key", "sesame")
    assert "list of processes" in plan.warnings[0]
    assert all("sesame" not in text for change in server.file_changes(plan) for text in change[1:])


def test_what_ran_is_recorded(bench, tmp_path):
    bench.start()
    record = read_json(tmp_path / "instances/main/instance.json")
    assert record["state"] == "ready"
    assert record["release"] == "0.5.23-0123456789ab"
    assert record["models"]["draft"]["identity"] == "identity of draft"
    assert record["argv"][1:3] == ["-m", "sglang.launch_server"]


RUN_MODULE = """
import json, sys
import ansible.module_utils
sys.path.insert(0, sys.argv[1] + "/library")
ansible.module_utils.__path__.append(sys.argv[1] + "/module_utils")
from ansible.module_utils.testing import patch_module_args
import sglang_server
with patch_module_args(json.loads(sys.argv[2])):
    sglang_server.main()
"""


def run_module(bench: Bench, **arguments: Any) -> dict[str, Any]:
    common = {
        "root": str(bench.root),
        "name": "main",
        "service_manager": "supervisor",
        "supervisor": str(supervisord()),
        "stop_seconds": 10,
    }
    request = {"arm": EAGLE3, "instance": {"model": "target", "port": bench.port}, "models": make_models(bench.root)}
    project = Path(__file__).parents[2]
    argv = [sys.executable, "-c", RUN_MODULE, str(project), json.dumps({**common, **request, **arguments})]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False)
    result: dict[str, Any] = json.loads(answer.stdout)
    return result


def finished(result: dict[str, Any]) -> dict[str, Any]:
    """Wait for the job that the module started and return its result."""
    deadline = time.monotonic() + 30
    while (found := jobs.read(Path(result["job"]))) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found is not None
    return found


def test_temporary_files_stay_below_the_instance_and_go_with_the_next_start_unless_sockets_would_not_fit(tmp_path):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_release(root)
        wanted = server_plan.plan(make_host(root), make_request(root, instance={"port": free_port()}))
        directory = root / "instances/main/tmp"
        assert wanted.environment["TMPDIR"] == str(directory)
        directory.mkdir(parents=True)
        (directory / "left").touch()
        server._write_files(wanted)
        assert list(directory.iterdir()) == []
    deep = tmp_path / ("deep" * 20)
    make_release(deep)
    assert "TMPDIR" not in server_plan.plan(make_host(deep), make_request(deep, instance={"port": free_port()})).environment


def test_check_mode_says_what_would_change_and_changes_nothing(bench):
    result = run_module(bench, _ansible_check_mode=True)
    assert result["changed"]
    assert {Path(change["after_header"]).name for change in result["diff"]} == {"launch", "environment", "supervisord.conf", "main.conf"}
    assert not (bench.root / "instances").exists()
    assert not (bench.root / "supervisor").exists()


def test_check_mode_on_a_bare_host_promises_a_start(tmp_path):
    assert run_module(Bench(tmp_path), _ansible_check_mode=True)["changed"]


def test_check_mode_does_not_miss_a_model_that_an_earlier_step_would_bring(bench):
    coming = {name: {"path": f"/absent/{name}", "config": None} for name in ("target", "draft")}
    assert run_module(bench, models=coming, _ansible_check_mode=True)["changed"]
    assert "run the models playbook first" in run_module(bench, models=coming)["msg"]


def test_the_module_starts_detached_leaves_a_running_server_alone_and_stops_it(bench):
    assert finished(run_module(bench))["ok"]
    assert "job" not in (again := run_module(bench))
    assert again["changed"] is False
    assert run_module(bench, state="status")["status"]["ready"]
    assert run_module(bench, state="stopped", _ansible_check_mode=True)["changed"]
    assert bench.status["ready"]
    assert run_module(bench, state="stopped")["changed"]
    assert run_module(bench, state="stopped")["changed"] is False


def test_a_start_under_way_is_picked_up_or_ended_by_a_stop_and_never_doubled(bench):
    slow = {"instance": {"model": "target", "port": bench.port, "environment": {"FAKE_BEHAVIOUR": "never-ready"}}}
    first = run_module(bench, **slow)
    again = run_module(bench, **slow)
    assert again.get("job") == first["job"], again.get("msg")
    assert "another start is under way" in run_module(bench)["msg"]
    assert run_module(bench, state="stopped")["changed"]
    assert not jobs.is_running(Path(first["job"]))
    assert bench.status["running"] is False


def test_an_arm_is_chosen_by_name_and_a_misspelt_one_is_refused():
    with pytest.raises(AerieError, match="arm 'eagel3' is not in sglang_server_arms; did you mean 'eagle3'"):
        sglang_server_action.chosen_arm("eagel3", {"eagle3": EAGLE3, "baseline": None})
    assert sglang_server_action.chosen_arm("baseline", {"baseline": None}) == {"name": "baseline"}
