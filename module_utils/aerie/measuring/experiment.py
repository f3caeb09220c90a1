"""Experiments: what to measure, checked as a whole, and the plan that follows from it. Pure; standard library only.

A launch (one start of a server with one arm) is the unit of repetition: passes within one launch share its luck, so they
would count one accident many times. Every arm is therefore started once in each repeat, and two launches in a row stay two
even when their arm is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash
from ansible.module_utils.aerie.measuring import placing
from ansible.module_utils.aerie.words import listing, near

NEEDS_FILE = ("sharegpt", "random")
"""Data sets that read a ShareGPT file: ``random`` cuts and repeats its prompts to the wanted length."""
DATASETS = (*NEEDS_FILE, "random-ids")
ORDERS = ("abba", "sequential")
SHORTEST_OUTPUT = 4  # sglang/benchmark/datasets/sharegpt.py refuses less
DEFAULT_TIMEOUT = 1800

MEASURE = "measure"
PROFILE = "profile"

POLICY, PLAIN, SPECULATIVE = "policy", "plain", "speculative"
MODES = (POLICY, PLAIN, SPECULATIVE)
"""How the cells of a shared launch decode: as the server's own policy decides, or as it is forced to."""


@dataclass(frozen=True)
class Workload:
    """What the clients send: data set, lengths, how many at once, how many in all."""

    dataset: str
    path: str | None
    input_len: int | None
    output_len: int
    concurrency: tuple[int, ...]
    requests_per_client: int
    minimum_requests: int
    seed: int

    def requests(self, concurrency: int) -> int:
        """Return how many requests a cell sends."""
        return max(self.minimum_requests, self.requests_per_client * concurrency)


@dataclass(frozen=True)
class Profile:
    """Which arms are run once more with the phase profiler on, and how long."""

    arms: tuple[str, ...]
    requests_per_client: int


@dataclass(frozen=True)
class Experiment:
    """Arms × concurrency × repeats of one workload, in an order."""

    name: str
    description: str
    arms: tuple[str, ...]
    instance: str | None
    workload: Workload
    repeats: int
    order: str
    profile: Profile | None
    timeout_seconds: int
    share_launch: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By arm, the modes that its launches are measured in, one after the other and without a restart."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists and dicts, as they travel to hosts and into records."""
        found: dict[str, Any] = _plain(asdict(self))
        if not self.share_launch:  # what an experiment doesn't use must not change what it is
            del found["share_launch"]
        return found

    @property
    def most_requests(self) -> int:
        """Return the most requests that any cell sends: as many prompts must the data set have."""
        wanted = [self.workload.requests(level) for level in self.workload.concurrency]
        if self.profile:
            wanted += [self.profile.requests_per_client * level for level in self.workload.concurrency]
        return max(wanted)


@dataclass(frozen=True)
class Cell:
    """One measurement: an arm at one concurrency in one repeat; with a mode where it shares its launch with cells of other modes."""

    id: str
    arm: str
    concurrency: int
    repeat: int
    kind: str
    seed: int
    requests: int
    mode: str | None = None


@dataclass(frozen=True)
class Launch:
    """One start of a server: its arm and its cells; ``cells_before`` of the plan's ``cells_total`` come earlier."""

    launch: int
    arm: str
    repeat: int
    cells: tuple[Cell, ...]
    cells_before: int = 0
    cells_total: int = 0


