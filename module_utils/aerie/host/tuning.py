"""Host tuning: one plan from what is wanted and what is there. Pure, and standard library only: this runs on hosts.

:func:`tuning_found.read` gathers what is there, :func:`plan` decides (all refusals happen there, and it touches nothing),
:func:`tuning_apply.apply` does it, :func:`mismatches` compares what is in force with what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ansible.module_utils.aerie.errors import raise_all
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.host import tuning_files as files
from ansible.module_utils.aerie.host.tuning_found import ACS_CLEAR, ACS_CONTROL, LIVE_KINDS, STATE, SYSFS_CPUS, Found, State, sysctl_path
from ansible.module_utils.aerie.host.tuning_settings import POWER_RANGES, Settings, contradicts
from ansible.module_utils.aerie.words import listing


@dataclass(frozen=True)
class File:
    """A file that changes; None is a file that is not there."""

    path: str
    before: str | None
    after: str | None

    @property
    def mode(self) -> int:
        return 0o755 if self.path in files.EXECUTABLE else 0o644


@dataclass(frozen=True)
class Live:
    """A value that changes at once: written to ``path``, set by the command ``by``, or else by a unit; ``back`` undoes that."""

    kind: str
    name: str
    before: str
    after: str
    path: str | None = None
    by: tuple[str, ...] | None = None
    back: tuple[str, ...] | None = None

    @property
    def what(self) -> str:
        return self.path or f"{self.kind} of {self.name}"


@dataclass(frozen=True)
class Plan:
    """Everything that changes, in the order in which it is done: units stopped, files, commands, live values."""

    files: tuple[File, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    live: tuple[Live, ...] = ()
    state: State | None = None
    undone: Settings = field(default_factory=Settings)
    reboot_reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.files or self.before or self.commands or self.live)

    def diff(self) -> list[dict[str, str]]:
        found = [
            {"before_header": file.path, "before": file.before or "", "after_header": file.path, "after": file.after or ""}
            for file in self.files
        ]
        found += [
            {"before_header": live.what, "before": f"{live.before}\n", "after_header": live.what, "after": f"{live.after}\n"}
            for live in self.live
        ]
        return found


def plan(wanted: Settings, found: Found, *, owns_kernel: bool = True) -> Plan:
    """Return what takes the host from what is there to what is wanted; nothing wanted takes everything of ours back.

    Raises where it can't be, with every reason. ``owns_kernel`` is false in a container: kernel, boot and hardware are its host's.
    """
    raise_all(problems(wanted, found, owns_kernel), "this host can't be tuned as asked, and nothing was touched")
    state = found.state or State()
    smi = found.tools.get("nvidia-smi")
    texts = files.contents(wanted, found.grub, found.modprobe, systemd=found.systemd, nvidia_smi=smi)
    changes = tuple(
        File(path, found.texts.get(path), texts.get(path))
        for path in files.FILES
        if found.texts.get(path) != texts.get(path) and _is_ours(path, texts, found)
    )
    live, previous, notes = _plan_live(wanted, found, state)
    before, commands = _plan_commands(changes, texts, found, live, state)
    kept = Settings(kernel_command_line=tuple(state.settings.get("kernel_command_line", ())), modprobe=state.settings.get("modprobe", {}))
    undone = _still_undone(found.undone, kept, wanted, found)
    linked = [f"{files.WANTS}/{unit}" for unit in (files.ACS_UNIT, files.POWER_UNIT) if f"{files.UNITS}/{unit}" in texts]
    needed = {str(parent) for path in (*texts, *linked, *([STATE] if wanted else [])) for parent in Path(path).parents}
    made = {directory for directory in found.missing_directories if directory in needed} | set(state.directories)
    after = State(
        settings=wanted.as_dict(),
        files={path: sha256_bytes(text.encode()) for path, text in texts.items()},
        directories=tuple(sorted(made)),
        previous=previous,
    )
    return Plan(
        files=changes,
        before=before,
        commands=commands,
        live=live,
        state=after if wanted else None,
        undone=undone,
        reboot_reasons=tuple(_reboot_reasons(wanted, undone, found)),
        notes=tuple(notes),
    )


def problems(wanted: Settings, found: Found, owns_kernel: bool) -> list[str]:
    """Return everything that keeps ``wanted`` from being."""
    if not owns_kernel:
        foreign = wanted.of_the_kernel()
        if foreign:
            kind = (found.info.get("container") or {}).get("kind") or "one whose kernel is not ours (host_tuning_manage_kernel)"
            return [
                f"{listing(foreign)}: this host is a container ({kind}), and these belong to the machine that runs it: tune that one, "
                "and keep no more than limits here"
            ]
    return [
        *_strangers(found),
        *_check_grub(wanted, found),
        *_check_modprobe(wanted, found),
        *_check_sysctl(wanted, found),
        *_check_limits(wanted, found),
        *_check_units(wanted, found),
        *_check_acs(wanted, found),
        *_check_governor(wanted, found),
        *_check_power(wanted, found),
    ]


def _strangers(found: Found) -> Iterator[str]:
    for path, text in found.texts.items():
        if found.state is None and files.NOTE not in text:
            yield f"{path} is there and was not written by Aerie: move it away, or put what it says into host_tuning_settings"


def _check_grub(wanted: Settings, found: Found) -> Iterator[str]:
    if not wanted.kernel_command_line:
        return
    if not found.has_grub:
        yield (
            f"kernel_command_line: there is no update-grub here, and {found.boot_loader}: set {listing(wanted.kernel_command_line)} by "
            "its own means, and leave these words out"
        )
    if found.grub.dropped_by:
        yield (
            f"kernel_command_line: {found.grub.dropped_by} sets {files.GRUB_VARIABLE} anew, after ours: let it begin with "
            f"${files.GRUB_VARIABLE}"
        )
    for word in found.grub.words:
        if other := contradicts(word.name, wanted.kernel_command_line):
            yield f"kernel_command_line: {word.where} says {word.name}, and {other} is wanted: remove one of them"


def _check_modprobe(wanted: Settings, found: Found) -> Iterator[str]:
    ours = {f"{module} {option}": value for module, options in wanted.modprobe.items() for option, value in options.items()}
    for option, value in files.differing(found.modprobe, ours):
        module, _, name = option.name.partition(" ")
        yield f"modprobe: {option.where} says {name}={option.value} for {module}, and {value} is wanted: remove one of them"


def _check_sysctl(wanted: Settings, found: Found) -> Iterator[str]:
    for setting, value in files.differing(found.sysctl, wanted.sysctl):
        yield f"sysctl: {setting.where} says {setting.name} = {setting.value}, and {value} is wanted: remove one of them"
    for name in wanted.sysctl:
        if name not in found.live.get("sysctl", {}):
            yield f"sysctl: this kernel has no {name} ({sysctl_path(name)}): leave it out here"


def _check_limits(wanted: Settings, found: Found) -> Iterator[str]:
    for setting, value in files.differing(found.limits, wanted.limits):
        yield f"limits: {setting.where} says {setting.name} {setting.value}, and {value} is wanted: remove one of them"


def _check_units(wanted: Settings, found: Found) -> Iterator[str]:
    needing = [key for key in ("acs", "cpu_governor", "persistence", "power_limit_w") if getattr(wanted, key)]
    if needing and not found.systemd:
        yield f"{listing(needing)}: systemd does not run here, and without a unit these are lost at the next boot: leave them out"


def _check_acs(wanted: Settings, found: Found) -> Iterator[str]:
    if not wanted.acs:
        return
    if missing := [tool for tool in ("setpci", "lspci") if tool not in found.tools]:
        yield f"acs: {listing(missing)} not found: install pciutils"
    pci = found.info.get("pci") or {}
    if pci.get("source") is None:
        yield f"acs: the PCI bridges can't be seen: {pci.get('reason') or 'no survey of them'}"


def _check_governor(wanted: Settings, found: Found) -> Iterator[str]:
    governor = wanted.cpu_governor
    if not governor:
        return
    if not found.available_governors:
        yield "cpu_governor: no CPU has a frequency driver here (a virtual machine?): leave it out"
    for cpu, available in found.available_governors.items():
        if governor not in available:
            yield f"cpu_governor: {cpu} offers {listing(available)}, not {governor}: choose one of these"
            break
    for setting in found.governors:
        if setting.value != governor:
            yield f"cpu_governor: {setting.where} says {setting.value}, and {governor} is wanted: remove one of them"


def _check_power(wanted: Settings, found: Found) -> Iterator[str]:
    needing = [key for key in ("persistence", "power_limit_w") if getattr(wanted, key)]
    if not needing or found.info.get("driver_pending"):
        return
    gpus = found.info.get("gpus") or []
    if not gpus or "nvidia-smi" not in found.tools:
        yield f"{listing(needing)}: no GPU answers ({found.info.get('gpu_reason') or 'nvidia-smi: not found'}): install the driver first"
        return
    watts = wanted.power_limit_w
    for gpu in gpus if watts is not None else []:
        power = gpu.get("power") or {}
        lowest, highest = power.get("min_w"), power.get("max_w")
        by = "its driver"
        if lowest is None or highest is None:
            lowest, highest = POWER_RANGES.get(str(gpu.get("sku")), (None, None))
            by = f"a {gpu.get('sku')} card"
        if lowest is None or highest is None:
            yield f"power_limit_w: what GPU {gpu.get('index')} ({gpu.get('name')}) may be set to can't be told: leave it out"
        elif watts is not None and not lowest <= watts <= highest:
            yield f"power_limit_w is {watts}: GPU {gpu.get('index')} ({gpu.get('name')}) takes {lowest:g} to {highest:g} W, as {by} says"


def _is_ours(path: str, texts: Mapping[str, str], found: Found) -> bool:
    return path in texts or found.state is not None or files.NOTE in found.texts.get(path, "")


def _plan_live(wanted: Settings, found: Found, state: State) -> tuple[tuple[Live, ...], dict[str, dict[str, str]], list[str]]:
    """Return the live values that change, what they were before we first changed them, and what could not be put back."""
    bridges = found.live.get("acs", {})
    targets: dict[str, dict[str, str]] = {
        "sysctl": dict(wanted.sysctl),
        "governor": dict.fromkeys(found.live.get("governor", {}), wanted.cpu_governor) if wanted.cpu_governor else {},
        "acs": dict.fromkeys(bridges, ACS_CLEAR) if wanted.acs else {},
        "persistence": dict.fromkeys(found.live.get("persistence", {}), "1") if wanted.persistence else {},
        "power_limit": dict.fromkeys(found.live.get("power_limit", {}), str(wanted.power_limit_w)) if wanted.power_limit_w else {},
    }
    # Of these every CPU, bridge or GPU is meant, also one that does not answer now.
    whole = {
        "governor": wanted.cpu_governor,
        "acs": wanted.acs,
        "persistence": wanted.persistence,
        "power_limit": wanted.power_limit_w,
    }
    changes: list[Live] = []
    previous: dict[str, dict[str, str]] = {}
    notes: list[str] = []
    for kind in LIVE_KINDS:
        now, kept, target = found.live.get(kind, {}), dict(state.previous.get(kind, {})), targets[kind]
        for name, value in target.items():
            if not files.same(now[name], value):
                changes.append(_live(kind, name, now[name], value, found, restoring=False))
                kept.setdefault(name, now[name])
        for name in [name for name in kept if name not in target and not whole.get(kind)]:
            value = kept.pop(name)
            current = now.get(name)
            if kind == "acs" and current is None:
                current = ACS_CLEAR
            if current is None or (kind in ("persistence", "power_limit") and name not in found.gpu_indices):
                notes.append(f"{kind} of {name} can't be put back to {value} now: it comes with the next boot")
            elif not files.same(current, value):
                changes.append(_live(kind, name, current, value, found, restoring=True))
        if kept:
            previous[kind] = kept
    if wanted.acs and not bridges:
        notes.append("acs: no bridge on the way to a GPU has access control services now; the unit clears what later boots bring")
    return tuple(changes), previous, notes


def _live(kind: str, name: str, before: str, after: str, found: Found, *, restoring: bool) -> Live:
    if kind == "sysctl":
        return Live(kind, name, before, after, path=sysctl_path(name))
    if kind == "governor":
        return Live(kind, name, before, after, path=f"/{SYSFS_CPUS}/{name}/cpufreq/scaling_governor")

    def command(value: str) -> tuple[str, ...]:
        if kind == "acs":
            return (found.tools.get("setpci", "setpci"), "-s", name, f"{ACS_CONTROL}={value}")
        option = "-pm" if kind == "persistence" else "-pl"
        return (found.tools.get("nvidia-smi", "nvidia-smi"), "-i", str(found.gpu_indices[name]), option, value)

    return Live(kind, name, before, after, by=command(after) if restoring else None, back=command(before))


def _plan_commands(
    changes: Iterable[File], texts: Mapping[str, str], found: Found, live: Iterable[Live], state: State
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the commands before and after the files change."""
    changed = {file.path for file in changes}
    systemctl = found.tools.get("systemctl", "systemctl")
    before: list[tuple[str, ...]] = []
    left_out = [unit for unit in (files.ACS_UNIT, files.POWER_UNIT) if f"{files.UNITS}/{unit}" not in texts]
    commands: list[tuple[str, ...]] = [argv for argv in state.pending if argv[-1] not in left_out]
    if files.GRUB_FILE in changed and "update-grub" in found.tools:
        commands.append((found.tools["update-grub"],))
    if files.MODPROBE_FILE in changed:
        if "update-initramfs" in found.tools:
            commands.append((found.tools["update-initramfs"], "-u", "-k", "all"))
        elif "dracut" in found.tools:
            commands.append((found.tools["dracut"], "--force", "--regenerate-all"))
    if found.systemd and any(path.startswith(files.UNITS) for path in changed):
        commands.append((systemctl, "daemon-reload"))
    kinds = {change.kind for change in live if change.by is None}
    for unit, sets in ((files.ACS_UNIT, {"acs"}), (files.POWER_UNIT, {"governor", "persistence", "power_limit"})):
        path = f"{files.UNITS}/{unit}"
        if path not in texts:
            if unit in found.enabled or unit in found.active:
                before.append((systemctl, "disable", "--now", unit))
            continue
        if unit not in found.enabled:
            commands.append((systemctl, "enable", unit))
        also = {files.ACS_PROGRAM} if unit == files.ACS_UNIT else set()
        at_boot = unit == files.POWER_UNIT and found.info.get("driver_pending")  # nvidia-smi would fail, and the unit with it
        if not at_boot and (({path} | also) & changed or kinds & sets or unit not in found.active):
            commands.append((systemctl, "restart", unit))
    return tuple(before), tuple(dict.fromkeys(commands))


