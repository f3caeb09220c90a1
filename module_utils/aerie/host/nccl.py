"""NCCL's environment on a host: chosen by topology, checked against what is known to break it, kept in one file that servers read.

The tables are nccl/profiles.yml, format docs/reference/nccl.md. The controller reads its YAML; the plain values travel to the host.
Standard library only: this runs on hosts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.words import listing, near

FILE = "nccl.env"
HEAD = "# Written by Aerie (role nccl): read by every server's start; changes are overwritten.\n"
AUTO = "auto"
ANY, ALL_PLACES = "any", ("environment", "files")
ERROR, WARNING = "error", "warning"
NVLINK = "NV"
DISTANCE = (NVLINK, "PIX", "PXB", "PHB", "NODE", "SYS")
"""nvidia-smi's words for what lies between two GPUs, nearest first; NV is followed by the number of links."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GPU_ELEMENT = re.compile(r"<gpu\b[^>]*\bdev=\"(\d+)\"")
PROFILE_KEYS = ("summary", "links", "environment", "why", "source")
RULE_KEYS = ("id", "severity", "is", "all", "not_words", "above", "file", "where", "why", "cure", "source")


@dataclass(frozen=True)
class Profile:
    """An environment for hosts whose farthest pair of GPUs has one of ``links`` between them; ``links`` is empty for a single GPU."""

    name: str
    summary: str
    links: tuple[str, ...]
    environment: Mapping[str, str]
    why: str


@dataclass(frozen=True)
class Rule:
    """What is known to break NCCL, or to do nothing."""

    id: str
    severity: str
    why: str
    cure: str
    test: Mapping[str, Any]
    where: tuple[str, ...] = ALL_PLACES


@dataclass(frozen=True)
class Table:
    """The profiles and rules of nccl/profiles.yml."""

    profiles: Mapping[str, Profile]
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, value: Any, where: str = "nccl/profiles.yml") -> Table:
        """Return the table that the values of its file mean; raise one error with everything that is wrong."""
        if not isinstance(value, Mapping):
            raise AerieError(f"{where}: must be a mapping with profiles and known_bad")
        problems: list[str] = []
        profiles = {}
        for name, one in (value.get("profiles") or {}).items():
            problems += [f"profile {name}: {key}: no such key{near(str(key), PROFILE_KEYS)}" for key in one if key not in PROFILE_KEYS]
            links = tuple(map(str, one.get("links") or ()))
            problems += [f"profile {name}: links: {link!r} is none of {listing(DISTANCE)}" for link in links if link not in DISTANCE]
            environment = {str(key): str(wanted) for key, wanted in (one.get("environment") or {}).items()}
            profiles[str(name)] = Profile(str(name), str(one.get("summary", "")), links, environment, str(one.get("why", "")))
        rules = []
        for number, one in enumerate(value.get("known_bad") or (), 1):
            name = str(one.get("id") or f"rule {number}")
            problems += [f"{name}: {key}: no such key{near(str(key), RULE_KEYS)}" for key in one if key not in RULE_KEYS]
            problems += [f"{name}: {key} is missing" for key in ("id", "severity", "why", "cure", "source") if not one.get(key)]
            test = {key: one[key] for key in ("is", "all", "not_words", "above", "file") if key in one}
            if not set(test) - {"all"}:
                problems.append(f"{name}: says nowhere when it holds: one of is, not_words, above or file is missing")
            rules.append(
                Rule(
                    name,
                    str(one.get("severity")),
                    str(one.get("why")),
                    str(one.get("cure")),
                    test,
                    tuple(one.get("where") or ALL_PLACES),
                )
            )
        raise_all(problems, where)
        return cls(profiles, tuple(rules))


@dataclass(frozen=True)
class Choice:
    """A profile and why it was taken."""

    profile: Profile | None
    why: str


