"""Active probes: short programs that use a host's GPUs as a server would, each bounded in time. Standard library only: this runs on hosts.

``nvidia-smi`` saying that all is well proves little: only a real kernel, copy or all_reduce that ends in time does. :func:`plan` refuses
before anything runs; :func:`run` runs the probes one after the other and looks for wedged GPUs after any that did not end in time.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import raise_all
from ansible.module_utils.aerie.host import probe_findings
from ansible.module_utils.aerie.host.probe_runner import MARK, Outcome, Part, Runner
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.words import listing, near

PROBES = ("kernels", "all_reduce", "p2p", "link", "wedge")
BACKENDS = ("auto", "nccl", "gloo")
LIBRARIES = ("torch", "triton", "kernel", "flashinfer", "sglang")
DECODE_SIZES = tuple(kib << 10 for kib in (8, 16, 32, 64, 128, 256, 512))
"""What a decode step reduces: 8 to 512 KB."""
LARGE_SIZE = {"nccl": 64 << 20, "gloo": 4 << 20}
LINK_SECONDS = 2.0
WEDGE_SECONDS = 60.0
REST_SAMPLES, REST_SECONDS = 6, 1.0
SMI_SECONDS = 10.0
CPU_RANKS = (2, 4)
CUDA_TOOLKIT = Path("/usr/local/cuda")
NCCL_ENVIRONMENT = "nccl.env"

SMI_FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "memory_used_mib": "memory.used",
    "utilization_percent": "utilization.gpu",
    "power_w": "power.draw",
    "generation": "pcie.link.gen.current",
    "generation_max": "pcie.link.gen.max",
    "width": "pcie.link.width.current",
    "width_max": "pcie.link.width.max",
}


@dataclass(frozen=True)
class Settings:
    """What was asked for; ``None`` means what the host has."""

    root: Path
    python: str | None = None
    probes: tuple[str, ...] = PROBES
    gpus: tuple[int, ...] | None = None
    ranks: tuple[int, ...] = ()
    backend: str = "auto"
    timeout_seconds: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    allow_busy: bool = False
    cuda_toolkit: Path = CUDA_TOOLKIT

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Return the settings that module parameters make; raise one AerieError with everything that is wrong with them."""
        problems = [
            f"probes: {name!r} is not one of them ({listing(PROBES)}){near(name, PROBES)}" for name in given["probes"] if name not in PROBES
        ]
        if not given["probes"]:
            problems.append(f"probes is empty: name some of {listing(PROBES)}")
        if given["timeout_seconds"] < 1:
            problems.append(f"timeout_seconds is {given['timeout_seconds']:g}: it must be 1 or more; importing torch alone takes several")
        ranks = tuple(given["ranks"] or ())
        if any(count < 1 for count in ranks) or len(set(ranks)) != len(ranks):
            problems.append(f"ranks is {list(ranks)}: it must be different whole numbers from 1 on")
        gpus = None if given["gpus"] is None else tuple(given["gpus"])
        if gpus is not None and (len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus)):
            problems.append(f"gpus is {list(gpus)}: it must be different numbers of GPUs, as nvidia-smi counts them")
        raise_all(problems, "the probes")
        return cls(
            root=Path(given["root"]),
            python=given["python"],
            probes=tuple(name for name in PROBES if name in given["probes"]),
            gpus=gpus,
            ranks=ranks,
            backend=given["backend"],
            timeout_seconds=float(given["timeout_seconds"]),
            environment={str(name): str(value) for name, value in (given["environment"] or {}).items() if value is not None},
            allow_busy=given["allow_busy"],
        )


@dataclass(frozen=True)
class Plan:
    """What will run: with which Python, on which GPUs, with which variables; and what is left out, and why."""

    settings: Settings
    python: Path | None
    gpus: tuple[int, ...]
    gpus_there: tuple[int, ...]
    backend: str
    ranks: tuple[int, ...]
    environment: Mapping[str, str]
    skipped: Mapping[str, str]

    @property
    def on_gpus(self) -> bool:
        return bool(self.gpus)

    def steps(self) -> list[dict[str, Any]]:
        """Return what would run, for people: probe, processes, GPUs, bound."""
        steps: list[dict[str, Any]] = []
        for name in self.settings.probes:
            if name in self.skipped:
                continue
            seconds = min(self.settings.timeout_seconds, WEDGE_SECONDS) if name == "wedge" else self.settings.timeout_seconds
            step = {"probe": name, "python": str(self.python), "gpus": list(self.gpus), "timeout_seconds": seconds}
            steps.append(step | ({"ranks": list(self.ranks), "backend": self.backend} if name == "all_reduce" else {}))
        return steps


