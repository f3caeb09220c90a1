"""What a host lacks of the models that it fetches itself, and the fetching of it. Standard library only: this runs on hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment, model_catalog, model_fetch, model_hub, model_identity
from ansible.module_utils.aerie.releases.model_fetch import Plan, Source
from ansible.module_utils.aerie.releases.model_hub import Hub
from ansible.module_utils.aerie.releases.model_identity import Model
from ansible.module_utils.aerie.releases.model_rsync import Rsync
from ansible.module_utils.aerie.words import listing


@dataclass(frozen=True)
class Given:
    """What decides from where and how models are fetched."""

    paths: HostPaths
    addresses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refresh: bool = False
    bandwidth_mib: float | None = None
    endpoint: str | None = None
    token: str | None = None
    lock_text: str | None = None
    python: str = "python3"
    packages: environment.Source = field(default_factory=environment.Source)

    def hub_python(self) -> Path:
        """Return the Python of the hub environment, made or not."""
        return self.hub_environment() / "bin" / "python"

    def hub_environment(self) -> Path:
        if self.lock_text is None:
            raise AerieError("source hub was asked for without its lock: is action_plugins of ansible.cfg in force?")
        return model_hub.environment_path(self.paths, self.lock_text, environment.find_interpreter(self.python))

    def make_hub_environment(self, progress: Progress) -> None:
        """Install what source hub needs, unless it is there."""
        path = self.hub_environment()
        if not environment.is_whole(path):
            interpreter = environment.find_interpreter(self.python)
            model_hub.make_environment(self.paths, path, self.lock_text or "", interpreter, self.packages, progress)


@dataclass(frozen=True)
class Survey:
    """Of the models that the host fetches: those that are there, what the others lack, and what stands in the way."""

    there: Mapping[str, Model]
    plans: Mapping[str, Plan]
    sources: Mapping[str, Source]
    unreachable: Mapping[str, tuple[str, int]]
    unlisted: tuple[str, ...]
    problems: tuple[str, ...]

    def configs(self) -> dict[str, Mapping[str, Any]]:
        """Return the configurations that are known, by name."""
        return {name: model.config for name, model in self.there.items()} | {name: plan.wanted.config for name, plan in self.plans.items()}


def survey(catalog: Mapping[str, Any], given: Given) -> Survey:
    """Look at what is there and ask the sources for what is not. Nothing is written.

    ``unreachable`` are sources of rsync that this host can't connect to; ``unlisted`` are models of a hub whose address only its library
    knows, which is not installed yet.
    """
    there: dict[str, Model] = {}
    plans: dict[str, Plan] = {}
    sources: dict[str, Source] = {}
    unreachable: dict[str, tuple[str, int]] = {}
    unlisted: list[str] = []
    problems: list[str] = []
    cache = model_identity.cache_of(given.paths)
    endpoint: str | None = None
    for name, entry in catalog.items():
        if entry["source"] not in model_catalog.FETCHED:
            continue
        directory = model_catalog.destination(given.paths, name, entry)
        hub = entry["source"] == "hub"
        origin = Hub.origin(entry) if hub else {"source": "rsync", "from": entry["from"]}
        model = None if given.refresh and not hub else model_fetch.whole(directory, origin, cache)
        if model is not None:
            there[name] = model
            cure = model_fetch.OTHER_SOURCE["hub"] if hub else "ask its source again (-e sglang_models_refresh=true)"
            problems += [f"{name}: {one}" for one in model_identity.other_model(directory, model.identity, entry.get("identity"), cure)]
            continue
        try:
            if hub:
                endpoint = endpoint or given.endpoint or model_hub.default_endpoint(_pythons(given))
                if endpoint is None:
                    unlisted.append(name)
                    continue
                python = given.hub_python()
                source: Any = Hub(endpoint, entry["repository"], str(entry["revision"]), tuple(origin["exclude"]), given.token, python)
            else:
                source = Rsync.of(entry, given.addresses.get(name), given.bandwidth_mib)
                if nothing_at := source.unreachable():
                    unreachable[name] = nothing_at
                    continue
            wanted = source.wanted(name, entry, directory)
            if (model := model_fetch.up_to_date(wanted, cache)) is not None:
                there[name] = model
                problems += [f"{name}: {one}" for one in wanted.other_model(directory, model.identity)]
                continue
            problems += [f"{name}: {problem}" for problem in wanted.problems()]
            plan = model_fetch.plan(wanted, cache)
            plans[name], sources[name] = plan, source
        except AerieError as error:
            problems.append(f"{name}: {error}")
    if not problems:
        try:
            model_fetch.check_room(plans.values())
        except AerieError as error:
            problems.append(str(error))
    return Survey(there, plans, sources, unreachable, tuple(unlisted), tuple(problems))


def _pythons(given: Given) -> list[Path]:
    """Return the Pythons that may have huggingface_hub: the hub environment's, and that of the current release."""
    return [given.hub_python(), given.paths.current / "bin" / "python"]


def unreachable_text(host: str, port: int) -> str:
    """Return the problem of a source that can't be reached."""
    return f"nothing answers at {host} port {port} from this host: let it through, or bring the model with source controller"


def fetch_all(survey: Survey, given: Given, progress: Progress, renew: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """Fetch what is lacking, one model after the other; return what each took."""
    if any(isinstance(source, Hub) for source in survey.sources.values()):
        given.make_hub_environment(progress)
    cache, taken = model_identity.cache_of(given.paths), {}
    for name, plan in survey.plans.items():
        renew()
        taken[name] = plan.as_dict() | model_fetch.fetch(plan.wanted, survey.sources[name], cache, progress, renew)
    return taken


def foretold(survey: Survey, catalog: Mapping[str, Any], given: Given) -> dict[str, dict[str, Any]]:
    """Return what is known of the models that are to be fetched, as for a model that is there."""
    values = {}
    for name, plan in survey.plans.items():
        wanted = plan.wanted
        model = Model(wanted.directory, (), wanted.config)
        values[name] = model.as_dict() | {"identity": wanted.identity_told(), "bytes": wanted.bytes, "files": len(wanted.files)}
    for name in survey.unlisted:
        directory = model_catalog.destination(given.paths, name, catalog[name])
        values[name] = {"path": str(directory), "identity": None, "bytes": None, "files": None, "config": {}}
    return values


def would_fetch(survey: Survey, catalog: Mapping[str, Any], given: Given) -> dict[str, dict[str, Any]]:
    """Return what would be fetched, by model; what only the hub's library can tell is null."""
    found = {name: plan.as_dict() for name, plan in survey.plans.items()}
    for name in survey.unlisted:
        entry = catalog[name]
        directory = model_catalog.destination(given.paths, name, entry)
        source = f"{entry['repository']}@{entry['revision']}"
        found[name] = {"from": source, "to": str(directory), "files": None, "bytes": None, "there_bytes": None}
    return found


def diff_lines(plans: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is fetched, for a person."""
    lines = []
    for name, plan in plans.items():
        much = "known when huggingface_hub is installed" if plan["bytes"] is None else model_fetch.size_text(plan["bytes"])
        lines.append(f"{name}: {much} from {plan['from']} to {plan['to']}\n")
        lines += [f"{name}: {file}\n" for file in plan["files"] or ()]
    return lines


def notes(survey: Survey) -> list[str]:
    """Return what a check can't say."""
    if not survey.unlisted:
        return []
    return [
        f"{listing(survey.unlisted)}: how much would be fetched is known when the library of the hub is installed, or "
        "sglang_models_hub_endpoint is set"
    ]
