"""What a good host is, as variables that make another one like it. Pure; standard library only.

:func:`read_sources` reads on the host what no survey tells: where its NVIDIA packages come from. :func:`sections` says, from the survey and
that, which variables would bring another host to the same state, each with the evidence that it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import apt_key
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases.model_catalog import KEYS as CATALOG_KEYS
from ansible.module_utils.aerie.releases.model_catalog import destination

# A package whose version decides for the whole driver or toolkit, the first pattern that is installed wins. On Ubuntu nvidia-open needs
# nvidia-open-580: another host becomes the same by the first only.
DRIVER_PACKAGES = (
    r"nvidia-open",
    r"nvidia-open-\d+",
    r"nvidia-driver-\d+(-server)?-open",
    r"cuda-drivers",
    r"cuda-drivers-\d+",
    r"nvidia-driver-\d+(-server)?",
)
TOOLKIT_PACKAGES = (r"cuda-toolkit-\d+-\d+", r"cuda-toolkit")
NCCL_PACKAGE = "libnccl2"

# Words of a kernel command line that tune a host; the others say where its disks are or how it talks, and belong to one machine.
KERNEL_WORDS = re.compile(
    r"((amd_|intel_)?iommu(\..+)?|pcie_aspm(\..+)?|pcie_port_pm|pci|pcie_acs_override|(processor|intel_idle)\.max_cstate|idle|cpuidle\..+"
    r"|(amd|intel)_pstate|cpufreq\..+|mitigations|numa_balancing|transparent_hugepage|(default_)?hugepagesz?|nosmt|nohz_full|rcu_nocbs"
    r"|isolcpus|nvidia[-_].+|modprobe\.blacklist|module_blacklist|nmi_watchdog|nowatchdog|tsc|clocksource)"
)
DRIVER_MODULES = ("nvidia", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia_peermem")
# What the kernel starts with: a host that shows it was not tuned. Source: Documentation/admin-guide/sysctl
SYSCTL_DEFAULTS = {"vm.swappiness": "60", "kernel.numa_balancing": "1"}
REDIRECTIONS = ("request_redirect", "completion_redirect", "upstream_forwarding")
OURS = re.compile(r"nvidia|cuda", re.IGNORECASE)


@dataclass(frozen=True)
class Section:
    """Variables of one concern, with the comment lines that stand above them, and notes by variable."""

    title: str
    values: Mapping[str, Any]
    comments: Sequence[str] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def read_sources(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Return the apt sources that name NVIDIA or CUDA: ``url``, ``suite``, ``components``, ``signed_by`` (a path, or None) and ``file``.

    Format: sources.list(5), one line a source or deb822 paragraphs.
    """
    directory = root / "etc/apt"
    found = []
    for path in sorted([directory / "sources.list", *(directory / "sources.list.d").glob("*")]):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        entries = _paragraphs(text) if path.suffix == ".sources" else _lines(text) if path.suffix == ".list" else ()
        found += [
            entry | {"url": without_password(entry["url"]), "file": f"/{path.relative_to(root)}"}
            for entry in entries
            if OURS.search(entry["url"]) or OURS.search(path.name)
        ]
    return found


def _paragraphs(text: str) -> Iterator[dict[str, Any]]:
    for block in re.split(r"\n[ \t]*\n", text):
        values: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                values[name] = f"{values.get(name, '')}\n{line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                values[name] = value.strip()
        enabled = values.get("enabled", "yes").lower() not in ("no", "false", "0", "off", "disable")
        if "deb" in values.get("types", "").split() and enabled:
            signed = values.get("signed-by") or None
            for url in values.get("uris", "").split():
                yield {
                    "url": url,
                    "suite": values.get("suites", "").split()[0] if values.get("suites", "").split() else None,
                    "components": values.get("components", "").split(),
                    "signed_by": signed if signed and signed.startswith("/") else None,
                }


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        match = re.fullmatch(r"deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<url>\S+)\s+(?P<suite>\S+)\s*(?P<components>[^#]*).*", line.strip())
        if match:
            options = dict(option.partition("=")[::2] for option in (match["options"] or "").split())
            yield {
                "url": match["url"],
                "suite": match["suite"],
                "components": match["components"].split(),
                "signed_by": options.get("signed-by"),
            }