def nvidia_smi(*arguments: str) -> tuple[list[list[str]] | None, str | None]:
    """Return the rows of an answer in CSV, or None and why there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi: not found"
    argv = [program, *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None, f"nvidia-smi gives no answer within {SMI_SECONDS:g} s: the driver hangs; a reboot is needed"
    except OSError as error:
        return None, f"nvidia-smi: {error.strerror}"
    if done.returncode:
        return None, (done.stdout + done.stderr).strip()[:500] or f"nvidia-smi exited with {done.returncode}"
    return [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines()) if row], None


def read_gpus() -> tuple[dict[int, dict[str, Any]], str | None]:
    """Return each GPU by its number as nvidia-smi tells it now, and why there is none."""
    rows, why = nvidia_smi(f"--query-gpu={','.join(SMI_FIELDS.values())}")
    found = {}
    for row in rows or ():
        if len(row) == len(SMI_FIELDS) and row[0].isdigit():
            gpu: dict[str, Any] = dict(zip(SMI_FIELDS, row, strict=True))
            for name in SMI_FIELDS:
                if name not in ("uuid", "name"):
                    gpu[name] = _number(gpu[name])
            found[int(gpu["index"])] = gpu
    return found, why


def read_processes(gpus: Mapping[int, Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the processes that compute on each GPU, with the instance of ours that they belong to."""
    by_uuid = {gpu["uuid"]: number for number, gpu in gpus.items()}
    rows, _ = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in gpus}
    for row in rows or ():
        if len(row) >= 4 and row[0] in by_uuid and row[1].isdigit():
            process = processes.read(int(row[1]))
            instance = process.variable("AERIE_INSTANCE") if process else None
            one = {"pid": int(row[1]), "name": ",".join(row[3:]), "memory_mib": _number(row[2]), "instance": instance}
            found[by_uuid[row[0]]].append(one)
    return found


def plan(settings: Settings) -> Plan:
    """Look at the host and return what will run; raise AerieError where the probes may not run. Nothing is changed."""
    there, why_none = read_gpus()
    problems = []
    wanted = tuple(there) if settings.gpus is None else settings.gpus
    if unknown := [gpu for gpu in wanted if gpu not in there]:
        have = listing(there) if there else f"none ({why_none or 'nvidia-smi lists none'})"
        problems.append(f"GPU {listing(unknown)} is not there; there are {have}: correct gpus")
    backend = settings.backend if settings.backend != "auto" else "nccl" if wanted else "gloo"
    if backend == "nccl" and not wanted:
        problems.append(f"backend nccl needs GPUs, and there are none ({why_none or 'nvidia-smi lists none'}): leave it at auto")
    count = len(wanted)
    default = CPU_RANKS if not wanted else tuple(sorted({min(2, count), count}))
    ranks = settings.ranks or default
    if backend == "nccl" and (many := [number for number in ranks if number > count]):
        problems.append(f"ranks {listing(many)}: NCCL takes one GPU for each rank, and {count} are to be used: lower ranks")
    python, why_no_python = find_python(settings)
    if python is None and settings.python is not None:
        problems.append(f"python: {why_no_python}")
    raise_all(problems, "the probes")
    if wanted and not settings.allow_busy:
        refuse_busy(settings.root, {number: there[number] for number in wanted}, settings.probes)
    skipped = {}
    for name in settings.probes:
        if python is None:
            skipped[name] = str(why_no_python)
        elif name in ("p2p", "link", "wedge") and not wanted:
            skipped[name] = f"no GPU: {why_none or 'nvidia-smi lists none'}"
        elif name == "p2p" and count < 2:
            skipped[name] = "one GPU: there is none that it could copy to"
    return Plan(
        settings=settings,
        python=python,
        gpus=wanted,
        gpus_there=tuple(there),
        backend=backend,
        ranks=ranks,
        environment=_environment(settings, python, wanted),
        skipped=skipped,
    )


