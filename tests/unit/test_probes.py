"""A probe ends in time whatever its programs do, leaves nothing behind, and says who stopped where; nobody's work is disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import probe_findings, probe_runner, probes
from ansible.module_utils.aerie.host.probe_programs import all_reduce, common
from ansible.module_utils.aerie.host.probe_runner import MARK, Ended, Outcome, Part, Runner

# What stands for a program: it goes through the request's "steps", as the real ones go through their stages.
SCRIPTED = """
import json, mmap, os, signal, subprocess, sys, time
from .common import run


def main(request, events):
    for step, value in request["steps"]:
        if step == "stage":
            events.stage(value)
        elif step == "figure":
            events.figure(*value)
        elif step == "problem":
            events.problem(value)
        elif step == "hang":
            time.sleep(1000)
        elif step == "die":
            os.kill(os.getpid(), value)
        elif step == "exit":
            os._exit(value)
        elif step == "child":  # in a session of its own, as a compiler's server would be
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=value)
        elif step == "share":
            with open(value, "wb+") as stream:
                stream.truncate(4096)
                keep = mmap.mmap(stream.fileno(), 4096)
        elif step == "say":
            print(value, flush=True)
        elif step == "raise":
            raise ImportError(value)


run(main)
"""
PROGRAMS = {
    "__init__.py": "",
    "common.py": Path(str(common.__file__)).read_text(),
    **{f"{name}.py": SCRIPTED for name in ("scripted", "kernels", "all_reduce", "custom_all_reduce", "p2p", "link", "wedge")},
}


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(Path(sys.executable), tmp_path, dict(os.environ), programs=PROGRAMS)


def part(name: str, *steps: tuple[str, Any]) -> Part:
    return Part(name, {"steps": steps})


def left(runner: Runner) -> list[int]:
    return [process.pid for process in processes.scan() if process.variable(MARK) == runner.mark]


def test_stages_figures_and_problems_come_back_in_order(runner):
    outcome = runner.run(
        "a", "scripted", [part("one", ("stage", "x"), ("figure", ("speed", 7)), ("stage", "y"), ("figure", ("speed", 8)))], seconds=20
    )
    (one,) = outcome.parts
    assert outcome.passed and one.stages == ("x", "y") and one.all("speed") == [7, 8] and one.last("speed") == 8
    assert probe_findings.reason(outcome, 20) is None


@dataclass(frozen=True)
class Hung:
    outcome: Outcome
    left: list[int]
    shared: Path
    others: Path


@pytest.fixture(scope="module", autouse=True)
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in place of the machine's shared memory."""
    with pytest.MonkeyPatch.context() as patched:
        directory = tmp_path_factory.mktemp("shm")
        patched.setattr(probe_runner, "SHARED_MEMORY", f"{directory}/")
        yield directory


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory, shared_memory: Path) -> Hung:
    """Two ranks that never end; the first has children and shared memory."""
    runner = Runner(Path(sys.executable), tmp_path_factory.mktemp("hung"), dict(os.environ), programs=PROGRAMS)
    others, shared = shared_memory / "others", shared_memory / "ours"
    others.write_bytes(b"another's")
    first = part("rank 0", ("child", False), ("child", True), ("share", str(shared)), ("stage", "start"), ("stage", "sum"), ("hang", 0))
    outcome = runner.run("a", "scripted", [first, part("rank 1", ("stage", "start"), ("hang", 0))], seconds=3, together=True)
    return Hung(outcome, left(runner), shared, others)


def test_a_hang_names_the_process_the_stage_and_the_call(hung):
    hang = probe_findings.hang(hung.outcome)
    assert probe_findings.status(hung.outcome) == "timeout" and hang is not None
    assert hang["who"] == ["rank 1"] and hang["stage"] == "start" and hang["others"] == {"rank 0": "sum"}
    assert hang["where"][0].startswith("main (scripted.py:")
    told = str(probe_findings.reason(hung.outcome, 3))
    assert "no end within 3 s: rank 1 stopped at 'start'" in told and "rank 0 waited in 'sum'" in told


