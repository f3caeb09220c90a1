"""What a server should be: a request, checked against the host into a plan, and the files that make it so. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash, read_json
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.measuring import calibration
from ansible.module_utils.aerie.patching import patch_checks
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release_file
from ansible.module_utils.aerie.serving import gpu_settings, launch_checks, server_flags, server_processes
from ansible.module_utils.aerie.serving.server_http import Endpoint
from ansible.module_utils.aerie.serving.service import Service, choose
from ansible.module_utils.aerie.serving.service_supervisor import Supervisor
from ansible.module_utils.aerie.serving.service_systemd import Systemd
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing, near

INSTANCE_KEYS = ("arm", "model", "port", "host", "gpus", "flags", "environment", "description")
ARM_KEYS = ("name", "description", "speculation", "dynamic", "flags", "environment", "options")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CALIBRATION_VARIABLE = "AERIE_DYNAMIC_CALIBRATION"
OWN_VARIABLES = ("AERIE_INSTANCE", "AERIE_ROOT", "AERIE_PROFILE_DIR", CALIBRATION_VARIABLE)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CUDA_TOOLKIT = Path("/usr/local/cuda")
HIDDEN = "********"
LONGEST_TEMPORARY = 70
"""Bytes of a temporary directory's path that leave room for the names of the sockets in it."""


@dataclass(frozen=True)
class Host:
    """A host's root and how its servers are run."""

    paths: HostPaths
    service_manager: str = "auto"
    supervisor: Path | None = None
    stop_seconds: int = 60
    cuda_toolkit: Path = CUDA_TOOLKIT

    def service(self, kind: str | None = None) -> Service:
        """Return the service manager asked for, or one of another ``kind`` that ran a server before."""
        if (kind or choose(self.service_manager)) == "systemd":
            return Systemd(self.paths, self.stop_seconds)
        return Supervisor(self.paths, self.stop_seconds, self.supervisor or self._installed_supervisor())

    def _installed_supervisor(self) -> Path | None:
        found = sorted(self.paths.environments.glob("supervisor-*/bin/supervisord"))
        return found[-1] if found else None


@dataclass(frozen=True)
class Request:
    """What a server should be: an instance with its arm, models, profile and common settings."""

    name: str
    instance: Mapping[str, Any]
    arm: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]]
    profile: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    launch_flags: Mapping[str, Any] = field(default_factory=dict)
    """For this launch alone, over ``flags``; what arm or instance set themselves wins."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    driver: str | None = None
    api_key: str | None = field(default=None, repr=False)
    gpu_table: Mapping[str, Any] | None = None
    """What GPUs of one kind need, as docs/reference/gpu-settings.md says."""
    host_gpus: tuple[Mapping[str, Any], ...] = ()
    """The host's GPUs with ``index`` and ``compute_capability``."""
    rehearsal: bool = False
    """True in check mode: a model or a release that an earlier step would bring may be missing."""
    patch_sets: tuple[Mapping[str, Any], ...] | None = None
    """The patch sets that must be active (name, sha256, upstream_since of each); None takes the release as it is."""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """Where plain decoding begins to win, for an arm whose threshold is ``auto``; as docs/reference/calibration.md says."""
    host_fingerprint: Mapping[str, Any] = field(default_factory=dict)
    """The host as records and calibrations tell it."""

    @property
    def is_calibrated(self) -> bool:
        """Say whether the arm takes its thresholds from a calibration."""
        return (self.arm.get("dynamic") or {}).get("threshold") == "auto"


