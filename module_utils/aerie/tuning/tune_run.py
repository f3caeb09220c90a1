"""A search on a host: what it means there, its launches, resumable at any of them, and its result. Standard library only."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.measuring import benchmark
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release_file
from ansible.module_utils.aerie.serving import gpu_settings, launch_checks
from ansible.module_utils.aerie.tuning import messages, micro, search, space
from ansible.module_utils.aerie.words import listing

SCHEMA = "aerie-nccl-search/1"
DEFINITION, RESULT, LAUNCHES = "definition.json", "result.json", "launches"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What a tuning task was asked for."""

    run_id: str
    host: str
    table: nccl.Table
    space: space.Space
    profile: str | None
    pinned: Mapping[str, Any]
    ranks: int
    backend: str
    gpus: tuple[int, ...] | None
    python: Path | None
    most: int
    search: search.Settings
    repeats: int
    seconds: float
    target: Mapping[str, Any] | None
    draft_tokens: int
    concurrency: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    objectives: tuple[str, ...]
    host_info: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """Return the request that module parameters make; raise one AerieError with everything that is wrong with them."""
        problems = []
        if not RUN_ID.fullmatch(given["run_id"]):
            problems.append(f"run id {given['run_id']!r} names a directory: use letters, digits, '-', '_' and '.' only")
        info = given["host_info"] or {}
        found = [gpu.get("index", number) for number, gpu in enumerate(info.get("gpus") or [])]
        gpus = tuple(given["gpus"]) if given["gpus"] is not None else None
        backend = given["backend"]
        if backend == "auto":
            backend = micro.NCCL if found or gpus else micro.GLOO
        ranks = given["ranks"] or (len(gpus or found) if backend == micro.NCCL else 2)
        if ranks < 2:
            problems.append(f"{ranks} rank has nobody to talk to: NCCL's settings matter from two GPUs on")
        if backend == micro.NCCL and found and ranks > len(gpus or found):
            problems.append(f"nccl_tune_ranks is {ranks}, and there are {len(gpus or found)} GPUs")
        for name, least in (("most", 1), ("final_rounds", 3), ("finalists", 1), ("repeats", 3)):
            if given[name] < least:
                problems.append(f"{name} is {given[name]}: it must be {least} or more")
        if given["seconds"] <= 0:
            problems.append(f"seconds is {given['seconds']}: a launch needs some")
        unknown = [name for name in given["objectives"] if name not in messages.OBJECTIVES]
        if unknown or not given["objectives"]:
            problems.append(f"objectives are {listing(given['objectives'])}: there are {listing(messages.OBJECTIVES)}")
        problems += [
            f"{name} is {given[name]}: it must be whole numbers from 1 on"
            for name in ("concurrency", "prefill_tokens")
            if not given[name] or min(given[name]) < 1
        ]
        raise_all(problems, "the search")
        return cls(
            run_id=given["run_id"],
            host=given["host"],
            table=nccl.Table.of(given["table"]),
            space=space.Space.of(given["space"]),
            profile=given["profile"],
            pinned=dict(given["environment"] or {}),
            ranks=ranks,
            backend=backend,
            gpus=gpus,
            python=Path(given["python"]) if given["python"] else None,
            most=given["most"],
            search=search.Settings(given["seed"], 1 / 3, given["finalists"], given["final_rounds"], given["minimum_effect"]),
            repeats=given["repeats"],
            seconds=given["seconds"],
            target=given["target"] or None,
            draft_tokens=given["draft_tokens"],
            concurrency=tuple(given["concurrency"]),
            prefill_tokens=tuple(given["prefill_tokens"]),
            objectives=tuple(given["objectives"]),
            host_info=info,
        )