def find_python(settings: Settings) -> tuple[Path | None, str | None]:
    """Return the interpreter that the probes run with, or None and why there is none."""
    if settings.python is not None:
        named = shutil.which(settings.python)
        return (Path(named), None) if named else (None, f"{settings.python!r} is no program on this host: name a Python that has torch")
    current = HostPaths(settings.root).current / "bin" / "python"
    if current.exists():
        return current, None
    return (
        None,
        f"no release is installed below {settings.root}, whose Python would be used: install one, or set python to one that has torch",
    )


def refuse_busy(root: Path, gpus: Mapping[int, Mapping[str, Any]], probes: Sequence[str]) -> None:
    """Raise AerieError when anybody uses the GPUs: a probe would disturb them, and they its figures."""
    problems = []
    for number, users in read_processes(gpus).items():
        for one in users:
            ours = f", instance '{one['instance']}'" if one["instance"] else ""
            problems.append(f"GPU {number} is used by process {one['pid']} ({one['name']}{ours}, {one['memory_mib']} MiB)")
    for process in processes.scan():
        instance, home = process.variable("AERIE_INSTANCE"), process.variable("AERIE_ROOT")
        # nvidia-smi lists other process ids, or none, inside a container.
        if instance and home == str(root) and process.variable(MARK) is None and _sees(process, gpus):
            problems.append(f"the server of instance '{instance}' runs (process {process.pid})")
    for number, gpu in gpus.items():
        held = gpu["memory_used_mib"] or 0
        if not problems and held > probe_findings.HELD_MIB and set(probes) != {"wedge"}:
            problems.append(
                f"GPU {number} holds {held} MiB with no process that can be seen: another container's, or it is wedged: "
                "ask for the probe wedge alone to learn which"
            )
    if problems:
        problems = list(dict.fromkeys(problems))
        raise_all(
            problems, "the GPUs are in use: stop what uses them (playbooks/stop.yml for servers), or set allow_busy to probe all the same"
        )