@dataclass(frozen=True)
class Findings:
    """What is wrong with an environment: what forbids it, and what a person should know."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def path(root: Path) -> Path:
    """Return the file that the servers below ``root`` read."""
    return root / FILE


def text(environment: Mapping[str, str]) -> str:
    """Return the content of the file: one KEY=VALUE a line, quoted as a shell reads it, in order of name."""
    return HEAD + "".join(f"{name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))


def read(root: Path) -> dict[str, str]:
    """Return the environment that the file below ``root`` holds, empty where there is none; raise AerieError where it can't be read."""
    file = path(root)
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise AerieError(f"{file}: {getattr(error, 'strerror', None) or error}: make it again with the role nccl") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = line.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:
            words = ["", ""]
        if not sign or not VARIABLE.fullmatch(name.strip()) or len(words) > 1:
            raise AerieError(f"{file}:{number}: {line!r} is not KEY=VALUE: make the file again with the role nccl, or remove it")
        found[name.strip()] = words[0] if words else ""
    return found


def configuration(file: Path) -> dict[str, str]:
    """Return the settings of one of NCCL's own configuration files, empty where it can't be read."""
    try:
        lines = file.expanduser().read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return {}
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, sign, value in pairs if sign and name.strip()}


def kind(link: str) -> str:
    """Return ``link`` without the number that follows NV."""
    return NVLINK if re.fullmatch(r"NV\d+", link) else link


def choose(table: Table, name: str | None, topology: Mapping[str, Any] | None, gpus: int) -> Choice:
    """Return the profile called ``name``; ``auto`` takes the one for the farthest pair of GPUs, None takes none."""
    if name is None:
        return Choice(None, "nccl_profile is null, so no profile is applied")
    if name != AUTO:
        if name not in table.profiles:
            raise AerieError(
                f"nccl_profile is {name!r}: there are {listing(sorted(table.profiles))}, and {AUTO}{near(name, table.profiles)}"
            )
        return Choice(table.profiles[name], f"nccl_profile names {name}")
    if gpus < 2:
        single = next((profile for profile in table.profiles.values() if not profile.links), None)
        return Choice(single, f"the host has {'one GPU' if gpus else 'no GPU'}, so that NCCL has nothing to carry")
    links = {str(pair): kind(str(link)) for pair, link in ((topology or {}).get("links") or {}).items()}
    known = {pair: link for pair, link in links.items() if link in DISTANCE}
    if not known:
        reason = (topology or {}).get("reason") or "nvidia-smi topo -m told no links between GPUs"
        raise AerieError(
            f"nccl_profile is auto, and nobody knows what lies between the {gpus} GPUs ({reason}): "
            f"name one of {listing(sorted(table.profiles), last='or')} in nccl_profile, or null for none"
        )
    pair, farthest = max(known.items(), key=lambda item: DISTANCE.index(item[1]))
    chosen = next((profile for profile in table.profiles.values() if farthest in profile.links), None)
    if chosen is None:
        raise AerieError(f"no profile is for {farthest}, which lies between GPUs {pair}: name one in nccl_profile, or null for none")
    counts = {link: sum(one == link for one in known.values()) for link in DISTANCE}
    seen = listing(f"{count} of {link}" for link, count in counts.items() if count)
    return Choice(chosen, f"{chosen.name}: the farthest pair of GPUs ({pair}) has {farthest} between it; pairs: {seen}")


