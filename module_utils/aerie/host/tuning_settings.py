"""What a host is to be tuned with: the settings, strictly validated, and the profiles that they come from.

Standard library only: this runs on hosts. Nothing here reads or writes anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible.module_utils.aerie.errors import raise_all
from ansible.module_utils.aerie.words import listing, near

KEYS = ("kernel_command_line", "modprobe", "acs", "cpu_governor", "sysctl", "limits", "power_limit_w", "persistence")
PROFILE_KEYS = ("summary", "settings", "why", "sources", "when", "conflicts", "measure")
CONDITIONS = ("cpu_vendors", "sockets", "logical_cpus_max", "gpus_min", "skus", "links")
LIMITS = ("memlock", "nofile")
GOVERNORS = ("conservative", "ondemand", "performance", "powersave", "schedutil", "userspace")

# The kernel takes these as often as they are given, and adds them up. Source: Documentation/admin-guide/kernel-parameters.txt
REPEATABLE = {"blacklist", "clearcpuid", "console", "earlycon", "hugepages", "hugepagesz", "memmap", "module_blacklist", "pci"}
IOMMU = ("iommu", "amd_iommu", "intel_iommu")
# Interrupts reach CPUs with an APIC id above 254 only through the IOMMU's interrupt remapping.
MOST_CPUS_WITHOUT_IOMMU = 255

# What nvidia-smi lets each kind of RTX PRO 6000 Blackwell be set to, in watts; the GPU's own figures are asked first.
POWER_RANGES = {"workstation": (150, 600), "server": (300, 600), "max-q": (250, 325)}

# Options of NVIDIA's modules have a prefix; one without it is a mistake that modprobe passes over with a warning.
OPTION_PREFIXES = {"nvidia": "NVreg_", "nvidia_uvm": "uvm_"}

# Printable, without blanks and what a shell, GRUB or kmod would read as more than itself
_PLAIN = r"[A-Za-z0-9_.,:;=/@%+\-]"
# In grub.cfg a semicolon would end the command.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(=[A-Za-z0-9_.,:=/@+\-]+)?")
_MODULE = re.compile(r"[a-z0-9_]+")
_OPTION = re.compile(r"[A-Za-z0-9_]+")
_VALUE = re.compile(rf"{_PLAIN}+")
_SYSCTL = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_\-]+)+")
_SYSCTL_VALUE = re.compile(r"[A-Za-z0-9_.,:/\-]+([ \t]+[A-Za-z0-9_.,:/\-]+)*")


@dataclass(frozen=True)
class Settings:
    """What is wanted of a host; what is empty or None is left as it is."""

    kernel_command_line: tuple[str, ...] = ()
    modprobe: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    acs: str | None = None
    cpu_governor: str | None = None
    sysctl: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    power_limit_w: int | None = None
    persistence: bool | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, key) for key in KEYS)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings in the shape in which they are given, without what is left alone."""
        shown = asdict(self) | {"kernel_command_line": list(self.kernel_command_line)}
        return {key: value for key, value in shown.items() if value}

    def of_the_kernel(self) -> list[str]:
        """Return the names of those that belong to whoever runs the kernel, and so not to a container."""
        return [key for key in KEYS if key != "limits" and getattr(self, key)]