@dataclass(frozen=True)
class Job:
    """A search that is ready to run."""

    asked: Request
    directory: Path
    bench: micro.Bench
    base: Mapping[str, str]
    profile: nccl.Choice
    choice: space.Choice
    messages: tuple[messages.Message, ...]
    definition: Mapping[str, Any]
    before_launch: Callable[[], None] = field(default=lambda: None)

    @property
    def objectives(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of each objective."""
        return {name: tuple(one.bytes for one in self.messages if one.objective == name) for name in self.asked.objectives}

    @property
    def expected(self) -> int:
        return search.expected_launches(len(self.choice.candidates) - 1, len(self.objectives), self.asked.search)


def root(paths: HostPaths) -> Path:
    """Return the directory of all searches on the host."""
    return paths.root / "nccl"


def prepare(paths: HostPaths, asked: Request, before_launch: Callable[[], None] = lambda: None) -> Job:
    """Return the work that ``asked`` means on this host; raise AerieError before anything is written if it can't be done."""
    python = (asked.python or paths.current / "bin/python").absolute()
    topology = asked.host_info.get("topology") or {}
    count = len(asked.host_info.get("gpus") or [])
    profile = nccl.choose(asked.table, asked.profile, topology, count)
    layers = [(f"profile {profile.profile.name}", profile.profile.environment)] if profile.profile else []
    base, origins = nccl.merge([*layers, ("nccl_environment", asked.pinned)])
    raise_all(nccl.examine(asked.table, base, {}, count, origins).errors, "the default set (nothing was measured)")
    links = [nccl.kind(str(link)) for link in (topology.get("links") or {}).values()]
    known = [link for link in links if link in nccl.DISTANCE]
    farthest = max(known, key=nccl.DISTANCE.index) if known else None
    there = space.Situation(asked.ranks, farthest, count)
    choice = space.candidates(asked.space, asked.table, base, asked.pinned, there, asked.most, asked.search.seed)
    if len(choice.candidates) < 2:
        raise AerieError(
            "nccl/space.yml leaves nothing to try beside the default set: give it dimensions that nccl_environment does not set"
        )
    sizes = [message for message in _messages(asked) if message.objective in asked.objectives]
    bench = micro.Bench(
        python=python,
        ranks=asked.ranks,
        backend=asked.backend,
        gpus=asked.gpus,
        sizes=tuple(sorted({message.bytes for message in sizes})),
        repeats=asked.repeats,
        seconds=asked.seconds,
    )
    definition = {
        "schema": SCHEMA,
        "run_id": asked.run_id,
        "host": asked.host,
        "bench": bench.as_dict(),
        "python": str(python),
        "search": asdict(asked.search),
        "candidates": [asdict(candidate) for candidate in choice.candidates],
        "refused": [{"candidate": name, "why": why} for name, why in choice.refused],
        "left_out": choice.left_out,
        "messages": [message.as_dict() for message in sizes],
        "profile": profile.profile.name if profile.profile else None,
        "profile_why": profile.why,
        "base": base,
        "host_fingerprint": benchmark.fingerprint(asked.host_info),
        "release": _release(paths) if asked.python is None else None,
    }
    job = Job(asked, root(paths) / asked.run_id / "search", bench, base, profile, choice, tuple(sizes), definition, before_launch)
    _require_same(job)
    return job


def _messages(asked: Request) -> list[messages.Message]:
    if asked.target is None:
        return messages.generic("no model is known, so sizes that most have")
    path, config = Path(str(asked.target.get("path") or "/")), asked.target.get("config") or {}
    try:
        config = config or files.read_json(path / "config.json")
    except (OSError, ValueError):
        return messages.generic(f"{path / 'config.json'} can't be read, so sizes that most models have")
    facts = gpu_settings.read_model(path, launch_checks.text_config(config) or config)
    return messages.of_model(config, facts.dtype, asked.draft_tokens, asked.concurrency, asked.prefill_tokens)


def _release(paths: HostPaths) -> str | None:
    try:
        return str(release_file.read(paths.current)["id"])
    except (OSError, ValueError, KeyError):
        return None


def _require_same(job: Job) -> None:
    """Raise AerieError when the run was begun with something else to measure: its launches would be mixed up."""
    try:
        before = files.read_json(job.directory / DEFINITION)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise AerieError(f"{job.directory / DEFINITION} can't be read ({error}): give another nccl_tune_run_id") from error
    now = files.canonical_hash(job.definition)
    if files.canonical_hash(before["definition"]) != now:
        differing = [
            key
            for key, value in job.definition.items()
            if files.canonical_hash(before["definition"].get(key)) != files.canonical_hash(value)
        ]
        raise AerieError(
            f"run {job.asked.run_id} was begun with another {listing(differing)}: go on with it as it was, or leave nccl_tune_run_id out"
        )


def predict(job: Job) -> dict[str, Any]:
    """Return what a search would try, for check mode."""
    bench = job.bench.as_dict()
    sizes = listing(size_text(size) for size in bench["sizes"])
    return {
        "would_try": [candidate.name for candidate in job.choice.candidates],
        "refused": [{"candidate": name, "why": why} for name, why in job.choice.refused],
        "messages": [message.as_dict() for message in job.messages],
        "expected_launches": job.expected,
        "msg": f"{len(job.choice.candidates) - 1} sets would be tried on {bench['ranks']} ranks "
        f"with {bench['backend']}, in about {job.expected} launches, at {sizes}",
    }


def run(job: Job, tell: Tell) -> dict[str, Any]:
    """Search; launches that the run has measured are not measured again. Return result.json."""
    launches = job.directory / LAUNCHES
    launches.mkdir(parents=True, exist_ok=True)
    if not (job.directory / DEFINITION).exists():
        files.write_json(job.directory / DEFINITION, {"definition": job.definition, "started": _now()})
    by_name = {candidate.name: candidate for candidate in job.choice.candidates}
    tell(
        f"NCCL: {len(by_name) - 1} sets against the default, {job.bench.ranks} ranks with {job.bench.backend}, "
        f"about {job.expected} launches; {len(job.choice.refused)} sets refused"
    )
    with micro.Program.open(job.bench, job.directory) as program:
        runner = _Runner(job, program, launches, by_name, tell)
        parts = {name: candidate.parts for name, candidate in by_name.items()}
        found = search.search(list(by_name), space.REFERENCE, job.objectives, runner.measure, job.asked.search, parts)
    result = {
        **{key: value for key, value in job.definition.items() if key != "candidates"},
        "candidates": len(by_name) - 1,
        "versions": runner.versions,
        "launches": found.launches,
        "measured_now": runner.measured,
        "disqualified": [{"candidate": name, "why": why} for name, why in found.disqualified.items()],
        "rungs": [list(rung) for rung in found.rungs],
        "objectives": {name: _told(finding, by_name) for name, finding in found.findings.items()},
    }
    files.write_json(job.directory / RESULT, result)
    for finding in found.findings.values():
        tell(f"NCCL: {finding.objective}: {in_words(finding)}")
    return result


def in_words(finding: search.Finding) -> str:
    """Return a finding in one line."""
    ratio = finding.ratio
    interval = f" ({ratio.value:.3f}×, {ratio.low:.3f} to {ratio.high:.3f})" if ratio else ""
    if finding.verdict == search.BETTER:
        return f"{finding.candidate} is faster than the default set{interval}"
    return f"no difference beyond noise{interval}"


def _told(finding: search.Finding, by_name: Mapping[str, space.Candidate]) -> dict[str, Any]:
    chosen = by_name[finding.candidate or space.REFERENCE]
    return {
        "verdict": finding.verdict,
        "candidate": finding.candidate,
        "changes": dict(chosen.changes),
        "environment": dict(chosen.environment),
        "ratio": asdict(finding.ratio) if finding.ratio else None,
        "finalists": {name: asdict(ratio) for name, ratio in finding.finalists.items()},
        "medians_us": {name: {str(size): round(value, 3) for size, value in one.items()} for name, one in finding.medians.items()},
        "spreads": {name: {str(size): round(value, 4) for size, value in one.items()} for name, one in finding.spreads.items()},
    }


class _Runner:
    """Measures launches, or takes what the run has of them."""

    def __init__(self, job: Job, program: micro.Program, launches: Path, by_name: Mapping[str, space.Candidate], tell: Tell) -> None:
        self._job, self._program, self._launches, self._by_name, self._tell = job, program, launches, by_name, tell
        self._spent: list[float] = []
        self.measured = 0
        self.versions: dict[str, Any] = {}

    def measure(self, launch: search.Launch) -> search.Outcome:
        candidate = self._by_name[launch.candidate]
        path = self._launches / f"{launch.stage}{launch.rung}-round{launch.round}-{candidate.id}.json"
        answer = self._earlier(path)
        if answer is None:
            self._job.before_launch()
            started = time.monotonic()
            answer = self._launch(launch, candidate)
            self._spent.append(time.monotonic() - started)
            self.measured += 1
            # A default set that can't be measured is not an outcome: going on with the run tries again.
            if answer["status"] == micro.COMPLETED or launch.candidate != space.REFERENCE:
                files.write_json(path, answer)
            self._say(launch, answer)
            if answer["status"] == micro.TIMEOUT and launch.candidate != space.REFERENCE:
                self._check_after(launch.candidate, answer)
        self.versions = answer.get("versions") or self.versions
        if answer["status"] != micro.COMPLETED:
            return search.Outcome(failure=f"{answer['status']}: {answer['reason']}")
        return search.Outcome(medians=micro.medians(answer))

    def _launch(self, launch: search.Launch, candidate: space.Candidate) -> dict[str, Any]:
        started = _now()
        answer = self._program.measure(candidate.environment, launch.round + 1000 * launch.rung)
        versions = {**self._program.versions, "nccl": answer.pop("nccl", None) or self.versions.get("nccl")}
        return {
            "candidate": candidate.name,
            "environment": dict(candidate.environment),
            "stage": launch.stage,
            "rung": launch.rung,
            "round": launch.round,
            "started": started,
            "versions": versions,
            **answer,
        }

    @staticmethod
    def _earlier(path: Path) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = files.read_json(path)
        except (OSError, ValueError):
            return None
        return found

    def _check_after(self, name: str, answer: Mapping[str, Any]) -> None:
        """See that the default set still works after a hang: else the GPUs are what hangs, and no further set can be judged."""
        after = self._program.measure(self._by_name[space.REFERENCE].environment, 0)
        if after["status"] == micro.COMPLETED:
            self._tell(f"NCCL: {name} hung and is disqualified; the default set still works")
            return
        raise AerieError(
            f"{name} hung ({answer['reason']}), and the default set can't be measured since ({after['reason']}): a GPU may be wedged "
            "(nvidia-smi: busy without a process): reset it or reboot, then go on with "
            f"nccl_tune_run_id={self._job.asked.run_id}"
        )

    def _say(self, launch: search.Launch, answer: Mapping[str, Any]) -> None:
        what = f"{answer['status']}: {answer['reason']}"
        if answer["status"] == micro.COMPLETED:
            medians = micro.medians(answer)
            what = ", ".join(f"{size_text(size)} {value:.1f} µs" for size, value in list(medians.items())[:: max(1, len(medians) - 1)])
        left = max(0, launch.expected - launch.number) * sum(self._spent) / len(self._spent)
        minutes = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
        stage = f"rung {launch.rung}" if launch.stage == search.HALVING else "final"
        self._tell(
            f"NCCL {launch.number} of about {launch.expected} ({stage}, round {launch.round}): {launch.candidate}: {what}; {minutes}"
        )


def size_text(size: int) -> str:
    """Return a size in bytes as a person reads it."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size} B"


def manifest(paths: HostPaths, asked_run: str) -> list[dict[str, Any]]:
    """Return the files of a run with size and sha256; the controller decides where they go."""
    directory = root(paths) / asked_run
    found = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink() and path.name != "program.py")
    return [
        {
            "path": path.relative_to(root(paths)).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": files.sha256_file(path),
        }
        for path in found
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