@dataclass(frozen=True)
class Plan:
    """A checked request: what will run, the files that make it so, and what a person should know."""

    host: Host
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    endpoint: Endpoint
    arm: Mapping[str, Any]
    release: Mapping[str, Any]
    models: Mapping[str, Any]
    gpus: tuple[int, ...] | None
    definition: str
    warnings: tuple[str, ...]
    gpu_settings: tuple[Mapping[str, Any], ...] = ()
    """The rules and options of the GPU settings that are in force, each with what it sets."""
    recommendations: tuple[Mapping[str, Any], ...] = ()
    """Patch sets that would make this server faster, each with the rule that says so."""
    patch_modes: Mapping[str, str] = field(default_factory=dict)
    """How the release's patch sets that have a switch are run, by name."""
    calibration: Mapping[str, Any] | None = None
    """What the server reads its thresholds from; None where its arm names them, or has none."""
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    """From which numbers of draft steps SGLang chooses, by batch size; empty where it is fixed."""

    @property
    def directory(self) -> Path:
        return self.host.paths.instance(self.name)

    def redacted(self, text: str) -> str:
        """Return ``text`` without the API key."""
        return text.replace(self.endpoint.api_key, HIDDEN) if self.endpoint.api_key else text

    def files(self) -> dict[Path, tuple[str, int]]:
        """Return the files of the instance with content and mode; the key's own file and everything that may hold it is private."""
        files = {
            self.directory / "environment": (environment_text(self.environment), 0o600),
            self.directory / "launch": (launch_text(self.directory, self.argv), 0o700),
        }
        if self.endpoint.api_key and "--config" in self.argv:
            files[self.secret] = (secret_text(self.endpoint.api_key), 0o600)
        if self.calibration:
            files[calibration_path(self.directory)] = (json.dumps(self.calibration, indent=1, sort_keys=True) + "\n", 0o644)
        if self.adaptive:
            text = json.dumps(self.adaptive, indent=1) + "\n"
            files[adaptive_path(self.directory)] = (text, 0o644)
        return files

    @property
    def secret(self) -> Path:
        return secret_path(self.directory)


def calibration_path(directory: Path) -> Path:
    """Return the file from which the server reads its thresholds."""
    return directory / "calibration.json"


def adaptive_path(directory: Path) -> Path:
    """Return the file from which SGLang reads which numbers of draft steps it may choose."""
    return directory / "adaptive.json"


def secret_path(directory: Path) -> Path:
    """Return the file from which the server reads its API key (``--config`` takes nothing but ``.yml`` and ``.yaml``)."""
    return directory / "secret.yml"


def secret_text(api_key: str) -> str:
    """Return a configuration file for SGLang that holds the API key; a JSON string is a YAML string."""
    return f"api-key: {json.dumps(api_key)}\n"


def environment_text(environment: Mapping[str, str]) -> str:
    """Return a server's variables as a file for the shell: ``set -a; . environment`` gives the same server by hand."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "# Written by Aerie (role sglang_server); changes are overwritten.\n" + "\n".join(lines) + "\n"


def launch_text(directory: Path, argv: tuple[str, ...]) -> str:
    """Return the program that both service managers run; it becomes the server, so that its process id is the server's."""
    place = shlex.quote(str(directory))
    words = " \\\n  ".join(_pairs(argv))
    return (
        "#!/bin/sh\n# Written by Aerie (role sglang_server); changes are overwritten.\n"
        f"cd {place} || exit 1\nset -a\n. {shlex.quote(str(directory / 'environment'))}\nset +a\nexec {words}\n"
    )


def _pairs(argv: tuple[str, ...]) -> Iterator[str]:
    """Yield the program, then each flag with its values: one line of the launch file each."""
    group: list[str] = []
    for word in argv:
        if word.startswith("--") and group:
            yield " ".join(shlex.quote(item) for item in group)
            group = []
        group.append(word)
    yield " ".join(shlex.quote(item) for item in group)


def current_release(paths: HostPaths) -> dict[str, Any] | None:
    """Return release.json of the release that ``current`` means, with its ``path``; None where there is none yet."""
    directory = paths.current.resolve()
    try:
        release = release_file.read(directory)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise AerieError(f"{directory / 'release.json'}: {error}: make the release again (install playbook)") from error
    return {**release, "path": str(directory)}


def recorded(paths: HostPaths, name: str) -> dict[str, Any]:
    """Return what instance.json says about the last start of ``name``; empty where there was none."""
    try:
        value: dict[str, Any] = read_json(paths.instance(name) / "instance.json")
        return value
    except (OSError, ValueError):
        return {}