def parse(value: Mapping[str, Any], where: str = "host_tuning_settings") -> tuple[Settings, list[str]]:
    """Return the settings that ``value`` means, and every problem with it."""
    problems = list(_unknown(value, KEYS, where))

    def mapping(key: str) -> Mapping[str, Any]:
        found = value.get(key)
        if found is None or isinstance(found, Mapping):
            return found or {}
        problems.append(f"{where}.{key} is {found!r}: it must be a mapping")
        return {}

    words = value.get("kernel_command_line") or []
    if not isinstance(words, (list, tuple)):
        problems.append(f"{where}.kernel_command_line is {words!r}: it must be a list of words, such as [iommu=pt]")
        words = []
    problems += _check_words([str(word) for word in words], f"{where}.kernel_command_line")
    modprobe: dict[str, dict[str, str]] = {}
    for name, options in mapping("modprobe").items():
        module = str(name).replace("-", "_")
        if not isinstance(options, Mapping):
            problems.append(f"{where}.modprobe.{name} is {options!r}: it must be a mapping of options to values")
            continue
        modprobe[module] = {str(option): _text(item) for option, item in options.items()}
        problems += _check_module(module, modprobe[module], f"{where}.modprobe")
    sysctl = {str(name).replace("/", "."): _text(item) for name, item in mapping("sysctl").items()}
    problems += _check_sysctl(sysctl, f"{where}.sysctl")
    limits = {str(name): _text(item) for name, item in mapping("limits").items()}
    problems += _check_limits(limits, f"{where}.limits")
    acs, governor, power, persistence = (value.get(key) for key in ("acs", "cpu_governor", "power_limit_w", "persistence"))
    if acs not in (None, "cleared"):
        problems.append(f"{where}.acs is {acs!r}: it must be cleared, or null to leave it as it is")
    if governor is not None and governor not in GOVERNORS:
        problems.append(f"{where}.cpu_governor is {governor!r}: it must be {listing(GOVERNORS, last='or')}{near(str(governor), GOVERNORS)}")
    if power is not None and (isinstance(power, bool) or not str(power).isdigit() or int(power) == 0):
        problems.append(f"{where}.power_limit_w is {power!r}: it must be a whole number of watts")
        power = None
    if persistence not in (None, True):
        problems.append(f"{where}.persistence is {persistence!r}: it must be true, or null to leave it as it is")
    settings = Settings(
        kernel_command_line=tuple(dict.fromkeys(str(word) for word in words)),
        modprobe={module: options for module, options in modprobe.items() if options},
        acs=acs,
        cpu_governor=governor,
        sysctl=sysctl,
        limits=limits,
        power_limit_w=None if power is None else int(power),
        persistence=persistence,
    )
    return settings, problems