def with_fingerprint(source: Mapping[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Return the source with the fingerprint of its first key; None where the key can't be read."""
    path = root / source["signed_by"].lstrip("/") if source["signed_by"] else None
    try:
        found = apt_key.fingerprints(apt_key.binary(path.read_bytes(), str(path)), str(path)) if path else []
    except (OSError, AerieError):
        found = []
    return dict(source) | {"fingerprint": found[0] if found else None}


def without_password(url: str) -> str:
    """Return the URL without a user or password in it, which belong into no file."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url


def sections(
    info: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], given: Mapping[str, Any], sysctls: Iterable[str]
) -> list[Section]:
    """Return the variables that make another host like this one.

    ``given`` are the host's own variables, which know what can't be read back (where a key is fetched, where models come from, where
    ``aerie_root`` is), and ``sysctls`` the kernel variables that this project tunes.
    """
    return [
        _cuda(info, sources, given),
        _tuning(info, sysctls),
        _nccl(info),
        _release(info, given),
        _models(info, given),
    ]


def _cuda(info: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Section:
    title = "Driver, CUDA, NCCL"
    packages = info.get("packages") or {}
    system: Mapping[str, str] = packages.get("system") or {}
    driver, toolkit = _first(system, DRIVER_PACKAGES), _first(system, TOOLKIT_PACKAGES)
    nccl = system.get(NCCL_PACKAGE)
    if not (driver or toolkit or nccl):
        return Section(title, {}, ["No package of NVIDIA's is installed by dpkg here: nothing to bring to another host."])
    values: dict[str, Any] = {"nvidia_cuda_state": "present"}
    comments = []
    notes = {}
    source = _source(sources, given)
    if source:
        values["nvidia_cuda_repository_url"] = source["url"]
        notes["nvidia_cuda_repository_url"] = f"from {source['file']}"
        if source.get("suite"):
            values["nvidia_cuda_repository_suite"] = source["suite"]
        if source.get("components"):
            values["nvidia_cuda_repository_components"] = list(source["components"])
        if source.get("fingerprint"):
            values["nvidia_cuda_repository_key_fingerprint"] = source["fingerprint"]
            notes["nvidia_cuda_repository_key_fingerprint"] = f"of {source['signed_by']}"
    if key := given.get("nvidia_cuda_repository_key_url"):
        values["nvidia_cuda_repository_key_url"] = without_password(str(key))
    if driver:
        values |= {"nvidia_cuda_driver_package": driver, "nvidia_cuda_driver_version": system[driver]}
        loaded = (info.get("driver") or {}).get("loaded_version")
        if loaded and not re.match(rf"{re.escape(loaded)}([^0-9.]|$)", system[driver].partition(":")[2] or system[driver]):
            comments.append(f"The driver that is loaded is {loaded}, and not the one that is installed: the host was not booted since.")
    if toolkit:
        values |= {"nvidia_cuda_toolkit_package": toolkit, "nvidia_cuda_toolkit_version": system[toolkit]}
    if nccl:
        values["nvidia_cuda_nccl_version"] = nccl
    held = set(packages.get("held") or ())
    values["nvidia_cuda_hold"] = bool(held & {name for name in (driver, toolkit, NCCL_PACKAGE) if name})
    values["nvidia_cuda_headers"] = any(name.startswith("linux-headers-") for name in system)
    persistence = [gpu.get("persistence") for gpu in info.get("gpus") or ()]
    if persistence and None not in persistence:
        values["nvidia_cuda_persistence"] = all(persistence)
    if given.get("nvidia_cuda_manage_driver") is not None:
        values["nvidia_cuda_manage_driver"] = given["nvidia_cuda_manage_driver"]
    return Section(title, values, comments, notes)


def _source(sources: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the source that packages come from: the one that the host's variables name, else the first."""
    wanted = str(given.get("nvidia_cuda_repository_url") or "").rstrip("/")
    return next((source for source in sources if source["url"].rstrip("/") == wanted), sources[0] if sources else None)


def _first(system: Mapping[str, str], patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        # with several toolkits side by side, the newest
        if names := [name for name in system if re.fullmatch(pattern, name)]:
            return max(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    return None


def _tuning(info: Mapping[str, Any], sysctls: Iterable[str]) -> Section:
    settings: dict[str, Any] = {}
    comments: list[str] = ["As effective on the host, whoever set it."]
    words = [word for word in str(info.get("kernel_command_line") or "").split() if KERNEL_WORDS.fullmatch(word.partition("=")[0])]
    if words:
        settings["kernel_command_line"] = list(dict.fromkeys(words))
    if modprobe := _modprobe(info.get("driver") or {}):
        settings["modprobe"] = modprobe
    acs = [bridge["acs"] for bridge in (info.get("pci") or {}).get("bridges") or () if bridge.get("to_gpus") and bridge.get("acs")]
    if acs and not any(bridge.get(one) for bridge in acs for one in REDIRECTIONS):
        settings["acs"] = "cleared"
    governors = (info.get("cpu") or {}).get("governors") or {}
    if list(governors) == ["performance"]:
        settings["cpu_governor"] = "performance"
    elif "performance" in governors:
        comments.append(f"The CPUs have several governors ({', '.join(sorted(governors))}): none was taken.")
    known: Mapping[str, str] = info.get("sysctl") or {}
    values = {name: known[name] for name in sorted(set(sysctls)) if name in known and known[name] != SYSCTL_DEFAULTS.get(name)}
    if values:
        settings["sysctl"] = values
    if (info.get("limits") or {}).get("memlock") == "unlimited":
        settings["limits"] = {"memlock": "unlimited"}
    powers = [gpu.get("power") or {} for gpu in info.get("gpus") or ()]
    limits = {power.get("limit_w") for power in powers}
    if len(limits) == 1 and (limit := powers[0].get("limit_w")) is not None and limit != powers[0].get("default_w"):
        settings["power_limit_w"] = round(limit)
    elif len(limits) > 1:
        comments.append(f"The GPUs have several power limits ({', '.join(sorted(map(str, limits)))} W): none was taken.")
    return Section("Tuning", {"host_tuning_settings": settings}, comments)


def _modprobe(driver: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the options of NVIDIA's modules that modprobe is configured with. Source: modprobe.d(5); a later file's value wins."""
    found: dict[str, dict[str, str]] = {}
    for _, text in sorted((driver.get("modprobe_files") or {}).items()):
        for line in text.splitlines():
            words = re.findall(r'(?:[^\s"]|"[^"]*")+', line)
            module = words[1].replace("-", "_") if len(words) > 2 and words[0] == "options" else ""
            if module in DRIVER_MODULES:
                options = (word.partition("=") for word in words[2:])
                found.setdefault(module, {}).update({name: value.replace('"', "") for name, sign, value in options if sign})
    return found


def _nccl(info: Mapping[str, Any]) -> Section:
    nccl = info.get("nccl") or {}
    ours = [config for config in nccl.get("configs") or () if str(config.get("path", "")).endswith("/nccl.env")]
    foreign = [str(config["path"]) for config in nccl.get("configs") or () if config not in ours and config.get("settings")]
    comments = [f"Not taken, and heeded by NCCL: {path}. Settings of its own are for one number of GPUs." for path in foreign]
    if not ours:
        return Section("NCCL's settings", {}, [*comments, "This host has no nccl.env: nothing to bring to another host."])
    values = {
        "nccl_profile": None,
        "nccl_environment": {name: str(value) for name, value in sorted((ours[0].get("settings") or {}).items())},
    }
    return Section("NCCL's settings", values, [*comments, f"From {ours[0]['path']}, whatever profile they came from."])


def _release(info: Mapping[str, Any], given: Mapping[str, Any]) -> Section:
    packages = (info.get("packages") or {}).get("release") or {}
    if not info.get("release"):
        return Section("SGLang", {}, ["This host has no release yet."])
    version = packages.get("sglang") or str(info["release"]).rpartition("-")[0]
    told = {name: packages[name] for name in ("torch", "sglang_kernel", "sgl_kernel", "flashinfer", "nccl", "triton") if packages.get(name)}
    values: dict[str, Any] = {"sglang_release_version": version}
    if given.get("sglang_patches_sets"):
        values["sglang_patches_sets"] = list(given["sglang_patches_sets"])
    return Section("SGLang", values, [f"Release {info['release']}" + "".join(f", {name} {value}" for name, value in told.items()) + "."])


def _models(info: Mapping[str, Any], given: Mapping[str, Any]) -> Section:
    catalog = given.get("sglang_models_catalog") or {}
    if not catalog:
        return Section("Models", {}, ["This host's variables name no models."])
    models: Mapping[str, Any] = info.get("models") or {}
    comments = []
    for path, state in sorted(models.items()):
        comments += [f"{path} is not whole: {problem}" for problem in (state or {}).get("problems") or ()]
    values = {}
    for name, entry in catalog.items():
        if not isinstance(entry, Mapping):
            continue
        values[name] = {key: entry[key] for key in CATALOG_KEYS if key in entry}
        state = models.get(str(destination(HostPaths(Path(given.get("aerie_root") or "/")), name, entry)))
        found, asked = (state or {}).get("identity"), entry.get("identity")
        if found:
            values[name]["identity"] = found
        if found and asked and found != asked:
            comments.append(f"{name} is another model here than the host's variables ask for: they say {asked}.")
        elif not found:
            why = "its identity is not known here" if state else "it is not here yet"
            but = "the one below is that of the host's variables" if asked else "another host may get other files"
            comments.append(f"{name}: {why}, so {but}. Run playbooks/models.yml on this host, then capture it again.")
    return Section("Models", {"sglang_models_catalog": values}, comments)