def driver_version(proc: Path = Path("/proc")) -> str:
    """Return the NVIDIA driver's version, or ``none``."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return "none"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def plan(host: Host, request: Request) -> Plan:
    """Check ``request`` against the host's current release and models; raise one error with everything that is wrong."""
    problems = list(_shape_problems(request))
    raise_all(problems, f"instance {request.name}")
    release = current_release(host.paths)
    if release is None:
        raise AerieError(
            f"instance {request.name}: there is no release at {host.paths.current} yet: run the install and patch playbooks first"
        )
    directory = Path(release["path"])
    parser = server_flags.Parser.load(directory / "server_arguments.json", str(release["sglang_version"]))
    inactive = patch_checks.problems(host.paths, release, request.patch_sets)
    problems += [] if request.rehearsal else inactive
    warnings: list[str] = [f"instance {request.name} could not start as things are now: {one}" for one in inactive if request.rehearsal]

    speculation = request.arm.get("speculation") or None
    arm_name = str(request.arm.get("name") or request.instance.get("arm"))
    dynamic = request.arm.get("dynamic") or None
    problems += [f"arm {arm_name}: {problem}" for problem in server_flags.speculation_problems(speculation)]
    if dynamic and not parser.find(server_flags.DYNAMIC_FLAG):
        problems += [f"arm {arm_name}: {problem}" for problem in launch_checks.dynamic_release_problems(release)]
        dynamic = None
    adaptive = _adaptive(request)
    if adaptive:
        found = launch_checks.adaptive_release_problems(parser)
        problems += [f"arm {arm_name}: {problem}" for problem in found]
    target = _model(request, str(request.instance["model"]), f"instance {request.name}", problems)
    draft_name = (speculation or {}).get("draft_model")
    draft = _model(request, str(draft_name), f"arm {arm_name}: speculation", problems) if draft_name else None
    if target and target["config"] is not None:
        problems += launch_checks.target_problems(str(request.instance["model"]), target["config"])
    known = [model["config"] is not None for model in (target, draft) if model]
    if target and all(known) and speculation and speculation.get("algorithm") and (draft or not draft_name):
        algorithm = str(speculation["algorithm"]).upper()
        found = launch_checks.draft_problems(
            algorithm, str(request.instance["model"]), target["config"], draft_name, draft["config"] if draft else None
        )
        problems += [f"arm {arm_name}: {problem}" for problem in found]

    listen = str(request.instance.get("host") or "127.0.0.1")
    port = int(request.instance["port"])
    problems += launch_checks.exposure_problems(request.name, listen, request.api_key)
    gpus = request.instance.get("gpus")
    base: dict[str, Any] = {
        "model-path": target["path"] if target else "",
        "served-model-name": str(request.instance["model"]),
        "host": listen,
        "port": port,
        "enable-metrics": True,
    }
    if request.api_key and parser.find("config"):
        base = {"config": str(secret_path(host.paths.instance(request.name)))} | base
    elif request.api_key:
        base["api-key"] = request.api_key
        warnings.append(
            f"SGLang {parser.version} takes its API key only as an argument, so that users of this host see it in the list of processes"
        )
    if not target:
        del base["model-path"]
    # From general to special. What GPUs need follows from all that is asked for, and comes beneath what people set.
    given = [
        server_flags.Layer("Aerie", base, owner=True),
        server_flags.Layer(f"profile {request.profile.get('name', '')}", request.profile.get("flags") or {}, owner=True),
    ]
    common = [server_flags.Layer("sglang_server_flags", request.flags), server_flags.Layer("this launch", request.launch_flags)]
    initial = server_flags.initial_speculation(speculation or {}, adaptive)
    own = [
        server_flags.Layer(f"arm {arm_name}", server_flags.speculation_flags(initial, draft["path"] if draft else None), owner=True),
        server_flags.Layer(f"arm {arm_name}: dynamic", server_flags.dynamic_flags(dynamic), owner=True),
        *_adaptive_layers(host.paths, request, parser, adaptive),
        server_flags.Layer(f"arm {arm_name}", request.arm.get("flags") or {}),
        server_flags.Layer(f"instance {request.name}", request.instance.get("flags") or {}),
    ]
    chosen = _gpu_settings(request, release, parser, [*given, *common, *own], target, draft, warnings)
    needed = server_flags.Layer("GPU settings", chosen.flags, owner=True)
    options = server_flags.Layer(f"arm {arm_name}: options", chosen.option_flags, owner=True)
    layers = [*given, needed, *common, options, *own]
    line = server_flags.command_line(parser, layers, server_flags.owned_flags(speculation))
    problems += line.problems
    warnings += line.warnings
    problems += [f"arm {arm_name}: {problem}" for problem in chosen.problems]
    problems += chosen.refusals(parser, line.values, line.origins)
    problems += launch_checks.gpu_problems(request.name, gpus, line.values)
    if not _hides_gpus(request.profile):
        used = launch_checks.gpus_used(gpus, line.values)
        problems += launch_checks.shared_gpu_problems(request.name, used, _running_gpus(host.paths, request.name))
    environment = _environment(host, request, release, arm_name, problems, chosen)
    wanted = (release.get("patch_sets") or ()) if request.patch_sets is None else request.patch_sets
    found = launch_checks.patch_switch_problems(environment, {str(one["name"]) for one in wanted}, str(release["id"]))
    problems += [f"arm {arm_name}: {problem}" for problem in found]
    warnings += [*chosen.warnings, *chosen.contradictions(parser, line.values, environment, line.origins)]
    # In check mode the patch step, which comes before, has not run yet: what it would bring is there.
    requested = {str(patch_set["name"]) for patch_set in wanted}
    recommendations = [one for one in chosen.recommendations if one.patch_set not in requested]
    warnings += [f"arm {arm_name}: {recommendation}" for recommendation in recommendations]
    patch_modes = launch_checks.patch_modes(environment, wanted)
    warnings += [
        f"arm {arm_name}: patch set {name} runs in check mode, a test: the server does that work twice, and its speeds are no results"
        for name in launch_checks.patch_sets_in_check(patch_modes)
    ]
    if speculation and draft and draft["config"] is not None:
        facts = gpu_settings.read_model(Path(draft["path"]), draft["config"])
        pair = f"arm {arm_name}: draft {draft_name}"
        problems += launch_checks.draft_backend_problems(pair, line.values, facts.attention)
        problems += launch_checks.draft_quantization_problems(pair, line.values, facts.quantization)
    found = launch_checks.dynamic_problems(
        line.values,
        draft["config"] if draft else None,
        environment,
        adaptive,
        host.paths.instance(request.name),
    )
    problems += [f"arm {arm_name}: {problem}" for problem in found]
    # With dynamic, the same flags were refused above.
    if adaptive and not dynamic:
        found = launch_checks.adaptive_problems(line.values)
        problems += [f"arm {arm_name}: {problem}" for problem in found]
    if speculation:
        warnings += launch_checks.nextn_memory_warnings(
            Version.parse(parser.version), str(speculation.get("algorithm") or "").upper(), environment
        )
        # Every number of steps has CUDA graphs of its own; the largest one's hold the most tokens.
        depths = [steps for slot in adaptive.values() for steps in slot["candidate_steps"]]
        draft_tokens = max(depths) + 1 if depths else speculation.get("draft_tokens")
        warnings += launch_checks.graph_batch_warnings(line.values, draft_tokens)
    models = {
        name: {"path": model["path"], "identity": model.get("identity")} for name, model in (("target", target), ("draft", draft)) if model
    }
    problems += _calibration_problems(request, release, models, line.values)
    problems += launch_checks.port_problems(request.name, str(host.paths.root), listen, port, lambda: _pids(host.paths, request.name))
    raise_all(problems, f"instance {request.name} can't start on this host (nothing was touched)")

    argv = (str(directory / "bin/python"), "-m", "sglang.launch_server", *line.arguments)
    key_hash = hashlib.sha256(request.api_key.encode()).hexdigest() if request.api_key else None
    return Plan(
        host=host,
        name=request.name,
        argv=argv,
        environment=environment,
        endpoint=Endpoint(listen, port, request.api_key),
        arm={**request.arm, "name": arm_name},
        release=release,
        models=models,
        gpus=tuple(gpus) if gpus is not None else None,
        definition=canonical_hash(
            {"argv": argv, "environment": environment, "release": _sources(release), "models": models, "api_key": key_hash}
            | ({"calibration": request.calibration} if request.is_calibrated else {})
            | ({"adaptive": adaptive} if adaptive else {})
        ),
        warnings=tuple(warnings),
        gpu_settings=tuple(chosen.applied(parser, line.values, environment)),
        recommendations=tuple(recommendation.as_dict() for recommendation in recommendations),
        patch_modes=patch_modes,
        calibration=request.calibration if request.is_calibrated else None,
        adaptive=adaptive,
    )