def merge(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of all ``layers``, later ones over earlier ones, and where each came from; null takes one away."""
    problems: list[str] = []
    environment: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, variables in layers:
        for name, value in variables.items():
            if not VARIABLE.fullmatch(str(name)):
                problems.append(f"{origin}: {name!r} is no name for a variable")
            elif isinstance(value, bool | list | dict | tuple):
                problems.append(f"{origin}: {name} is {value!r}: write the text that NCCL reads, in quotes, such as '1'")
            elif value is None:
                environment.pop(name, None)
            elif re.search(r"[\0\r\n]", str(value)):
                problems.append(f"{origin}: {name} has more than one line, which a file of KEY=VALUE can't hold")
            else:
                environment[str(name)], origins[str(name)] = str(value), origin
    raise_all(problems, "NCCL's environment (nothing was touched)")
    return environment, origins


def examine(
    table: Table,
    environment: Mapping[str, str],
    files: Mapping[str, Mapping[str, str]],
    gpus: int,
    origins: Mapping[str, str] | None = None,
) -> Findings:
    """Return what the rules say about ``environment`` and about NCCL's own configuration ``files`` (by path)."""
    found = Findings()
    places: list[tuple[str, str, Mapping[str, str]]] = [("environment", "", environment)]
    # A variable of the environment wins over the file's.
    places += [
        ("files", name, {key: value for key, value in settings.items() if key not in environment}) for name, settings in files.items()
    ]
    for kind_of_place, name, settings in places:
        for rule in table.rules:
            if kind_of_place not in rule.where:
                continue
            for what, variable in _hits(rule, settings, gpus):
                where = name or (origins or {}).get(variable, "environment")
                told = f"{where}: {what}: {rule.why} ({rule.id}): {rule.cure}"
                (found.errors if rule.severity == ERROR else found.warnings).append(told)
        if name and settings:
            found.warnings.append(
                f"{name} sets {listing(sorted(settings))}, which NCCL reads beside nccl.env: "
                "say in nccl_environment what is wanted, or empty the file"
            )
    return found


def _hits(rule: Rule, settings: Mapping[str, str], gpus: int) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and the variable that it is about."""
    test = rule.test
    wanted = test.get("is") or {}
    matching = [name for name, values in wanted.items() if name in settings and (values == ANY or settings[name] in map(str, values))]
    if test.get("all"):
        matching = matching[:1] if len(matching) == len(wanted) else []
    for name in matching:
        yield f"{name}={settings[name]!r}", name
    for name, words in (test.get("not_words") or {}).items():
        value = settings.get(name, "")
        # Newer NCCL also takes `allreduce:ring;broadcast:tree`, whose words are its own to judge.
        if value and ":" not in value:
            known = {str(word).lower() for word in words}
            unknown = [word for word in value.removeprefix("^").split(",") if word.strip().lower() not in known]
            if unknown:
                yield f"{name}={value!r} has {listing(map(repr, unknown))}", name
    if test.get("above"):
        first, second = (settings.get(name, "") for name in test["above"])
        if first.isdigit() and second.isdigit() and int(first) > int(second):
            yield f"{test['above'][0]}={first} above {test['above'][1]}={second}", test["above"][0]
    for name, what in (test.get("file") or {}).items():
        if not settings.get(name):
            continue
        file = Path(settings[name])
        if what == "missing" and not file.is_file():
            yield f"{name}={settings[name]!r}: there is no such file", name
        elif what == "gpus" and gpus and (count := graph_gpus(file)) not in (None, gpus):
            yield f"{name}={settings[name]!r} is for {count} GPUs, and this host has {gpus}", name


def graph_gpus(file: Path) -> int | None:
    """Return the number of different GPUs that a graph file of NCCL's names, None where it can't be read or names none."""
    try:
        found = set(GPU_ELEMENT.findall(file.read_text(errors="replace")))
    except OSError:
        return None
    return len(found) or None


def tuned_environment(tuned: Mapping[str, Any], objective: str, gpus: int, where: str = "nccl_tuned") -> dict[str, str | None]:
    """Return what a search changed for ``objective`` (null takes a variable away); raise AerieError where it was found with more GPUs."""
    if not tuned:
        return {}
    ranks = tuned.get("ranks")
    if objective not in tuned:
        raise AerieError(f"{where} has nothing for {objective}: run playbooks/tune_nccl.yml again, or change nccl_tuned_for")
    if ranks is not None and gpus and int(ranks) > gpus:
        raise AerieError(
            f"{where} was found with {ranks} GPUs, and this host has {gpus}: run playbooks/tune_nccl.yml on it, or leave it out"
        )
    if gpus and tuned.get("backend") not in (None, "nccl"):
        raise AerieError(
            f"{where} was found with {tuned['backend']}, which says nothing about NCCL: run playbooks/tune_nccl.yml on a GPU host"
        )
    changes = (tuned[objective] or {}).get("environment") or {}
    return {str(name): None if value is None else str(value) for name, value in changes.items()}