def _still_undone(undone: Settings, kept: Settings, wanted: Settings, found: Found) -> Settings:
    """Return what was ours, is wanted no more, and is still in force until the next boot."""
    theirs = {word.name for word in found.grub.words}
    words = [
        word
        for word in dict.fromkeys((*undone.kernel_command_line, *kept.kernel_command_line))
        if word not in wanted.kernel_command_line and word in found.running_words and word not in theirs
    ]
    said = {(option.name, option.value) for option in found.modprobe}
    modprobe: dict[str, dict[str, str]] = {}
    for module in (*undone.modprobe, *kept.modprobe):
        for name, value in {**undone.modprobe.get(module, {}), **kept.modprobe.get(module, {})}.items():
            now = (found.loaded.get(module) or {}).get(name)
            if (
                name not in wanted.modprobe.get(module, {})
                and now is not None
                and files.same(now, value)
                and (f"{module} {name}", value) not in said
            ):
                modprobe.setdefault(module, {})[name] = value
    return Settings(kernel_command_line=tuple(words), modprobe=modprobe)


def _reboot_reasons(wanted: Settings, undone: Settings, found: Found) -> Iterator[str]:
    if missing := [word for word in wanted.kernel_command_line if word not in found.running_words]:
        yield f"the running kernel was booted without {listing(missing)}"
    if undone.kernel_command_line:
        yield f"the running kernel was booted with {listing(undone.kernel_command_line)}, which was taken back"
    for module, name, value, now in _options_not_in_force(wanted, found):
        yield f"{module} runs with {name}={now}, and {value} is wanted"
    for module, options in undone.modprobe.items():
        yield f"{module} runs with {listing(f'{name}={value}' for name, value in options.items())}, which was taken back"