def _adaptive(request: Request) -> dict[str, dict[str, list[int]]]:
    """Return the slots of adaptive speculation: the calibration's, or one with all candidates."""
    candidates = server_flags.candidate_steps(request.arm.get("speculation"))
    table = calibration.steps_by_batch(request.calibration) if request.is_calibrated else {}
    return server_flags.adaptive_config(candidates, table)


def _adaptive_layers(
    paths: HostPaths,
    request: Request,
    parser: server_flags.Parser,
    adaptive: Mapping[str, Any],
) -> list[server_flags.Layer]:
    """Return the flags of adaptive speculation, for a release that has them."""
    if not adaptive or not parser.find(server_flags.ADAPTIVE_CONFIG_FLAG):
        return []
    flags = server_flags.adaptive_flags(str(adaptive_path(paths.instance(request.name))))
    arm_name = request.arm.get("name") or request.instance.get("arm")
    return [server_flags.Layer(f"arm {arm_name}: candidate_steps", flags, owner=True)]


def _calibration_problems(
    request: Request, release: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Any]
) -> list[str]:
    """Return why the calibration can't be used for what would be started."""
    if not request.is_calibrated:
        return []
    speculation = request.arm.get("speculation") or {}
    names = {"target": request.instance["model"], "draft": speculation.get("draft_model")}
    most = flags.get("max_running_requests")
    there = calibration.Situation(
        arm=str(request.arm.get("name") or request.instance.get("arm")),
        speculation=speculation,
        release=str(release["id"]),
        models={role: {"name": names[role], "identity": model["identity"]} for role, model in models.items()},
        host_fingerprint=request.host_fingerprint,
        most=most if isinstance(most, int) else None,
    )
    return calibration.problems(request.calibration, there)


