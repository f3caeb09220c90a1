"""What settings must fulfil beyond their types: names that exist, ports that don't clash, safe paths. Pure: no Ansible import.

Every ``check_…`` takes what it judges and returns problems, none raises: all of a host's problems are reported at once. A
value of the wrong type is the argument specification's to report, and is passed over here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import tuning_settings
from ansible.module_utils.aerie.measuring import datasets, experiment
from ansible.module_utils.aerie.releases import model_catalog, versions
from ansible.module_utils.aerie.serving import gpu_settings, launch_checks, server_flags
from ansible.module_utils.aerie.words import listing, near

ARM_KEYS = ("description", "speculation", "dynamic", "flags", "environment", "options")
INSTANCE_KEYS = ("arm", "model", "port", "host", "gpus", "flags", "environment", "description")
SHORTEST_LEASE_SECONDS = 60


@dataclass(frozen=True)
class Project:
    """What lies in the project's directories: patch sets by name, experiments by name with their content, ``versions.yml``, and the
    names of the options that arms may ask for, by profile, the tables of GPU settings, by profile, and the profiles of host tuning.

    Paths in experiments are relative to ``root``. ``resolve_revision`` gives, for a host's settings, what tells the commit of a branch.
    """

    patch_sets: Collection[str] = ()
    experiments: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] | None = None
    root: Path = Path()
    options: Mapping[str, Collection[str]] = field(default_factory=dict)
    gpu_tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    resolve_revision: Callable[[Mapping[str, Any]], model_catalog.Resolve] | None = None


def check(settings: Mapping[str, Any], project: Project) -> list[str]:
    """Return every problem of one host's settings (variable name to value, templates resolved)."""
    names = ("sglang_models_catalog", "sglang_server_arms", "sglang_server_instances")
    catalog, arms, instances = (_mapping(settings, name) for name in names)
    patch_sets = settings.get("sglang_patches_sets")
    found: list[Iterable[str]] = [
        check_root(settings.get("aerie_root")),
        check_results(settings.get("aerie_results")),
        check_lease(settings.get("aerie_lease_seconds")),
        check_fetch_limits(settings.get("aerie_fetch_limit_gib"), settings.get("aerie_fetch_limit_files")),
        check_catalog(catalog, project.resolve_revision(settings) if project.resolve_revision else None),
        check_model_transfers(settings),
        check_tuning(settings, project.tuning),
        check_flags("sglang_server_flags", settings.get("sglang_server_flags")),
        check_environment("sglang_server_environment", settings.get("sglang_server_environment")),
        check_arms(arms, catalog, project.options.get(str(settings.get("aerie_profile")), ())),
        check_instances(instances, arms, catalog),
        check_ports(instances),
        check_gpus(settings, project),
        check_exposure(instances, settings.get("sglang_server_api_key")),
        [] if adopts(settings) else check_version(settings.get("sglang_release_version"), settings.get("aerie_profile"), project.versions),
        check_adoption(settings),
        check_patch_sets(patch_sets if isinstance(patch_sets, list) else [], project.patch_sets),
        check_golden_prompts(settings.get("sglang_patches_golden_prompts"), project.root),
        check_experiment(settings.get("sglang_benchmark_experiment"), project, arms, instances),
        check_benchmark_instance(settings.get("sglang_benchmark_instance"), instances),
    ]
    return [problem for problems in found for problem in problems]


def check_root(root: Any) -> Iterator[str]:
    """The root is an absolute directory of its own, in one spelling, so that it can be compared and removed safely."""
    if not isinstance(root, str):
        return
    if not root.startswith("/"):
        yield f"aerie_root is {root!r}: it must be an absolute path, such as /opt/aerie"
    elif posixpath.normpath(root) == "/" or root.startswith("//"):
        yield f"aerie_root is {root!r}: everything below it is managed, so it must be a directory of its own, such as /opt/aerie"
    elif posixpath.normpath(root) != root:
        yield f"aerie_root is {root!r}: write it as {posixpath.normpath(root)!r}"
    elif re.search(r"\s", root):
        yield f"aerie_root is {root!r}: a path with white space breaks the scripts of virtual environments"


def check_results(results: Any) -> Iterator[str]:
    """The controller's directory is absolute, since tasks run in more than one working directory."""
    if isinstance(results, str) and not results.startswith("/"):
        yield f'aerie_results is {results!r}: it must be an absolute path, such as "{{{{ inventory_dir }}}}/{results}"'