@dataclass(frozen=True)
class Plan:
    """All launches of an experiment, in order; ``identity`` names what is measured, and changes when any of it does."""

    experiment: Experiment
    identity: str
    launches: tuple[Launch, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists and dicts."""
        return {
            "experiment": self.experiment.as_dict(),
            "identity": self.identity,
            "launches": _plain([asdict(launch) for launch in self.launches]),
        }


def validate(data: Any, arms: Collection[str], instances: Collection[str] | None = None) -> Experiment:
    """Return the experiment that ``data`` describes; raise one AerieError that names every fault in it.

    ``arms`` and ``instances`` are the names defined for the host; None for ``instances`` leaves that name unchecked.
    """
    if not isinstance(data, Mapping):
        raise AerieError(f"the experiment is {_kind(data)}, not a mapping: see docs/reference/experiment.md")
    fault = _Faults()
    top = fault.section(
        data,
        "",
        ("name", "description", "arms", "instance", "workload", "repeats", "order", "profile", "timeout_seconds", "share_launch"),
        ("name", "arms", "workload"),
    )
    name = fault.word(top, "name")
    if name and not placing.is_component(name):
        fault.add(f"name is {name!r}: it names a directory, so use letters, digits, '-', '_' and '.' only, a letter or digit first")
    elif name and placing.is_own(name):
        fault.add(f"name is {name!r}, which is a name of Aerie's own in the results: choose another one")
    chosen = fault.known(fault.names(top, "arms"), "arms", arms, "sglang_server_arms")
    instance = fault.word(top, "instance") or None
    if instance and instances is not None and instance not in instances:
        fault.add(f"instance {instance!r} is not one of sglang_server_instances ({listing(sorted(instances))}){near(instance, instances)}")
    workload = _workload(fault, top.get("workload"))
    profile = _profile(fault, top.get("profile"), chosen)
    share_launch = _share_launch(fault, top.get("share_launch"), chosen, arms)
    experiment = Experiment(
        name=name,
        description=fault.word(top, "description"),
        arms=chosen,
        instance=instance,
        workload=workload,
        repeats=fault.count(top, "repeats", 1),
        order=fault.choice(top, "order", ORDERS, "abba"),
        profile=profile,
        timeout_seconds=fault.count(top, "timeout_seconds", DEFAULT_TIMEOUT),
        share_launch=share_launch,
    )
    raise_all(fault.found, f"experiment {name!r}" if name else "experiment")
    return experiment


def plan(experiment: Experiment, arms: Mapping[str, Any], dataset_sha256: str | None = None) -> Plan:
    """Return the launches of ``experiment`` in order.

    ``abba`` starts the arms in order in odd repeats and reversed in even ones, so that a drift of the machine meets all arms
    alike; ``sequential`` runs all repeats of an arm before the next. Cells are measured in the experiment's order of
    concurrency; profile cells come last and in the first repeat only, so that no measured cell follows a profiled one.
    """
    if experiment.order == "abba":
        turns = [
            (arm, repeat)
            for repeat in range(1, experiment.repeats + 1)
            for arm in (experiment.arms if repeat % 2 else tuple(reversed(experiment.arms)))
        ]
    else:
        turns = [(arm, repeat) for arm in experiment.arms for repeat in range(1, experiment.repeats + 1)]
    launches: list[Launch] = []
    before = 0
    for number, (arm, repeat) in enumerate(turns, start=1):
        cells = _cells(experiment, arm, repeat)
        launches.append(Launch(number, arm, repeat, cells, before))
        before += len(cells)
    identity = canonical_hash(
        {
            "experiment": {key: value for key, value in experiment.as_dict().items() if key != "description"},
            "arms": {name: arms[name] for name in experiment.arms},
            "dataset_sha256": dataset_sha256,
        }
    )
    return Plan(experiment, identity, tuple(replace(launch, cells_total=before) for launch in launches))


def seed(experiment: Experiment, concurrency: int, repeat: int) -> int:
    """Return the seed of a cell: the same for every arm, and unchanged when other levels or repeats are added."""
    return int(canonical_hash([experiment.workload.seed, concurrency, repeat])[:7], 16)


def _cells(experiment: Experiment, arm: str, repeat: int) -> tuple[Cell, ...]:
    workload, profile = experiment.workload, experiment.profile
    modes: tuple[str | None, ...] = experiment.share_launch.get(arm) or (None,)
    cells = []
    for level in workload.concurrency:
        for mode in modes if repeat % 2 else reversed(modes):
            name = f"{arm}@{mode}" if mode else arm
            drawn, requests = seed(experiment, level, repeat), workload.requests(level)
            cells.append(Cell(f"{name}-c{level}-r{repeat}", name, level, repeat, MEASURE, drawn, requests, mode))
    if profile and arm in profile.arms and repeat == 1:
        cells += [
            replace(cell, id=f"{cell.id}-profile", kind=PROFILE, requests=profile.requests_per_client * cell.concurrency)
            for cell in cells
            if cell.mode != PLAIN  # which has none of the phases
        ]
    return tuple(cells)


def _workload(fault: _Faults, data: Any) -> Workload:
    keys = ("dataset", "path", "input_len", "output_len", "concurrency", "requests_per_client", "minimum_requests", "seed")
    section = fault.section(data, "workload", keys, ("dataset", "output_len", "concurrency"))
    at = "workload."
    dataset = fault.choice(section, "dataset", DATASETS, "", at)
    path = fault.word(section, "path", at) or None
    input_len = fault.count(section, "input_len", 0, at) or None
    output_len = fault.count(section, "output_len", SHORTEST_OUTPUT, at)
    if output_len < SHORTEST_OUTPUT:
        fault.add(f"workload.output_len is {output_len}: SGLang's client takes {SHORTEST_OUTPUT} or more")
    if dataset in NEEDS_FILE and not path:
        fault.add(f"workload.path is missing: data set {dataset} reads a ShareGPT file; random-ids needs none")
    if dataset == "sharegpt" and input_len:
        fault.add(
            "workload.input_len has no effect with data set sharegpt, whose prompts have their own lengths: leave it out, or take random"
        )
    if dataset in ("random", "random-ids") and not input_len:
        fault.add(f"workload.input_len is missing: data set {dataset} makes prompts of that length")
    if dataset == "random-ids" and path:
        fault.add("workload.path has no effect with data set random-ids: leave it out")
    return Workload(
        dataset=dataset,
        path=path,
        input_len=input_len,
        output_len=output_len,
        concurrency=fault.counts(section, "concurrency", at),
        requests_per_client=fault.count(section, "requests_per_client", 10, at),
        minimum_requests=fault.count(section, "minimum_requests", 1, at),
        seed=fault.count(section, "seed", 1, at),
    )


def _profile(fault: _Faults, data: Any, arms: Collection[str]) -> Profile | None:
    if data is None:
        return None
    section = fault.section(data, "profile", ("arms", "requests_per_client"), ("arms",))
    names = fault.known(fault.names(section, "arms", "profile."), "profile.arms", arms, "the experiment's arms")
    return Profile(names, fault.count(section, "requests_per_client", 4, "profile."))


def _share_launch(fault: _Faults, data: Any, chosen: Collection[str], arms: Collection[str]) -> dict[str, tuple[str, ...]]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        fault.add(f"share_launch is {_kind(data)}, not a mapping of arms to lists of {listing(MODES)}")
        return {}
    found = {}
    for arm in fault.known(tuple(map(str, data)), "share_launch", chosen, "the experiment's arms"):
        found[arm] = fault.names(data, arm, "share_launch.")
        for mode in found[arm]:
            if mode not in MODES:
                fault.add(f"share_launch.{arm}: {mode!r} is no mode: it must be {listing(MODES, last='or')}{near(mode, MODES)}")
        if isinstance(arms, Mapping) and arm in arms and not (arms[arm] or {}).get("dynamic"):
            fault.add(
                f"share_launch.{arm}: the arm has no `dynamic`, so its server can't change over: give it one, or leave {arm} out here"
            )
    return found


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


class _Faults:
    """Collects every fault of an experiment; each reader returns a harmless value after a fault, so that reading goes on."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, message: str) -> None:
        self.found.append(message)

    def section(self, data: Any, where: str, keys: tuple[str, ...], required: tuple[str, ...]) -> Mapping[str, Any]:
        at = f"{where}." if where else ""
        if not isinstance(data, Mapping):
            if data is not None or where != "workload":  # a missing workload is told with the other missing keys
                self.add(f"{where} is {_kind(data)}, not a mapping with {listing(keys)}")
            return {}
        for key in data:
            if key not in keys:
                self.add(f"{at}{key} is not a key of an experiment{near(str(key), keys)}")
        for key in required:
            if data.get(key) is None:
                self.add(f"{at}{key} is missing")
        return data

    def word(self, data: Mapping[str, Any], key: str, at: str = "") -> str:
        value = data.get(key)
        if value is None:
            return ""
        if isinstance(value, str) and value.strip():
            return value.strip()
        self.add(f"{at}{key} is {value!r}: it must be a word")
        return ""

    def names(self, data: Mapping[str, Any], key: str, at: str = "") -> tuple[str, ...]:
        value = data.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) for item in value):
            self.add(f"{at}{key} is {value!r}: it must be a list of names")
            return ()
        twice = sorted({item for item in value if value.count(item) > 1})
        if twice:
            self.add(f"{at}{key} names {listing(twice)} more than once: repeats count how often an arm is started")
        return tuple(dict.fromkeys(value))

    def known(self, names: tuple[str, ...], where: str, candidates: Collection[str], source: str) -> tuple[str, ...]:
        for name in names:
            if name not in candidates:
                self.add(f"{where}: {name!r} is not one of {source} ({listing(sorted(candidates))}){near(name, candidates)}")
        return names

    def count(self, data: Mapping[str, Any], key: str, default: int, at: str = "") -> int:
        value = data.get(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.add(f"{at}{key} is {value!r}: it must be a whole number from 1 on")
        return default or 1

    def counts(self, data: Mapping[str, Any], key: str, at: str = "") -> tuple[int, ...]:
        value = data.get(key)
        if value is None:
            return ()
        good = isinstance(value, list | tuple) and value and all(isinstance(i, int) and not isinstance(i, bool) and i > 0 for i in value)
        if not good or len(set(value)) != len(value):
            self.add(f"{at}{key} is {value!r}: it must be a list of different whole numbers from 1 on")
            return ()
        return tuple(value)

    def choice(self, data: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str, at: str = "") -> str:
        value = data.get(key)
        if value is None:
            return default
        if value in choices:
            return str(value)
        self.add(f"{at}{key} is {value!r}: it must be {listing(choices, last='or')}{near(str(value), choices)}")
        return default