def _sources(release: Mapping[str, Any]) -> Any:
    """Return what says which sources a release has: its id, and of an adopted tree, which is patched in place, its patch sets too."""
    return [release["id"], release.get("patch_sets")] if release.get("adopted") == "tree" else release["id"]


def _gpu_settings(
    request: Request,
    release: Mapping[str, Any],
    parser: server_flags.Parser,
    layers: list[server_flags.Layer],
    target: Mapping[str, Any] | None,
    draft: Mapping[str, Any] | None,
    warnings: list[str],
) -> gpu_settings.Choice:
    """Return what the GPUs need with the flags and variables that were set, and the arm's options."""
    table = gpu_settings.Table.of(request.gpu_table or {})
    found = gpu_settings.capabilities(request.host_gpus, request.instance.get("gpus"))
    if table.rules and not found:
        warnings.append(
            f"instance {request.name}: nobody knows the compute capability of its GPUs (does nvidia-smi answer?), so that no settings for "
            f"{listing(sorted(table.capabilities))} were looked at"
        )
    environment: dict[str, str] = {}
    for variables in _set_variables(request):
        environment |= {name: str(value) for name, value in variables.items() if value is not None}
    there = gpu_settings.Situation(
        version=Version.parse(parser.version),
        capabilities=found,
        target=gpu_settings.read_model(Path(target["path"]), target["config"] or {}) if target else None,
        draft=gpu_settings.read_model(Path(draft["path"]), draft["config"] or {}) if draft else None,
        speculation=bool(request.arm.get("speculation")),
        flags=server_flags.command_line(parser, layers).values,
        environment=environment,
        patch_sets=frozenset(str(one["name"]) for one in release.get("patch_sets") or ()),
    )
    return gpu_settings.choose(table, there, parser, request.arm.get("options") or ())