def check_lease(seconds: Any) -> Iterator[str]:
    """A lease outlives the longest single step between two renewals."""
    if isinstance(seconds, int) and seconds < SHORTEST_LEASE_SECONDS:
        yield f"aerie_lease_seconds is {seconds}: another run could take the host over within a step: set {SHORTEST_LEASE_SECONDS} or more"


def check_fetch_limits(gib: Any, files: Any) -> Iterator[str]:
    """Something must fit, or nothing is ever brought."""
    if isinstance(gib, int | float) and not 0 < gib <= 1 << 20:
        yield f"aerie_fetch_limit_gib is {gib}: it must be more than 0, in GiB"
    if isinstance(files, int) and files < 1:
        yield f"aerie_fetch_limit_files is {files}: it must be 1 or more"


def check_catalog(catalog: Mapping[str, Any], resolve: model_catalog.Resolve | None = None) -> Iterator[str]:
    """Each model has a source, and what that needs."""
    yield from (f"sglang_models_catalog.{problem}" for problem in model_catalog.problems(catalog, resolve))


def check_model_transfers(settings: Mapping[str, Any]) -> Iterator[str]:
    """A hub is an address of the web, and a bound on rsync lets something through."""
    endpoint, bandwidth = settings.get("sglang_models_hub_endpoint"), settings.get("sglang_models_bandwidth_mib")
    if isinstance(endpoint, str) and not re.fullmatch(r"https?://[^\s/]+(/[^\s]*)?", endpoint):
        yield f"sglang_models_hub_endpoint is {endpoint!r}: it must be a URL, such as https://hub.example.org"
    if isinstance(bandwidth, int | float) and bandwidth <= 0:
        yield f"sglang_models_bandwidth_mib is {bandwidth}: it must be more than 0, or null for no bound"


def check_tuning(settings: Mapping[str, Any], table: Mapping[str, Any]) -> list[str]:
    """The host's tuning is one that could be, on some host; whether on this one, its survey says."""
    profiles, own = settings.get("host_tuning_profiles"), settings.get("host_tuning_settings")
    return tuning_settings.check(profiles if isinstance(profiles, list) else [], table, own if isinstance(own, Mapping) else {})


def check_arms(arms: Mapping[str, Any], catalog: Collection[str], options: Collection[str] = ()) -> Iterator[str]:
    """Each arm has known keys, a speculation that holds together, a draft model that exists, and options that the profile has."""
    for name, arm in arms.items():
        where = f"sglang_server_arms.{name}"
        yield from _name(where, name, "._-")
        if _is_misplaced(name, arm, ARM_KEYS):
            yield f"{where} is no arm but a setting of one: indent `{name}:` under the arm that it belongs to"
            continue
        if arm is None:  # an arm of which nothing is said is the baseline
            continue
        if not isinstance(arm, Mapping):
            yield f"{where} is {arm!r}: it must be a mapping with {listing(ARM_KEYS)}"
            continue
        yield from _keys(where, arm, ARM_KEYS)
        owned = server_flags.owned_flags(arm.get("speculation"))
        yield from check_flags(f"{where}.flags", arm.get("flags"), owned)
        yield from check_environment(f"{where}.environment", arm.get("environment"))
        asked = arm.get("options")
        if asked is not None and not isinstance(asked, list):
            yield f"{where}.options is {asked!r}: it must be a list of names"
        elif asked:
            yield from (f"{where}.{gpu_settings.unknown_option(name, options)}" for name in asked if name not in options)
        speculation = arm.get("speculation")
        if speculation is not None and not isinstance(speculation, Mapping):
            yield f"{where}.speculation is {speculation!r}: it must be null or a mapping with {listing(server_flags.SPECULATION_KEYS)}"
            continue
        yield from (f"{where}.{problem}" for problem in server_flags.speculation_problems(speculation))
        yield from (f"{where}.{problem}" for problem in server_flags.dynamic_problems(arm.get("dynamic"), speculation))
        draft = (speculation or {}).get("draft_model")
        algorithm = str((speculation or {}).get("algorithm") or "").upper()
        if draft is None and algorithm in server_flags.NEEDS_DRAFT:
            yield f"{where}.speculation.draft_model is missing: {algorithm} needs one, the name of a model in sglang_models_catalog"
        if draft is not None and not (isinstance(draft, str) and draft in catalog):
            yield f"{where}.speculation.draft_model: {_not_in(draft, catalog, 'sglang_models_catalog')}"