def _options_not_in_force(wanted: Settings, found: Found) -> Iterator[tuple[str, str, str, str]]:
    """Yield module, option, wanted value and value in force where they differ; a module that is not loaded takes it when it is."""
    for module, options in wanted.modprobe.items():
        loaded = found.loaded.get(module)
        for name, value in options.items() if loaded is not None else ():
            now = (loaded or {}).get(name)
            if now is None or not files.same(now, value):
                yield module, name, value, "nothing" if now is None else now or '""'


def mismatches(wanted: Settings, found: Found) -> list[str]:
    """Return every wanted setting that is not in force, with what is."""
    return [
        *(f"kernel_command_line: {word} is not in /proc/cmdline" for word in wanted.kernel_command_line if word not in found.running_words),
        *(f"modprobe: {module} runs with {name}={now}, not {value}" for module, name, value, now in _options_not_in_force(wanted, found)),
        *(f"modprobe: {module} is not loaded" for module in wanted.modprobe if found.loaded.get(module) is None),
        *_bridges_with_acs(wanted, found),
        *_values_not_in_force(wanted, found),
        *_limits_not_in_force(wanted, found),
    ]


def _bridges_with_acs(wanted: Settings, found: Found) -> Iterator[str]:
    for address, word in found.live.get("acs", {}).items() if wanted.acs else ():
        if not files.same(f"0x{word}", "0"):
            yield f"acs: bridge {address} has 0x{word}, not 0: does firmware lock it?"


def _values_not_in_force(wanted: Settings, found: Found) -> Iterator[str]:
    for name, value in wanted.sysctl.items():
        now = found.live.get("sysctl", {}).get(name)
        if now is None or not files.same(now, value):
            yield f"sysctl: {name} is {now}, not {value}"
    for kind, key, expected in (
        ("governor", "cpu_governor", wanted.cpu_governor),
        ("persistence", "persistence", "1" if wanted.persistence else None),
        ("power_limit", "power_limit_w", str(wanted.power_limit_w) if wanted.power_limit_w else None),
    ):
        values = found.live.get(kind, {})
        if expected is None:
            continue
        if not values:
            yield f"{key}: nothing answers"
        elif others := sorted({now for now in values.values() if not files.same(now, expected)}):
            count = sum(1 for now in values.values() if not files.same(now, expected))
            yield f"{key}: {count} of {len(values)} have {listing(others)}, not {expected}"


def _limits_not_in_force(wanted: Settings, found: Found) -> Iterator[str]:
    for name, value in wanted.limits.items():
        now = found.login_limits.get(name)
        if now is not None and now != value:
            yield f"limits: {name} of a new login is {now}, not {value}: is pam_limits in its PAM stack, and may this host raise limits?"