def _set_variables(request: Request) -> list[Mapping[str, Any]]:
    places = (request.profile, {"environment": request.environment}, request.arm, request.instance)
    return [place.get("environment") or {} for place in places]


def _hides_gpus(profile: Mapping[str, Any]) -> bool:
    return (profile.get("environment") or {}).get("CUDA_VISIBLE_DEVICES") == ""


def _running_gpus(paths: HostPaths, name: str) -> dict[str, list[int]]:
    """Return by name the GPUs of the instances that run on this host now, without ``name`` itself."""
    directories = sorted(paths.instances.iterdir()) if paths.instances.is_dir() else []
    gpus = {}
    for other in (directory.name for directory in directories if directory.name != name):
        record = recorded(paths, other)
        if record.get("argv") and not _hides_gpus(record) and server_processes.of_instance(paths, other):
            flags = launch_checks.parallel_flags(launch_checks.flags_of_argv(record["argv"]))
            gpus[other] = launch_checks.gpus_used(record.get("gpus"), flags)
    return gpus


def _pids(paths: HostPaths, name: str) -> list[int]:
    return [process.pid for process in server_processes.of_instance(paths, name)]


def _shape_problems(request: Request) -> Iterator[str]:
    if not NAME.fullmatch(request.name):
        yield f"{request.name!r} is no name for an instance: use letters, digits, - and _"
    for key in request.instance:
        if key not in INSTANCE_KEYS:
            yield f"{key}: no such setting of an instance{near(key, INSTANCE_KEYS)}"
    for key in request.arm:
        if key not in ARM_KEYS:
            yield f"arm {request.arm.get('name', request.instance.get('arm'))}: {key}: no such setting of an arm{near(key, ARM_KEYS)}"
    for key in ("model", "port"):
        if request.instance.get(key) in (None, ""):
            yield f"{key} is missing"
    port = str(request.instance.get("port") or 1)
    if not port.isdigit() or not 0 < int(port) < 65536:
        yield f"port: {port!r} is not a port (1 to 65535)"
    gpus = request.instance.get("gpus")
    if gpus is not None and not (
        isinstance(gpus, list) and gpus and all(isinstance(gpu, int) and not isinstance(gpu, bool) and gpu >= 0 for gpu in gpus)
    ):
        yield f"gpus: needs a list of GPU numbers such as [0, 1], or null, got {gpus!r}"
    for owner, holder in ((f"instance {request.name}", request.instance), (f"arm {request.arm.get('name')}", request.arm)):
        for key in ("flags", "environment"):
            if not isinstance(holder.get(key) or {}, Mapping):
                yield f"{owner}: {key}: needs a dictionary, got {holder[key]!r}"
    for problem in server_flags.dynamic_problems(request.arm.get("dynamic"), request.arm.get("speculation")):
        yield f"arm {request.arm.get('name', request.instance.get('arm'))}: {problem}"
    options = request.arm.get("options") or []
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        yield f"arm {request.arm.get('name')}: options: needs a list of names, got {options!r}"


def _model(request: Request, name: str, where: str, problems: list[str]) -> dict[str, Any] | None:
    model = request.models.get(name)
    if model is None:
        problems.append(
            f"{where}: no model {name!r} in sglang_models_catalog{near(name, request.models)}; it has {listing(request.models)}"
        )
        return None
    path = Path(str(model["path"]))
    config = model.get("config")
    if request.rehearsal and not path.exists():
        return {**model, "path": str(path), "config": config}
    if config is None:
        try:
            config = read_json(path / "config.json")
        except (OSError, ValueError) as error:
            problems.append(
                f"{where}: model {name}: {path / 'config.json'}: {getattr(error, 'strerror', None) or error}: run the models playbook first"
            )
            return None
    if not path.is_dir():
        problems.append(f"{where}: model {name}: {path} is no directory: run the models playbook first")
        return None
    return {**model, "path": str(path), "config": config}