def check_instances(instances: Mapping[str, Any], arms: Mapping[str, Any], catalog: Collection[str]) -> Iterator[str]:
    """Each instance has known keys, an arm and a model that exist, and GPUs that are numbers."""
    for name, instance in instances.items():
        where = f"sglang_server_instances.{name}"
        yield from _name(where, name, "_-")
        if _is_misplaced(name, instance, INSTANCE_KEYS):
            yield f"{where} is no instance but a setting of one: indent `{name}:` under the instance that it belongs to"
            continue
        if not isinstance(instance, Mapping):
            yield f"{where} is {instance!r}: it must be a mapping with {listing(INSTANCE_KEYS)}"
            continue
        yield from _keys(where, instance, INSTANCE_KEYS, required=("arm", "model", "port"))
        for key, candidates, source in (("arm", arms, "sglang_server_arms"), ("model", catalog, "sglang_models_catalog")):
            value = instance.get(key)
            if value is not None and not (isinstance(value, str) and value in candidates):
                yield f"{where}.{key}: {_not_in(instance[key], candidates, source)}"
        gpus = instance.get("gpus")
        if gpus is not None and not _are_gpus(gpus):
            yield f"{where}.gpus is {gpus!r}: it must be a list of different GPU numbers, such as [0, 1], or null (the first ones)"
        arm = arms.get(str(instance.get("arm")))
        speculation = arm.get("speculation") if isinstance(arm, Mapping) else None
        owned = server_flags.owned_flags(speculation)
        yield from check_flags(f"{where}.flags", instance.get("flags"), owned)
        yield from check_environment(f"{where}.environment", instance.get("environment"))


def check_ports(instances: Mapping[str, Any]) -> Iterator[str]:
    """Each port is one, and no two instances of a host share it."""
    users: dict[int, list[str]] = {}
    for name, instance in instances.items():
        port = instance.get("port") if isinstance(instance, Mapping) else None
        if port is None:
            continue
        if not _is_count(port) or not 1 <= port <= 65535:
            yield f"sglang_server_instances.{name}.port is {port!r}: it must be a number from 1 to 65535"
            continue
        users.setdefault(port, []).append(name)
    for port, names in users.items():
        if len(names) > 1:
            yield f"port {port} belongs to instances {listing(names)}: give each a port of its own in sglang_server_instances"


def check_gpus(settings: Mapping[str, Any], project: Project) -> Iterator[str]:
    """Each instance has as many GPUs as its flags use, and none that another instance of the host has."""
    instances = {
        name: instance
        for name, instance in _mapping(settings, "sglang_server_instances").items()
        if isinstance(instance, Mapping) and (instance.get("gpus") is None or _are_gpus(instance["gpus"]))
    }
    if settings.get("aerie_profile") == "cpu":
        for name, instance in instances.items():
            if instance.get("gpus") is not None:
                yield f"sglang_server_instances.{name}.gpus is {instance['gpus']!r}: the profile cpu serves without GPUs: leave gpus out"
        return
    arms = _mapping(settings, "sglang_server_arms")
    data = project.experiments.get(str(settings.get("sglang_benchmark_experiment")))
    measured, experiment_arms = measured_instance(settings, data), _experiment_arms(data)
    for name, instance in instances.items():
        own_arm = str(instance.get("arm"))
        problems: dict[str, str] = {}
        # An experiment starts its arms in turn on one instance.
        for arm in (own_arm, *(experiment_arms if name == measured else ())):
            note = "" if arm == own_arm else f" (with arm {arm} of the experiment)"
            flags = instance_flags(settings, arms.get(arm), instance)
            for problem in launch_checks.gpu_problems(name, instance.get("gpus"), flags):
                problems.setdefault(problem, note)
        yield from (f"{problem}{note}" for problem, note in problems.items())
    yield from _shared_gpus(settings, arms, instances)