def test_children_die_with_a_hung_program_even_outside_its_session(hung):
    assert hung.outcome.left == () and hung.left == []


def test_shared_memory_of_a_killed_program_goes_and_that_of_others_stays(hung):
    assert not hung.shared.exists() and hung.others.exists()


def test_a_hang_of_all_ranks_in_the_first_sum_tells_the_likely_cause():
    ranks = tuple(Ended(f"rank {rank}", None, 9, ("first all_reduce",), (), (), False, (), "") for rank in range(2))
    told = str(probe_findings.reason(Outcome(ranks, 60, True, ()), 60))
    assert told.startswith("no end within 60 s: all of them stopped at 'first all_reduce'") and "IOMMU or ACS" in told


def test_a_process_that_nothing_ends_is_told():
    """It waits inside the driver."""
    stuck = Ended("GPU 0", None, 9, ("allocate",), (), (), False, (), "")
    assert "SIGKILL does not end process 42" in str(probe_findings.reason(Outcome((stuck,), 60, True, (42,)), 60))


def test_children_that_outlive_a_program_are_ended_too(runner):
    outcome = runner.run("a", "scripted", [part("one", ("child", True))], seconds=20)
    assert outcome.passed and left(runner) == []


def test_a_crash_names_the_signal_and_ends_the_others_soon(runner, monkeypatch):
    monkeypatch.setattr(probe_runner, "GRACE_SECONDS", 0.5)
    parts = [part("rank 0", ("stage", "sum"), ("hang", 0)), part("rank 1", ("stage", "sum"), ("die", 11))]
    outcome = runner.run("a", "scripted", parts, seconds=100, together=True)
    assert probe_findings.status(outcome) == "failed" and outcome.seconds < 90 and left(runner) == []
    assert str(probe_findings.reason(outcome, 100)).startswith("rank 1 was killed by SIGSEGV at 'sum', in main (scripted.py:")


def test_an_error_comes_back_with_its_words(runner):
    (broken,) = runner.run("a", "scripted", [part("one", ("stage", "import it"), ("raise", "libnvrtc.so.12: cannot open"))], 20).parts
    assert broken.status == 1 and broken.problems[0]["message"] == "ImportError: libnvrtc.so.12: cannot open"