def _environment(
    host: Host,
    request: Request,
    release: Mapping[str, Any],
    arm_name: str,
    problems: list[str],
    chosen: gpu_settings.Choice,
) -> dict[str, str]:
    """Return the server's variables; what is wrong with them is added to ``problems``."""
    paths = host.paths
    directory = paths.instance(request.name)
    cache = paths.caches / f"{release['id']}-{request.driver or driver_version()}"
    profile = request.profile.get("environment") or {}
    hides_gpus = _hides_gpus(request.profile)
    gpus = request.instance.get("gpus")
    base = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "SGLANG_CACHE_DIR": str(cache / "sglang"),
        "SGLANG_DG_CACHE_DIR": str(cache / "deep_gemm"),
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    # SGLang leaves temporary files behind, sockets among them, whose paths have a limit of 107 bytes.
    if len(os.fsencode(directory / "tmp")) <= LONGEST_TEMPORARY:
        base["TMPDIR"] = str(directory / "tmp")
    if host.cuda_toolkit.is_dir() and not hides_gpus:
        base["CUDA_HOME"] = str(host.cuda_toolkit)
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("Aerie", base),
        (f"profile {request.profile.get('name', '')}", profile),
        ("GPU settings", chosen.environment),
        (str(nccl.path(paths.root)), _nccl(paths, problems)),
        ("sglang_server_environment", request.environment),
        (f"arm {arm_name}: options", chosen.option_environment),
        (f"arm {arm_name}: dynamic", server_flags.dynamic_environment(request.arm.get("dynamic"))),
        (f"arm {arm_name}", request.arm.get("environment") or {}),
        (f"instance {request.name}", request.instance.get("environment") or {}),
    ]
    environment: dict[str, str] = {}
    for origin, variables in layers:
        for name, value in variables.items():
            if not VARIABLE.fullmatch(str(name)):
                problems.append(f"{origin}: environment: {name!r} is no name for a variable")
            elif name in OWN_VARIABLES:
                problems.append(f"{origin}: environment: {name} is Aerie's own: leave it out")
            elif isinstance(value, bool | list | dict):
                problems.append(
                    f"{origin}: environment: {name}: needs text or a number, got {value!r}: write '1' or 'true', whichever its reader wants"
                )
            elif isinstance(value, str) and "\0" in value:
                problems.append(f"{origin}: environment: {name}: holds a NUL byte")
            elif value is None:
                environment.pop(name, None)
            else:
                environment[name] = str(value)
    if gpus is not None and hides_gpus:
        problems.append(f"instance {request.name}: profile {request.profile.get('name')} serves without GPUs: leave gpus out")
    elif gpus is not None:
        # The numbers of nvidia-smi are in the order of the PCI bus; CUDA's own order is another.
        environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}
    if "PATH" not in environment:
        environment_bin = Path(release["environment"]["path"]) / "bin" if release.get("environment", {}).get("path") else None
        cuda_bin = f"{environment['CUDA_HOME']}/bin" if environment.get("CUDA_HOME") else None
        environment["PATH"] = ":".join(
            str(part) for part in (Path(release["path"]) / "bin", environment_bin, cuda_bin, SYSTEM_PATH) if part
        )
    own = {"AERIE_INSTANCE": request.name, "AERIE_ROOT": str(paths.root), "AERIE_PROFILE_DIR": str(directory / "profile")}
    own |= {CALIBRATION_VARIABLE: str(calibration_path(directory))} if request.is_calibrated else {}
    return environment | own


def _nccl(paths: HostPaths, problems: list[str]) -> dict[str, str]:
    try:
        return nccl.read(paths.root)
    except AerieError as error:
        problems.append(str(error))
        return {}