def _shared_gpus(settings: Mapping[str, Any], arms: Mapping[str, Any], instances: Mapping[str, Any]) -> Iterator[str]:
    """Yield which GPUs two instances would use: SGLang takes most of a GPU's memory, so that the second would not start."""
    users: dict[int, list[str]] = {}
    unlisted: dict[str, int] = {}
    for name, instance in instances.items():
        flags = instance_flags(settings, arms.get(str(instance.get("arm"))), instance)
        used = launch_checks.gpus_used(instance.get("gpus"), flags)
        for gpu in used:
            users.setdefault(gpu, []).append(name)
        if instance.get("gpus") is None:
            unlisted[name] = len(used)
    shared: dict[tuple[str, ...], list[int]] = {}
    for gpu, names in sorted(users.items()):
        if len(names) > 1:
            shared.setdefault(tuple(names), []).append(gpu)
    for sharing, gpus in shared.items():
        subject = f"GPU {gpus[0]} belongs" if len(gpus) == 1 else f"GPUs {listing(gpus)} belong"
        first = "".join(f"; {name} has no gpus, and its flags use {unlisted[name]}" for name in sharing if name in unlisted)
        yield f"{subject} to instances {listing(sharing)}{first}: give each GPUs of its own (gpus in sglang_server_instances)"


def instance_flags(settings: Mapping[str, Any], arm: Any, instance: Mapping[str, Any]) -> dict[str, Any]:
    """Return by dest the flags that decide which GPUs an instance uses with ``arm``."""
    arm_flags = arm.get("flags") if isinstance(arm, Mapping) else None
    return launch_checks.parallel_flags(settings.get("sglang_server_flags"), arm_flags, instance.get("flags"))


def check_exposure(instances: Mapping[str, Any], api_key: str | None) -> Iterator[str]:
    """A server that others can reach asks for a key."""
    for name, instance in instances.items():
        host = instance.get("host") if isinstance(instance, Mapping) else None
        if host is not None:
            yield from launch_checks.exposure_problems(name, str(host), api_key)


def check_flags(where: str, flags: Any, owned: Mapping[str, str] = server_flags.OWNED) -> Iterator[str]:
    """Flags are a mapping of names; one that has a setting of its own is set there. Their values are the release's parser to judge."""
    if flags is None:
        return
    if not isinstance(flags, Mapping):
        yield f"{where} is {flags!r}: it must be a mapping, flag to value"
        return
    spellings: dict[str, Any] = {}
    for flag, value in flags.items():
        name = server_flags.plain(str(flag))
        if cure := owned.get(name):
            yield f"{where}.{flag}: {cure} and leave the flag out"
        dest = launch_checks.PARALLEL_FLAGS.get(name, name)
        if dest in spellings:
            yield f"{where}: {spellings[dest]} and {flag} are the same flag: write one of them"
        spellings.setdefault(dest, flag)
        if dest in launch_checks.PARALLEL_SIZES and value is not None and not (_is_count(value) or str(value).isdigit()):
            yield f"{where}.{flag} is {value!r}: it must be a whole number"


def check_environment(where: str, environment: Any) -> Iterator[str]:
    """Environment variables have names that a shell takes, and values that are texts or numbers."""
    if environment is None:
        return
    if not isinstance(environment, Mapping):
        yield f"{where} is {environment!r}: it must be a mapping, name to value"
        return
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            yield f"{where}: {name!r} is no name of an environment variable (letters, digits and underscores)"
        if isinstance(value, bool):
            yield f'{where}.{name} is {str(value).lower()} of YAML: write the text that the program reads in quotes, as "{int(value)}"'
        elif value is not None and not isinstance(value, str | int | float):
            yield f"{where}.{name} is {value!r}: it must be a text or a number"
        elif value is not None:
            problems = launch_checks.patch_switch_value_problems(str(name), str(value))
            yield from (f"{where}.{problem}" for problem in problems)


def check_version(version: Any, profile: Any, known: Mapping[str, Any] | None) -> Iterator[str]:
    """The wanted version, or the profile's default, has a lock for the profile."""
    if known is None or profile not in versions.PROFILES:
        return
    try:
        versions.resolve(known, profile, version)
    except AerieError as error:
        yield f"sglang_release_version: {error}"


def adopts(settings: Mapping[str, Any]) -> bool:
    """Say whether the host's own SGLang is used, which may have a version that ``versions.yml`` does not know."""
    return bool(settings.get("sglang_release_adopt_environment") or settings.get("sglang_release_adopt"))