def resolve(names: Iterable[str], table: Mapping[str, Any], own: Mapping[str, Any], info: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Return the settings of the profiles ``names`` with ``own`` over them, and what a person should know; raise where they can't be.

    ``table`` is the ``profiles`` of ``tuning/profiles.yml`` and ``info`` the host's survey, which the profiles' conditions ask.
    """
    merged, notes, problems = _resolve(names, table, own, info)
    raise_all(problems, "the host tuning that was asked for can't be, and nothing was touched")
    return merged, notes


def check(names: Iterable[str], table: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a choice of profiles and settings on any host."""
    return _resolve(names, table, own, None)[2]


def _resolve(
    names: Iterable[str], table: Mapping[str, Any], own: Mapping[str, Any], info: Mapping[str, Any] | None
) -> tuple[Settings, list[str], list[str]]:
    """Return settings, notes and problems; without a survey, only those that need none."""
    chosen = list(dict.fromkeys(names))
    problems: list[str] = []
    notes: list[str] = []
    merged = Settings()
    origin: dict[str, str] = {}
    for name in chosen:
        if name not in table:
            problems.append(f"host_tuning_profiles: there is no profile {name!r}{near(name, table)}")
            continue
        entry = table[name]
        settings, wrong = parse(entry["settings"], f"tuning/profiles.yml: {name}")
        problems += wrong
        problems += [
            f"profiles {name} and {other} can't be together: choose one"
            for other in entry.get("conflicts", [])
            if other in chosen and chosen.index(other) < chosen.index(name)
        ]
        if info is not None:
            problems += [f"profile {name} is not for this host: {reason}" for reason in unmet(entry.get("when", {}), info)]
        declared = {other for other in chosen if other in entry.get("conflicts", [])}
        for place, value in _places(settings):
            if place in origin and origin[place] != value and not declared:
                problems.append(f"profile {name} wants {place} {value}, another one that was chosen {origin[place]}: choose one")
            origin[place] = value
        merged = merge(merged, settings)
        if entry.get("measure") == "both":
            notes.append(f"profile {name} helped some hosts and harmed others: measure with it and without it, and keep what wins")
    mine, wrong = parse(without_nulls(own))
    problems += wrong
    merged = merge(merged, mine, own)
    problems += [f"kernel_command_line: {problem}" for problem in _contradictions(merged.kernel_command_line)]
    if info is not None:
        problems += _check_cpus(merged.kernel_command_line, info)
    return merged, notes, problems


def without_nulls(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``own`` without the nulls that take away what a profile sets, also those inside."""
    return {key: without_nulls(value) if isinstance(value, Mapping) else value for key, value in own.items() if value is not None}


def merge(below: Settings, above: Settings, own: Mapping[str, Any] | None = None) -> Settings:
    """Return ``above`` over ``below``; nulls of ``own``, from which ``above`` was made, take away what is below."""
    given = own or {}
    replaced = {parameter(word) for word in above.kernel_command_line} - REPEATABLE
    kept = () if _is_null(given, "kernel_command_line") else below.kernel_command_line

    def scalar(key: str) -> Any:
        return getattr(above, key) if key in given or getattr(above, key) is not None else getattr(below, key)

    def table(under: Mapping[str, str], over: Mapping[str, str], nulls: Any) -> dict[str, str]:
        return {name: item for name, item in under.items() if not _is_null(nulls, name)} | dict(over)

    modules = given.get("modprobe")
    modprobe = {
        module: table(
            {} if _is_null(given, "modprobe") or _is_null(modules, module) else below.modprobe.get(module, {}),
            above.modprobe.get(module, {}),
            modules.get(module) if isinstance(modules, Mapping) else None,
        )
        for module in dict.fromkeys((*below.modprobe, *above.modprobe))
    }
    return Settings(
        kernel_command_line=tuple(dict.fromkeys([*(word for word in kept if parameter(word) not in replaced), *above.kernel_command_line])),
        modprobe={module: options for module, options in modprobe.items() if options},
        acs=scalar("acs"),
        cpu_governor=scalar("cpu_governor"),
        sysctl=table({} if _is_null(given, "sysctl") else below.sysctl, above.sysctl, given.get("sysctl")),
        limits=table({} if _is_null(given, "limits") else below.limits, above.limits, given.get("limits")),
        power_limit_w=scalar("power_limit_w"),
        persistence=scalar("persistence"),
    )


def _is_null(given: Any, key: str) -> bool:
    return isinstance(given, Mapping) and key in given and given[key] is None


def unmet(conditions: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a host does not meet a profile's conditions."""
    cpu, gpus = info.get("cpu") or {}, info.get("gpus") or []
    vendor = cpu_vendor(cpu.get("model"))
    if (vendors := conditions.get("cpu_vendors")) and vendor not in vendors:
        yield f"it is for CPUs of {listing(vendors, last='or')}, and this is {cpu.get('model') or 'an unknown one'}"
    if (sockets := conditions.get("sockets")) and cpu.get("sockets") not in sockets:
        yield f"it is for {listing(sockets, last='or')} sockets, and there are {cpu.get('sockets')}"
    most = conditions.get("logical_cpus_max")
    if most is not None and (cpu.get("logical") or 0) > most:
        yield f"it is for at most {most} logical CPUs, and there are {cpu['logical']}: the IOMMU must stay on, choose iommu_passthrough"
    if info.get("driver_pending"):  # which GPUs there are is asked again by the verification, when they answer
        return
    fewest = conditions.get("gpus_min")
    if fewest is not None and len(gpus) < fewest:
        yield f"it is for {fewest} GPUs or more, and there are {len(gpus)}" + (f" ({info['gpu_reason']})" if info.get("gpu_reason") else "")
    if skus := conditions.get("skus"):
        others = sorted({str(gpu.get("sku") or gpu.get("name")) for gpu in gpus if gpu.get("sku") not in skus})
        if others or not gpus:
            yield f"it is for {listing(skus, last='or')} cards, and there are {listing(others)}"
    if links := conditions.get("links"):
        topology = info.get("topology") or {}
        found = topology.get("links") or {}
        other = {pair: link for pair, link in found.items() if link not in links}
        if not found:
            reason = topology.get("reason") or "nvidia-smi topo -m gave nothing"
            yield f"it depends on how the GPUs are connected, which can't be told here: {reason}"
        elif other:
            pair, link = next(iter(other.items()))
            yield f"it is for GPUs connected by {listing(links, last='or')}, and {pair} are by {link}"


def cpu_vendor(model: str | None) -> str | None:
    """Return ``amd`` or ``intel``, from the model's name."""
    return next((vendor for vendor in ("amd", "intel") if vendor in (model or "").lower()), None)


def parameter(word: str) -> str:
    """Return the name of a kernel parameter; to the kernel dashes and underscores are the same."""
    return word.partition("=")[0].replace("-", "_")


def iommu_is_off(word: str) -> bool:
    return parameter(word) in IOMMU and word.partition("=")[2] == "off"


def contradicts(word: str, wanted: Iterable[str]) -> str | None:
    """Return the wanted word that ``word``, set by somebody else, speaks against."""
    ours = list(wanted)
    if word in ours or parameter(word) in REPEATABLE:
        return None
    if same := next((other for other in ours if parameter(other) == parameter(word)), None):
        return same
    family = [other for other in ours if parameter(other) in IOMMU]
    if parameter(word) in IOMMU and family and iommu_is_off(word) not in {iommu_is_off(other) for other in family}:
        return family[0]
    return None


def _contradictions(words: tuple[str, ...]) -> Iterator[str]:
    first: dict[str, str] = {}
    for word in words:
        name = parameter(word)
        if name not in REPEATABLE and first.setdefault(name, word) != word:
            yield f"{first[name]} and {word} can't both be: choose one"


def _check_cpus(words: Iterable[str], info: Mapping[str, Any]) -> Iterator[str]:
    logical = (info.get("cpu") or {}).get("logical") or 0
    off = [word for word in words if iommu_is_off(word)]
    if off and logical > MOST_CPUS_WITHOUT_IOMMU:
        yield (
            f"kernel_command_line: {listing(off)} on a host of {logical} logical CPUs: beyond {MOST_CPUS_WITHOUT_IOMMU} of them interrupts "
            "need the IOMMU, and the host may not boot: use iommu=pt"
        )


def _check_words(words: Iterable[str], where: str) -> Iterator[str]:
    for word in words:
        if not _WORD.fullmatch(word):
            yield f"{where}: {word!r} is no word of a kernel command line: write name or name=value, without blanks and quotes"


def _check_module(module: str, options: Mapping[str, str], where: str) -> Iterator[str]:
    if not _MODULE.fullmatch(module):
        yield f"{where}: {module!r} is no name of a kernel module"
    prefix = OPTION_PREFIXES.get(module, "")
    for option, value in options.items():
        if not _OPTION.fullmatch(option):
            yield f"{where}.{module}: {option!r} is no name of a module's option"
        elif not option.startswith(prefix):
            yield f"{where}.{module}: options of {module} begin with {prefix}, and {option!r} does not; did you mean {prefix}{option}?"
        if not _VALUE.fullmatch(value):
            yield f"{where}.{module}.{option} is {value!r}: a value has no blanks, quotes, backslashes and number signs"


def _check_sysctl(values: Mapping[str, str], where: str) -> Iterator[str]:
    for name, value in values.items():
        if not _SYSCTL.fullmatch(name):
            yield f"{where}: {name!r} is no name of a kernel variable, such as vm.swappiness"
        if not _SYSCTL_VALUE.fullmatch(value):
            yield f"{where}.{name} is {value!r}: it must be one line of numbers or words"


def _check_limits(values: Mapping[str, str], where: str) -> Iterator[str]:
    for name, value in values.items():
        if name not in LIMITS:
            yield f"{where}: {name!r} is not managed here: {listing(LIMITS, last='or')}{near(name, LIMITS)}"
        elif value != "unlimited" and not value.isdigit():
            unit = "KiB, as in limits.conf" if name == "memlock" else "of files"
            yield f"{where}.{name} is {value!r}: it must be unlimited or a number ({unit})"
        elif name == "nofile" and value == "unlimited":
            yield f"{where}.nofile is unlimited: the kernel takes a number up to fs.nr_open, such as 1048576; else nobody can log in"


def _places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each single setting with its value, to find two that differ."""
    for word in settings.kernel_command_line:
        if parameter(word) not in REPEATABLE:
            yield f"kernel_command_line {parameter(word)}", word
    for module, options in settings.modprobe.items():
        for option, value in options.items():
            yield f"modprobe {module} {option}", value
    for key in ("sysctl", "limits"):
        for name, value in getattr(settings, key).items():
            yield f"{key} {name}", value
    for key in ("acs", "cpu_governor", "power_limit_w", "persistence"):
        if getattr(settings, key) is not None:
            yield key, str(getattr(settings, key))


def _unknown(value: Mapping[str, Any], known: Iterable[str], where: str) -> Iterator[str]:
    for key in value:
        if key not in known:
            yield f"{where}: unknown key {key!r}{near(str(key), known)}"


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