def _sees(process: processes.Process, gpus: Mapping[int, Any]) -> bool:
    visible = process.variable("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return any(not name.isdigit() or int(name) in gpus for name in names)


def _environment(settings: Settings, python: Path | None, gpus: Sequence[int]) -> dict[str, str]:
    """Return the variables of every program: ours, those of a server's NCCL, and what was asked for."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AERIE_", "ANSIBLE_")) and name != "PYTHONHOME"}
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if settings.cuda_toolkit.is_dir() and gpus:
        environment["CUDA_HOME"] = inherited.get("CUDA_HOME", str(settings.cuda_toolkit))
    bins = [str(python.parent)] if python else []
    bins += [f"{made}/bin"] if (made := _made_of(python)) else []
    bins += [f"{environment['CUDA_HOME']}/bin"] if "CUDA_HOME" in environment else []
    path = ":".join([*bins, inherited.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")])
    if not gpus:
        environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    environment = inherited | environment | {"PATH": path} | read_variables(settings.root / NCCL_ENVIRONMENT) | dict(settings.environment)
    # The numbers of nvidia-smi are in the order of the PCI bus; CUDA's own order is another.
    return environment | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def _made_of(python: Path | None) -> str | None:
    """Return the environment that a release's Python has its packages from: ninja and the like are there."""
    if python is None:
        return None
    try:
        release = json.loads((python.parent.parent / "release.json").read_text())
        return str(release["environment"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_variables(path: Path) -> dict[str, str]:
    """Return the variables of a file of lines ``NAME=value``, empty where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    rows = [line.partition("=") for line in lines if "=" in line and not line.lstrip().startswith("#")]
    return {name.strip(): value.strip().strip("'\"") for name, _, value in rows}


def run(plan: Plan, tell: Callable[[str], None], programs: Mapping[str, str]) -> dict[str, Any]:
    """Run the probes of ``plan``; return what the module returns. Everything that was made for it is gone afterwards.

    ``programs`` is what :func:`probe_runner.sources` returned before this work was detached.
    """
    results: dict[str, dict[str, Any]] = {}
    healthy: bool | None = None
    if plan.python is not None:
        with tempfile.TemporaryDirectory(prefix="aerie-probe-", ignore_cleanup_errors=True) as scratch:
            caches = {name: f"{scratch}/caches/{name.lower()}" for name in CACHES}
            runner = Runner(plan.python, Path(scratch), {**plan.environment, **caches, "TMPDIR": scratch}, programs, tell)
            work = _Work(plan, runner, tell)
            for name in plan.settings.probes:
                if name in plan.skipped:
                    continue
                if healthy is False:
                    results[name] = skipped("a GPU is wedged: see the probe wedge")
                    continue
                tell(f"{name}: {WHAT[name]}")
                results[name] = work.probe(name)
                tell(f"{name}: {results[name]['status']}{' - ' + results[name]['reason'] if results[name]['reason'] else ''}")
                if name == "wedge":
                    healthy = results[name]["status"] == "passed"
                elif work.suspicious and plan.on_gpus:
                    work.suspicious = False
                    tell(f"wedge: {WHAT['wedge']} after {name}")
                    results["wedge"] = work.probe("wedge")
                    healthy = results["wedge"]["status"] == "passed"
                    tell(f"wedge: {results['wedge']['status']}")
    for name, why in plan.skipped.items():
        results.setdefault(name, skipped(why))
    return {"probes": {name: results[name] for name in PROBES if name in results}, "healthy_after": healthy}


CACHES = (
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "SGLANG_CACHE_DIR",
    "SGLANG_CACHE_ROOT",
    "SGLANG_DG_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
"""Where libraries keep what they compile: an old file must not answer for a probe, and a probe leaves none."""
WHAT = {
    "kernels": "import each library of the release and run a kernel of it",
    "all_reduce": "sum between ranks at the sizes of decode",
    "p2p": "copy between each two GPUs",
    "link": "watch the links while data moves",
    "wedge": "allocate, run and free on each GPU",
}


def skipped(why: str) -> dict[str, Any]:
    """Return the result of a probe that did not run."""
    return {"status": "skipped", "seconds": 0.0, "reason": why, "figures": {}}


class _Work:
    """The probes of one plan."""

    def __init__(self, plan: Plan, runner: Runner, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self.runner = runner
        self.tell = tell
        self.seconds = plan.settings.timeout_seconds
        self.suspicious = False
        """A program hung or died by a signal: the GPUs may not have got over it."""

    def probe(self, name: str) -> dict[str, Any]:
        started = time.monotonic()
        status, reason, figures = getattr(self, f"_{name}")()
        return {"status": status, "seconds": round(time.monotonic() - started, 1), "reason": reason, "figures": figures}

    def _start(self, title: str, program: str, parts: list[Part], **more: Any) -> Outcome:
        outcome = self.runner.run(title, program, parts, more.pop("seconds", self.seconds), **more)
        if outcome.timed_out or outcome.left or any(part.signal for part in outcome.parts):
            self.suspicious = True
        return outcome

    @property
    def _on(self) -> dict[str, Any]:
        return {"gpus": list(self.plan.gpus) or [0], "device": "cuda" if self.plan.on_gpus else "cpu"}

    def _kernels(self) -> tuple[str, str | None, dict[str, Any]]:
        parts = [Part(name, {**self._on, "library": name}) for name in LIBRARIES]
        outcome = self._start("kernels", "kernels", parts)
        required = self.plan.settings.python is None and self.plan.on_gpus
        return probe_findings.kernels(outcome, self.seconds, required)

    def _all_reduce(self) -> tuple[str, str | None, dict[str, Any]]:
        plan, runs, first = self.plan, list[dict[str, Any]](), None
        for ranks in plan.ranks:
            self.tell(f"all_reduce: {ranks} rank{'s' if ranks > 1 else ''} by {plan.backend}")
            outcome = self._ranks("all_reduce", ranks, [*DECODE_SIZES, LARGE_SIZE[plan.backend]])
            runs.append(probe_findings.all_reduce_run(outcome, ranks, self.seconds))
            first = first or outcome.parts[0]
            if outcome.timed_out:
                break
        told = [f"{one['ranks']} ranks: {one['reason']}" for one in runs if one["reason"]]
        if left := plan.ranks[len(runs) :]:
            told.append(f"{listing(left)} ranks not tried after that")
        custom: list[dict[str, Any]] = []
        if plan.backend == "nccl" and not told:
            for ranks in (count for count in plan.ranks if count > 1):
                self.tell(f"all_reduce: {ranks} ranks by SGLang's own kernel")
                outcome = self._ranks("custom_all_reduce", ranks, DECODE_SIZES)
                custom.append(probe_findings.custom_run(outcome, ranks, self.seconds))
                if outcome.timed_out or custom[-1]["untried"]:
                    break
        told += [f"{one['ranks']} ranks by SGLang's own kernel: {one['reason']}" for one in custom if one["reason"]]
        words = [str(one["status"]) for one in (*runs, *custom)]
        figures = {"backend": plan.backend, "runs": runs, "custom": custom} | {
            name: first.last(name) if first else None for name in ("torch", "nccl", "environment", "libraries")
        }
        return _worst(words), "; ".join(told) or None, figures

    def _ranks(self, program: str, ranks: int, sizes: Sequence[int]) -> Outcome:
        with tempfile.TemporaryDirectory(dir=self.runner.scratch, ignore_cleanup_errors=True) as meeting:
            asked = {"backend": self.plan.backend, "ranks": ranks, "store": f"{meeting}/store", "sizes": list(sizes)}
            parts = [Part(f"rank {rank}", {**asked, "rank": rank}, {"RANK": str(rank)}) for rank in range(ranks)]
            return self._start(f"all_reduce, {ranks} ranks", program, parts, together=True)

    def _p2p(self) -> tuple[str, str | None, dict[str, Any]]:
        outcome = self._start("p2p", "p2p", [Part("the copies", self._on)])
        return probe_findings.status(outcome), probe_findings.reason(outcome, self.seconds), probe_findings.p2p(outcome)

    def _link(self) -> tuple[str, str | None, dict[str, Any]]:
        samples: list[tuple[str, dict[int, dict[str, Any]]]] = []

        def watch(stage: str) -> None:
            if stage.startswith("copy"):
                samples.append((stage, read_gpus()[0]))

        outcome = self._start("link", "link", [Part("the copies", {**self._on, "load_seconds": LINK_SECONDS})], watch=watch)
        after, why = read_gpus()
        figures = probe_findings.link(outcome, samples)
        lost = [gpu for gpu in self.plan.gpus_there if gpu not in after]
        figures |= {"gpus_before": len(self.plan.gpus_there), "gpus_after": len(after), "lost": lost}
        told = [probe_findings.reason(outcome, self.seconds)]
        if lost:
            self.suspicious = True
            told.append(
                f"GPU {listing(lost)} went away under load ({why or 'nvidia-smi lists the others'}): look for Xid 79 in the kernel log"
            )
        status = probe_findings.status(outcome)
        return "failed" if lost and status == "passed" else status, "; ".join(filter(None, told)) or None, figures

    def _wedge(self) -> tuple[str, str | None, dict[str, Any]]:
        seconds = min(self.seconds, WEDGE_SECONDS)
        at_rest, users, why = self._rest()
        asked = [gpu for gpu in self.plan.gpus if gpu in at_rest]
        found: dict[str, dict[str, Any]] = {}
        outcome = None
        if asked:
            parts = [Part(f"GPU {gpu}", {"device": "cuda"}, {"CUDA_VISIBLE_DEVICES": str(gpu)}) for gpu in asked]
            outcome = self._start("wedge", "wedge", parts, seconds=seconds)
        for gpu in self.plan.gpus:
            part = outcome.parts[asked.index(gpu)] if outcome and gpu in asked else None
            found[str(gpu)] = probe_findings.wedged(part, bool(outcome and outcome.timed_out), at_rest.get(gpu), users.get(gpu, []), gpu)
        bad = [one for one in found.values() if one["state"] != "healthy"]
        told = [why] if why else [str(one["reason"]) for one in bad or found.values() if one["reason"]]
        if outcome and outcome.left:
            told.append(probe_findings.undying(outcome))
        word = "timeout" if outcome and outcome.timed_out else "failed" if bad else "passed"
        return word, "; ".join(told) or None, {"gpus": found}

    def _rest(self) -> tuple[dict[int, dict[str, Any]], dict[int, list[dict[str, Any]]], str | None]:
        """Return the GPUs once what ran before has left them, or as they are after a while."""
        for sample in range(REST_SAMPLES):
            gpus, why = read_gpus()
            users = read_processes(gpus)
            restless = [
                gpu for gpu in self.plan.gpus if gpu in gpus and (gpus[gpu]["utilization_percent"] or 0) >= probe_findings.BUSY_PERCENT
            ]
            if not restless or sample == REST_SAMPLES - 1:
                break
            time.sleep(REST_SECONDS)
        return gpus, users, why


def _worst(words: Sequence[str]) -> str:
    return next((word for word in ("timeout", "failed") if word in words), "passed")


def _number(text: Any) -> float | int | None:
    try:
        return float(text) if "." in str(text) else int(text)
    except ValueError:
        return None
