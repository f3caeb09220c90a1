"""`gpu_probe` with real torch and gloo, ranks being processes of this machine: it passes, and tells what is wrong when it is made so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runs import playbook, processes_of

# Python imports this at its start, where it is on PYTHONPATH: it makes one rank do what it should not.
FAULTS = {
    "lies": """
        import torch, torch.distributed as dist
        honest = dist.all_reduce
        def all_reduce(tensor, *rest, **more):
            tensor += 1
            return honest(tensor, *rest, **more)
        dist.all_reduce = all_reduce
    """,
    "never joins": """
        import time
        import torch.distributed as dist
        class FileStore(dist.FileStore):
            def set(self, *rest):
                time.sleep(1000)
        dist.FileStore = FileStore
    """,
    "crashes": """
        import os, signal
        import torch.distributed as dist
        dist.all_reduce = lambda *rest: os.kill(os.getpid(), signal.SIGSEGV)
    """,
}
BROKEN_KERNEL = 'raise ImportError("libnvrtc.so.12: cannot open shared object file: No such file or directory")\n'


Probe = Callable[..., dict[str, Any]]


@pytest.fixture
def probe(torch_python: Path, tmp_path: Path) -> Probe:
    """Run the module by a playbook and return its result, with what was printed."""
    root = tmp_path / "root"
    root.mkdir()

    def run(fault: str = "", rank: int = 1, check: bool = False, **given: Any) -> dict[str, Any]:
        faults = tmp_path / "faults"
        faults.mkdir(exist_ok=True)
        body = "\n".join(f"    {line.removeprefix(' ' * 8)}" for line in FAULTS.get(fault, "pass").strip("\n").splitlines())
        (faults / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '{rank}':\n{body}\n")
        answer = tmp_path / "answer.json"
        environment = given.pop("environment", {}) | {"PYTHONPATH": str(faults)}
        arguments = {"root": str(root), "python": str(torch_python), "environment": environment} | given
        tasks = [
            {"gpu_probe": arguments, "register": "__gpu_probe"},
            {"ansible.builtin.copy": {"content": "{{ __gpu_probe | to_json }}", "dest": str(answer)}, "check_mode": False},
        ]
        book = tmp_path / "probe.yml"
        book.write_text(yaml.safe_dump([{"name": "Probe", "hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks}]))
        done = playbook(book, *(["--check"] if check else []), scratch=tmp_path, seconds=300).require_success()
        assert processes_of(root) == [] and list(root.rglob("*")) in ([], [root / "jobs"])
        result: dict[str, Any] = json.loads(answer.read_text())
        assert result["changed"] is False
        return result | {"printed": done.output}

    return run


def test_every_rank_gets_the_right_sum_and_every_size_its_figures(probe):
    result = probe(probes=["kernels", "all_reduce", "p2p"], ranks=[2, 4])
    told = result["probes"]
    assert (told["kernels"]["status"], told["all_reduce"]["status"], told["p2p"]["status"]) == ("passed", "passed", "skipped")
    assert told["kernels"]["figures"]["libraries"]["torch"]["kernel"] == "matrix product"
    assert [run["ranks"] for run in told["all_reduce"]["figures"]["runs"]] == [2, 4]
    for run in told["all_reduce"]["figures"]["runs"]:
        assert [size["bytes"] >> 10 for size in run["sizes"]] == [8, 16, 32, 64, 128, 256, 512, 4096]
        assert all(0 < size["latency_us"]["p10"] <= size["latency_us"]["p90"] and size["bus_gb_s"]["median"] > 0 for size in run["sizes"])
    assert "all_reduce: 4 ranks by gloo" in result["printed"]
    assert result["healthy_after"] is None


def test_a_wrong_sum_is_told_with_what_it_should_have_been(probe):
    result = probe("lies", probes=["all_reduce"], ranks=[2])["probes"]["all_reduce"]
    assert result["status"] == "failed" and "wrong sum" in result["reason"]
    wrong = result["figures"]["runs"][0]["wrong"]
    assert {one["rank"] for one in wrong} == {0, 1} and all(one["got"] - one["known"] == 1 for one in wrong)


def abandoned_memory() -> set[str]:
    """Return the names of shared memory that no process has mapped, and so no other clone's tests."""
    names = set(os.listdir("/dev/shm"))
    used = "\n".join(text for path in Path("/proc").glob("[0-9]*/maps") if (text := read(path)))
    return {name for name in names if f"/dev/shm/{name}" not in used}


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process ended
        return ""


def test_a_rank_that_never_joins_is_named_and_nothing_of_it_is_left(probe):
    before = set(os.listdir("/dev/shm"))
    result = probe("never joins", rank=3, probes=["all_reduce"], ranks=[4], timeout_seconds=15)["probes"]["all_reduce"]
    hang = result["figures"]["runs"][0]["hang"]
    assert result["status"] == "timeout" and hang["who"] == ["rank 3"] and hang["stage"] == "arrive"
    assert hang["where"][0].startswith("set (sitecustomize.py:")
    assert set(hang["others"].values()) == {"wait for the other ranks"}
    left = abandoned_memory() - before
    assert [name for name in left if name.startswith(("torch", "nccl", "gloo"))] == []


def test_a_rank_that_crashes_is_named_with_its_signal_and_stage(probe):
    result = probe("crashes", probes=["all_reduce"], ranks=[2])["probes"]["all_reduce"]
    assert result["status"] == "failed"
    assert "rank 1 was killed by SIGSEGV at 'first all_reduce'" in result["reason"]


def test_a_library_that_is_not_there_is_named_with_the_cause(probe, tmp_path):
    broken = tmp_path / "faults/sgl_kernel"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(BROKEN_KERNEL)
    result = probe(probes=["kernels"])["probes"]["kernels"]
    kernel = result["figures"]["libraries"]["kernel"]
    assert result["status"] == "failed" and (kernel["pain"], kernel["library"]) == (9, "libnvrtc.so.12")
    assert "built for another CUDA" in result["reason"] and kernel["stage"] == "import sgl_kernel"
    assert result["figures"]["libraries"]["torch"]["status"] == "passed"


def test_check_mode_says_what_would_run_and_runs_nothing(probe):
    result = probe(check=True, ranks=[2, 4], timeout_seconds=30)
    assert [step["probe"] for step in result["would_run"]] == ["kernels", "all_reduce"]
    assert result["would_run"][1]["ranks"] == [2, 4] and set(result["would_skip"]) == {"p2p", "link", "wedge"}
    assert "probes" not in result