def check_adoption(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is adopted has an absolute path, and is none of Aerie's own."""
    root = settings.get("aerie_root")
    examples = {"sglang_release_adopt_environment": "/opt/venv/bin/python", "sglang_release_adopt": "/sgl-workspace/sglang/python"}
    for name, example in examples.items():
        path = settings.get(name)
        if not isinstance(path, str) or not path:
            continue
        if not path.startswith("/") or posixpath.normpath(path) != path:
            yield f"{name} is {path!r}: it must be an absolute path in its shortest spelling, such as {example}"
        elif isinstance(root, str) and Path(path).is_relative_to(root):
            yield f"{name} is {path!r}, which is below aerie_root: what lies there is Aerie's own; adopt what the host had before"


def check_patch_sets(names: Iterable[Any], known: Collection[str]) -> Iterator[str]:
    """Each patch set is there, once."""
    seen = set()
    for name in names:
        if name in seen:
            yield f"sglang_patches_sets names {name!r} twice"
        elif name not in known:
            yield f"sglang_patches_sets: {_not_in(name, known, 'the sets under patches/')}"
        seen.add(name)


def check_golden_prompts(path: Any, root: Path) -> Iterator[str]:
    """The prompts are there: a switch that finds out has stopped servers by then."""
    if isinstance(path, str) and not (root / path).is_file():
        yield f"sglang_patches_golden_prompts is {path!r}: there is no such file in the project; null asks none"


def check_experiment(name: Any, project: Project, arms: Collection[str], instances: Collection[str]) -> Iterator[str]:
    """The experiment is there, everything in it holds for this host, and its data set can be sent."""
    if not isinstance(name, str):
        return
    if name not in project.experiments:
        yield f"sglang_benchmark_experiment: {_not_in(name, project.experiments, 'the files of experiments/')}"
        return
    try:
        wanted = experiment.validate(project.experiments[name], arms, instances)
        if wanted.workload.path:
            datasets.check(project.root / wanted.workload.path, wanted.most_requests)
    except AerieError as error:
        yield f"experiments/{name}.yml: {error}".replace("\n", "\n  ")


def check_benchmark_instance(name: Any, instances: Collection[str]) -> Iterator[str]:
    """The instance to measure exists."""
    if isinstance(name, str) and name not in instances:
        yield f"sglang_benchmark_instance: {_not_in(name, instances, 'sglang_server_instances')}"


def _is_misplaced(name: Any, value: Any, keys: Collection[str]) -> bool:
    """Say whether an entry is a setting that is indented too little: it has the name of one, and nothing that an entry has.

    An arm may well be called ``dynamic``.
    """
    return name in keys and not (isinstance(value, Mapping) and any(key in keys for key in value))


def _mapping(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _are_gpus(gpus: Any) -> bool:
    return isinstance(gpus, list) and bool(gpus) and all(_is_count(gpu) for gpu in gpus) and len(set(gpus)) == len(gpus)


def measured_instance(settings: Mapping[str, Any], data: Any) -> str | None:
    """Return the instance that an experiment with content ``data`` measures; None where nobody said which of several."""
    instances = _mapping(settings, "sglang_server_instances")
    own = data.get("instance") if isinstance(data, Mapping) else None
    return settings.get("sglang_benchmark_instance") or own or (next(iter(instances)) if len(instances) == 1 else None)


def _experiment_arms(data: Any) -> list[str]:
    """Return the names of an experiment's arms; none where it is faulty, which is another check's to report."""
    arms = data.get("arms") if isinstance(data, Mapping) else None
    return [name for name in arms if isinstance(name, str)] if isinstance(arms, list) else []


def _keys(where: str, value: Mapping[str, Any], known: Collection[str], required: Iterable[str] = ()) -> Iterator[str]:
    for key in value:
        if key not in known:
            yield f"{where}.{key}: no such setting{near(str(key), known)}"
    for key in required:
        if value.get(key) is None:
            yield f"{where}.{key} is missing"


def _name(where: str, name: Any, signs: str) -> Iterator[str]:
    if not isinstance(name, str) or not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9{re.escape(signs)}]*", name):
        allowed = listing(repr(sign) for sign in signs)
        yield f"{where}: the name becomes part of files and units, so it begins with a letter or digit and has only these, {allowed}"


def _not_in(name: Any, candidates: Collection[str], source: str) -> str:
    return f"{name!r} is not one of {source} ({listing(sorted(map(str, candidates)))}){near(str(name), map(str, candidates))}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