def test_a_program_that_says_nothing_is_told_by_its_last_words(runner):
    outcome = runner.run("a", "scripted", [part("one", ("say", "out of luck"), ("exit", 3))], 20)
    assert probe_findings.reason(outcome, 20) == "one ended with exit status 3 at 'start': out of luck"


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    """Nobody is there to kill it when the work itself was killed."""
    code = (
        "import os, sys; from pathlib import Path; import ansible.module_utils as m;"
        f"m.__path__.append({str(Path(__file__).parents[2] / 'module_utils')!r});"
        "from ansible.module_utils.aerie.host.probe_runner import Part, Runner;"
        f"Runner(Path(sys.executable), Path({str(tmp_path)!r}), dict(os.environ), programs={PROGRAMS!r})"
        ".run('a', 'scripted', [Part('one', {'steps': [('stage', 'up'), ('hang', 0)]})], 100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    events = tmp_path / "0.jsonl"
    while not (events.exists() and "up" in events.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    (child,) = [process for process in processes.scan() if process.ppid == parent.pid]
    parent.kill()
    parent.wait()
    assert processes.wait_gone([child], 10) == []


def test_the_sources_of_every_program_travel_along():
    texts = probe_runner.sources()
    assert set(texts) == {
        f"{name}.py" for name in ("__init__", "common", "chase", "kernels", "all_reduce", "custom_all_reduce", "p2p", "link", "wedge")
    }
    for name, text in texts.items():
        compile(text, name, "exec")
        assert "ansible" not in text, f"{name} runs without Ansible"


def test_the_values_of_each_rank_differ_and_their_sum_is_exact_in_single_precision():
    assert 36 * 37 // 2 * all_reduce.PATTERN < 1 << 24


# Causes


@pytest.mark.parametrize(
    ("library", "error", "loaded", "pain", "named"),
    [
        ("kernel", "ImportError: libnvrtc.so.12: cannot open shared object file: No such file", (), 9, "libnvrtc.so.12"),
        ("kernel", "[sgl_kernel] CRITICAL: Could not load any common_ops library!", (), 9, None),
        ("kernel", "ImportError: common_ops.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa", (), 10, "_ZN3c104cuda9SetDeviceEa"),
        ("flashinfer", "RuntimeError: libcudart.so.12: cannot open shared object file", (), 11, "libcudart.so.12"),
        ("flashinfer", "panic", ("/usr/local/cuda-12/lib64/libcudart.so.12", "/venv/nvidia/libcudart.so.13"), 11, None),
        ("flashinfer", "RuntimeError: No supported CUDA architectures found for major versions [12].", (), 12, None),
        ("triton", "ptxas fatal   : Value 'sm_120a' is not defined for option 'gpu-name'", (), 13, None),
        ("sglang", "ModuleNotFoundError: No module named 'pybase64'", (), None, "pybase64"),
        ("torch", "ImportError: libcudnn.so.9: cannot open shared object file", (), None, "libcudnn.so.9"),
    ],
)
def test_a_broken_library_is_told_with_its_cause_and_cure(library, error, loaded, pain, named):
    cause = probe_findings.diagnose(library, error, loaded)
    assert cause is not None and cause.pain == pain and cause.cure
    assert named in (cause.library, cause.symbol, None)


def test_an_unknown_error_gets_no_made_up_cause():
    assert probe_findings.diagnose("kernel", "ValueError: 7") is None


def test_a_missing_library_fails_a_release_and_is_only_told_of_another_python(runner):
    outcome = runner.run("a", "scripted", [part("kernel", ("figure", ("module", None)))], 20)
    assert probe_findings.kernels(outcome, 20, required=True)[:2] == ("failed", "kernel is not installed")
    assert probe_findings.kernels(outcome, 20, required=False)[0] == "passed"


# The link


def test_the_link_is_read_only_while_data_moves():
    row = {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16}
    samples = [
        ("take GPU 0", {0: row | {"generation": 1}}),
        ("copy from the host to GPU 0", {0: row | {"width": 8}}),
        ("copy from the host to GPU 1", {0: row | {"generation": 1}}),
    ]
    copied = {"gpu": 0, "h2d_gb_s": {"median": 50.0}, "d2h_gb_s": {"median": 51.0}, "wrong": 0}
    ended = Ended("the copies", 0, 1, (), (("gpu", copied),), (), True, (), "")
    (gpu,) = probe_findings.link(Outcome((ended,), 1.0, False, ()), samples)["gpus"].values()
    assert (gpu["generation"], gpu["width"], gpu["width_max"], gpu["samples"]) == (5, 8, 16, 1)


# Whole runs, with a faked nvidia-smi

FAKE_SMI = """#!{python}
import json, pathlib, sys, time
state = json.loads(pathlib.Path({state!r}).read_text())
if state.get("hangs"):
    time.sleep(1000)
query = sys.argv[1]
if query.startswith("--query-gpu="):
    for gpu in state["gpus"]:
        print(", ".join(str(gpu.get(field, "[N/A]")) for field in query.partition("=")[2].split(",")))
else:
    for process in state.get("processes", []):
        print(", ".join(map(str, process)))
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., probes.Settings]:
    """A host with as many GPUs as asked for, whose nvidia-smi answers from a file."""
    state = tmp_path / "smi.json"
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(FAKE_SMI.format(python=sys.executable, state=str(state)))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(probes, "REST_SECONDS", 0.01)
    monkeypatch.setattr(probes, "SMI_SECONDS", 5.0)

    def make(count: int = 2, processes: tuple[Any, ...] = (), about: Mapping[int, Any] | None = None, **given: Any) -> probes.Settings:
        rows = [
            {"index": number, "uuid": f"GPU-{number}", "name": "Fake", "memory.used": 4, "utilization.gpu": 0, "power.draw": 30.5}
            | dict((about or {}).get(number, {}))
            for number in range(count)
        ]
        state.write_text(json.dumps({"gpus": rows, "processes": processes}))
        return probes.Settings(
            **{"root": tmp_path / "root", "python": sys.executable, "timeout_seconds": 20.0, "cuda_toolkit": tmp_path / "no-cuda"} | given
        )

    return make


def scripted(**steps: list[tuple[str, Any]]) -> dict[str, str]:
    """Programs of which each goes through steps of its own, whatever it is asked."""
    texts = {name: SCRIPTED.replace('request["steps"]', repr(given)) for name, given in steps.items()}
    return PROGRAMS | {f"{name}.py": text for name, text in texts.items()}


def test_a_gpu_in_use_is_left_alone_unless_asked(host):
    settings = host(processes=(["GPU-1", os.getpid(), 5000, "python"],))
    with pytest.raises(AerieError, match=rf"GPU 1 is used by process {os.getpid()} \(python, 5000 MiB\)"):
        probes.plan(settings)
    assert probes.plan(host(processes=(["GPU-1", os.getpid(), 5000, "python"],), gpus=(0,))).gpus == (0,)
    assert probes.plan(host(processes=(["GPU-1", os.getpid(), 5000, "python"],), allow_busy=True)).gpus == (0, 1)


def test_our_own_server_is_left_alone_even_where_the_driver_hides_it(host, tmp_path):
    server = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, "AERIE_INSTANCE": "main", "AERIE_ROOT": str(tmp_path / "root"), "CUDA_VISIBLE_DEVICES": "1"},
    )
    try:
        with pytest.raises(AerieError, match="the server of instance 'main' runs"):
            probes.plan(host())
        assert probes.plan(host(gpus=(0,))).gpus == (0,)
    finally:
        server.kill()
        server.wait()


def test_memory_that_nobody_visible_holds_allows_the_wedge_check_alone(host):
    held = {0: {"memory.used": 624}}
    with pytest.raises(AerieError, match="GPU 0 holds 624 MiB with no process that can be seen"):
        probes.plan(host(about=held))
    assert probes.plan(host(about=held, probes=("wedge",))).steps()[0]["probe"] == "wedge"


def test_what_the_host_can_not_do_is_refused_at_once_and_what_it_lacks_is_skipped(host, tmp_path):
    with pytest.raises(AerieError, match="GPU 7 is not there; there are 0 and 1"):
        probes.plan(host(gpus=(7,)))
    with pytest.raises(AerieError, match="ranks 4: NCCL takes one GPU for each rank, and 2 are to be used"):
        probes.plan(host(ranks=(2, 4)))
    with pytest.raises(AerieError, match="'no-such-python' is no program"):
        probes.plan(host(python="no-such-python"))
    assert list(probes.plan(host(gpus=(0,))).skipped) == ["p2p"]
    nothing = probes.plan(host(python=None))
    assert set(nothing.skipped) == set(probes.PROBES) and "no release is installed" in nothing.skipped["kernels"]
    assert probes.run(nothing, lambda _: None, {})["probes"]["wedge"]["status"] == "skipped"
    none = probes.plan(host(0))
    assert (none.backend, none.ranks, list(none.skipped)) == ("gloo", (2, 4), ["p2p", "link", "wedge"])
    assert not (tmp_path / "root").exists()


def test_a_hang_is_followed_by_the_wedge_check_and_probes_go_on_where_the_gpus_work(host):
    settings = host(probes=("all_reduce", "p2p"), timeout_seconds=2.0)
    programs = scripted(all_reduce=[("stage", "first all_reduce"), ("hang", 0)], p2p=[("stage", "x")], wedge=[("stage", "allocate")])
    result = probes.run(probes.plan(settings), lambda _: None, programs)
    assert {name: one["status"] for name, one in result["probes"].items()} == {
        "all_reduce": "timeout",
        "p2p": "passed",
        "wedge": "passed",
    }
    assert result["healthy_after"] is True


def test_a_wedged_gpu_is_named_and_nothing_more_is_tried(host):
    settings = host(probes=("all_reduce", "p2p"), about={1: {"utilization.gpu": 100, "power.draw": 120.2}})
    programs = scripted(all_reduce=[("stage", "first all_reduce"), ("die", 11)], wedge=[("stage", "allocate")])
    result = probes.run(probes.plan(settings), lambda _: None, programs)
    wedge = result["probes"]["wedge"]
    assert result["healthy_after"] is False and wedge["status"] == "failed"
    assert (wedge["figures"]["gpus"]["0"]["state"], wedge["figures"]["gpus"]["1"]["state"]) == ("healthy", "wedged")
    assert "GPU 1 is wedged: 100 % utilisation, 120.2 W, 4 MiB used, and no process uses it" in wedge["reason"]
    assert "nvidia-smi --gpu-reset -i 1" in wedge["reason"] and "reboot" in wedge["reason"]
    assert result["probes"]["p2p"] == probes.skipped("a GPU is wedged: see the probe wedge")


def test_a_gpu_that_hangs_at_the_least_work_is_wedged(host):
    result = probes.run(
        probes.plan(host(1, probes=("wedge",), timeout_seconds=2.0)), lambda _: None, scripted(wedge=[("stage", "allocate"), ("hang", 0)])
    )
    assert result["probes"]["wedge"]["status"] == "timeout" and "it stopped at 'allocate'" in result["probes"]["wedge"]["reason"]


def test_a_gpu_that_goes_away_under_load_is_lost(host, tmp_path):
    settings = host(2, probes=("link",))
    planned = probes.plan(settings)
    host(1, probes=("link",))
    result = probes.run(planned, lambda _: None, scripted(link=[("stage", "copy from the host to GPU 0")], wedge=[]))
    link = result["probes"]["link"]
    assert link["status"] == "failed" and (link["figures"]["gpus_before"], link["figures"]["gpus_after"]) == (2, 1)
    assert "GPU 1 went away under load" in link["reason"]
    assert result["probes"]["wedge"]["figures"]["gpus"]["1"]["state"] == "lost" and result["healthy_after"] is False


def test_nothing_is_left_in_the_temporary_directory(host, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    probes.run(probes.plan(host(1, probes=("wedge",))), lambda _: None, scripted(wedge=[]))
    assert list(scratch.iterdir()) == []


def test_programs_get_the_servers_nccl_variables_below_those_asked_for(host, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root/nccl.env").write_text("# tuned\nNCCL_P2P_LEVEL=SYS\nNCCL_PROTO='LL,LL128,Simple'\n")
    environment = probes.plan(host(environment={"NCCL_P2P_LEVEL": "PHB"})).environment
    assert (environment["NCCL_P2P_LEVEL"], environment["NCCL_PROTO"]) == ("PHB", "LL,LL128,Simple")
    assert (environment["CUDA_DEVICE_ORDER"], environment["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "0,1")


def test_wrong_settings_are_told_together(tmp_path):
    given = {"root": str(tmp_path), "python": None, "probes": ["wegde"], "gpus": [0, 0], "ranks": [0], "backend": "auto"}
    with pytest.raises(AerieError) as refused:
        probes.Settings.of(given | {"timeout_seconds": 0.5, "environment": {}, "allow_busy": False})
    assert all(
        words in str(refused.value) for words in ("did you mean 'wedge'", "timeout_seconds is 0.5", "gpus is [0, 0]", "ranks is [0]")
    )
