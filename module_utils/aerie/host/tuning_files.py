"""Files by which a host keeps its tuning: what ours say, and what other files say about the same things.

Standard library only: this runs on hosts. Files are read below a root directory, which is ``/`` on a live host.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.host.tuning_settings import Settings

NOTE = "# Written by Aerie (role host_tuning); changes are overwritten."

GRUB = "/etc/default/grub"
GRUB_DIRECTORY = "/etc/default/grub.d"
GRUB_VARIABLE = "GRUB_CMDLINE_LINUX_DEFAULT"
GRUB_FILE = f"{GRUB_DIRECTORY}/99-aerie-tuning.cfg"
MODPROBE_FILE = "/etc/modprobe.d/aerie-tuning.conf"
SYSCTL_FILE = "/etc/sysctl.d/90-aerie-tuning.conf"
LIMITS_FILE = "/etc/security/limits.d/90-aerie-tuning.conf"
UNITS = "/etc/systemd/system"
SERVER_FILE = f"{UNITS}/sglang@.service.d/90-aerie-tuning.conf"
ACS_PROGRAM = "/usr/local/lib/aerie/clear-acs"
ACS_UNIT, POWER_UNIT = "aerie-acs.service", "aerie-power.service"
WANTS = f"{UNITS}/multi-user.target.wants"
FILES = (
    GRUB_FILE,
    MODPROBE_FILE,
    SYSCTL_FILE,
    LIMITS_FILE,
    SERVER_FILE,
    ACS_PROGRAM,
    f"{UNITS}/{ACS_UNIT}",
    f"{UNITS}/{POWER_UNIT}",
)
EXECUTABLE = frozenset({ACS_PROGRAM})

# modprobe.d(5), sysctl.d(5): a file hides those of the same name in directories that come later here.
MODPROBE_DIRECTORIES = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/local/lib/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
SYSCTL_DIRECTORIES = ("/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d")
CPUFREQUTILS = "/etc/default/cpufrequtils"

# Buses are two hexadecimal digits, which order as text. Source: pciutils, lspci(8); setpci(8) names the capability ECAP_ACS, whose
# control register is at offset 6 (PCI Express Base Specification, access control services).
CLEAR_ACS = f"""\
#!/bin/sh
{NOTE}
# Clears access control services of every root port and every switch's downstream port above an NVIDIA GPU. Needs pciutils.
set -eu
LC_ALL=C
export LC_ALL
listing=$(lspci -Dvvvnn)
printf '%s\\n' "$listing" | awk '
  /^[0-9a-f]/ {{
    address = $1
    split(address, part, ":")
    if ($0 ~ /\\[03[0-9a-f][0-9a-f]\\]: .*\\[10de:/) gpus[part[1] ":" part[2]]
  }}
  /Bus: primary=/ {{
    match($0, /secondary=[0-9a-f]+/); first[address] = substr($0, RSTART + 10, RLENGTH - 10)
    match($0, /subordinate=[0-9a-f]+/); last[address] = substr($0, RSTART + 12, RLENGTH - 12)
  }}
  /Express .*(Root Port|Downstream Port)/ {{ port[address] }}
  /ACSCtl:/ {{ acs[address] }}
  END {{
    for (address in acs) if (address in port) {{
      split(address, part, ":")
      for (gpu in gpus) {{
        split(gpu, place, ":")
        if (place[1] == part[1] && first[address] <= place[2] && place[2] <= last[address]) {{ print address; break }}
      }}
    }}
  }}' | sort | while read -r address; do
  setpci -s "$address" ECAP_ACS+0x6.w=0000
done
"""

ACS_TEXT = f"""\
{NOTE}
[Unit]
Description=Clear PCIe access control services on the way to GPUs (Aerie)
Before=nvidia-persistenced.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={ACS_PROGRAM}

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Foreign:
    """A setting that somebody else made: its name, its value and the file and line it stands in."""

    name: str
    value: str
    where: str


@dataclass(frozen=True)
class GrubWords:
    """Words that others add to the kernel command line, and the file that would drop ours (None: none does)."""

    words: tuple[Foreign, ...] = ()
    dropped_by: str | None = None


def contents(wanted: Settings, grub: GrubWords, modprobe: Iterable[Foreign], *, systemd: bool, nvidia_smi: str | None) -> dict[str, str]:
    """Return the text of each of our files that ``wanted`` needs. What others say already is not said again."""
    theirs = {word.name for word in grub.words}
    words = [word for word in wanted.kernel_command_line if word not in theirs]
    said = {(option.name, option.value) for option in modprobe}
    options = [
        f"options {module} {' '.join(rest)}"
        for module, values in sorted(wanted.modprobe.items())
        if (rest := [f"{name}={_quoted(value)}" for name, value in sorted(values.items()) if (f"{module} {name}", value) not in said])
    ]
    units = [unit for unit, needed in ((ACS_UNIT, wanted.acs), (POWER_UNIT, power_commands(wanted, nvidia_smi))) if needed]
    server = [
        *([f"[Unit]\nAfter={' '.join(units)}"] if units else []),
        *(["[Service]\n" + "\n".join(_unit_limit(name, value) for name, value in sorted(wanted.limits.items()))] if wanted.limits else []),
    ]
    texts = {
        GRUB_FILE: f'{GRUB_VARIABLE}="${GRUB_VARIABLE} {" ".join(words)}"' if words else "",
        MODPROBE_FILE: "\n".join(options),
        SYSCTL_FILE: "\n".join(f"{name} = {value}" for name, value in sorted(wanted.sysctl.items())),
        LIMITS_FILE: "\n".join(
            f"{domain} {kind} {name} {value}"
            for name, value in sorted(wanted.limits.items())
            for domain in ("*", "root")  # * does not mean root
            for kind in ("soft", "hard")
        ),
        SERVER_FILE: "\n\n".join(server) if systemd else "",
    }
    found = {path: f"{NOTE}\n{text}\n" for path, text in texts.items() if text}
    if wanted.acs:
        found |= {ACS_PROGRAM: CLEAR_ACS, f"{UNITS}/{ACS_UNIT}": ACS_TEXT}
    if POWER_UNIT in units:
        found[f"{UNITS}/{POWER_UNIT}"] = power_unit(wanted, nvidia_smi)
    return found


def power_commands(wanted: Settings, nvidia_smi: str | None) -> list[str]:
    """Return the command lines of the unit that sets governor, persistence and power limit, in systemd's spelling."""
    loop = 'for file in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do echo {} > "$$file" || exit 1; done'
    smi = nvidia_smi or "/usr/bin/nvidia-smi"
    return [
        *([f"/bin/sh -c '{loop.format(wanted.cpu_governor)}'"] if wanted.cpu_governor else []),
        *([f"{smi} -pm 1"] if wanted.persistence else []),
        *([f"{smi} -pl {wanted.power_limit_w}"] if wanted.power_limit_w else []),
    ]


def power_unit(wanted: Settings, nvidia_smi: str | None) -> str:
    lines = "\n".join(f"ExecStart={line}" for line in power_commands(wanted, nvidia_smi))
    return (
        f"{NOTE}\n[Unit]\nDescription=CPU governor and GPU power (Aerie)\nAfter=nvidia-persistenced.service\n\n"
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\n{lines}\n\n[Install]\nWantedBy=multi-user.target\n"
    )


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z0-9_.,:+\-]*", value) else f'"{value}"'


def _unit_limit(name: str, value: str) -> str:
    amount = "infinity" if value == "unlimited" else f"{value}K" if name == "memlock" else value
    return f"Limit{name.upper()}={amount}"


# -- what others say


def grub_words(root: Path) -> GrubWords:
    """Return what /etc/default/grub and its drop-ins but ours add to the kernel command line, and whether ours would last.

    As grub-mkconfig of Debian and Ubuntu reads them: the file, then the drop-ins in order of name, each a shell script.
    """
    ours = Foreign("", "", GRUB_FILE)
    variables: dict[str, list[Foreign]] = {}
    dropped_by = None
    names = sorted({path.name for path in _below(root, GRUB_DIRECTORY).glob("*.cfg")} | {Path(GRUB_FILE).name})
    for path in (GRUB, *(f"{GRUB_DIRECTORY}/{name}" for name in names)):
        if path == GRUB_FILE:
            variables.setdefault(GRUB_VARIABLE, []).append(ours)
            continue
        for number, line in _lines(root, path):
            found = re.match(r"\s*(?:export\s+)?(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)(\+?)=(.*)", line)
            if not found:
                continue
            name, adds, value = found.groups()
            words: list[Foreign] = list(variables.get(name, [])) if adds else []
            for word in " ".join(_split(value)).split():
                if reference := re.fullmatch(r"\$\{?(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)\}?", word):
                    words += variables.get(reference[1], [])
                else:
                    words.append(Foreign(word, "", f"{path}:{number}"))
            if ours in variables.get(name, []) and ours not in words:
                dropped_by = f"{path}:{number}"
            variables[name] = words
    # The command line has first GRUB_CMDLINE_LINUX, then the default, which a recovery entry leaves out.
    every = (*variables.get("GRUB_CMDLINE_LINUX", []), *variables.get(GRUB_VARIABLE, []))
    return GrubWords(tuple(word for word in every if word != ours), dropped_by)


def modprobe_options(root: Path) -> list[Foreign]:
    """Return the options that other files give to modules; the name is ``module option``."""
    found = []
    for path in _masked(root, MODPROBE_DIRECTORIES):
        if Path(path).name == Path(MODPROBE_FILE).name:  # ours, or hidden by it
            continue
        for number, line in _lines(root, path, continued=True):
            words = _split(line)
            if len(words) > 2 and words[0] == "options":
                module = words[1].replace("-", "_")
                for word in words[2:]:
                    name, _, value = word.partition("=")
                    found.append(Foreign(f"{module} {name}", value, f"{path}:{number}"))
    return found


def sysctl_values(root: Path) -> list[Foreign]:
    """Return what an administrator's files say of kernel variables, and what other files say that are read after ours."""
    found = []
    own = Path(SYSCTL_FILE).name
    for path in (*_masked(root, SYSCTL_DIRECTORIES), "/etc/sysctl.conf"):
        if Path(path).name == own or not (path.startswith("/etc/") or Path(path).name > own):
            continue
        if _below(root, path).is_symlink() and _below(root, path).name == "99-sysctl.conf":
            continue  # Debian's link to /etc/sysctl.conf
        for number, line in _lines(root, path):
            name, separator, value = line.strip().removeprefix("-").partition("=")
            if separator and not name.startswith(("#", ";")):
                found.append(Foreign(name.strip().replace("/", "."), " ".join(value.split()), f"{path}:{number}"))
    return found


def limit_values(root: Path) -> list[Foreign]:
    """Return the limits that other files set for everyone or for root. Source: limits.conf(5)"""
    found = []
    drop_ins = sorted(path.name for path in _below(root, "/etc/security/limits.d").glob("*.conf"))
    for path in ("/etc/security/limits.conf", *(f"/etc/security/limits.d/{name}" for name in drop_ins)):
        if path == LIMITS_FILE:
            continue
        for number, line in _lines(root, path):
            words = line.partition("#")[0].split()
            if len(words) == 4 and words[0] in ("*", "root") and words[1] in ("soft", "hard", "-"):
                value = "unlimited" if words[3] in ("unlimited", "infinity", "-1") else words[3]
                found.append(Foreign(words[2], value, f"{path}:{number}"))
    return found


def governors(root: Path) -> list[Foreign]:
    """Return the governor that cpufrequtils sets at boot, where it is there."""
    found = []
    for number, line in _lines(root, CPUFREQUTILS):
        name, separator, value = line.strip().partition("=")
        if separator and name == "GOVERNOR":
            found.append(Foreign(name, "".join(_split(value)), f"{CPUFREQUTILS}:{number}"))
    return found


def boot_loader(root: Path) -> str:
    """Return in words what boots a host that has no GRUB, as far as can be told."""
    for path, name in (
        ("/etc/kernelstub/configuration", "kernelstub (kernelstub --add-options)"),
        ("/etc/kernel/cmdline", "systemd-boot (/etc/kernel/cmdline, then kernel-install)"),
        ("/boot/firmware/cmdline.txt", "firmware (/boot/firmware/cmdline.txt)"),
        ("/usr/sbin/grub2-mkconfig", "a GRUB without update-grub (grubby --update-kernel=ALL --args)"),
    ):
        if _below(root, path).exists():
            return f"it seems to boot by {name}"
    return "what boots it can't be told"


def _below(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _lines(root: Path, path: str, *, continued: bool = False) -> Iterator[tuple[int, str]]:
    try:
        text = _below(root, path).read_text(errors="replace")
    except OSError:
        return
    start, kept = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not kept and line.lstrip().startswith("#"):
            continue
        start = start if kept else number
        if continued and line.endswith("\\"):
            kept += line[:-1] + " "
            continue
        yield start, kept + line
        kept = ""


def _masked(root: Path, directories: Iterable[str]) -> list[str]:
    chosen: dict[str, str] = {}
    for directory in directories:
        for path in _below(root, directory).glob("*.conf"):
            chosen.setdefault(path.name, f"{directory}/{path.name}")
    return [chosen[name] for name in sorted(chosen)]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an unclosed quote
        return text.split()


def differing(theirs: Iterable[Foreign], ours: Mapping[str, str]) -> Iterator[tuple[Foreign, str]]:
    """Yield each setting of others that says something else than ``ours``, with what ours says."""
    for setting in theirs:
        wanted = ours.get(setting.name)
        if wanted is not None and not same(setting.value, wanted):
            yield setting, wanted


def same(one: str, other: str) -> bool:
    """Say whether two values mean the same to the kernel: numbers by value, Y and N as 1 and 0."""
    return _canonical(one) == _canonical(other)


def _canonical(value: str) -> str:
    plain = " ".join(value.strip().strip('"').split())
    plain = {"Y": "1", "y": "1", "N": "0", "n": "0"}.get(plain, plain)
    try:
        return str(int(plain, 0))
    except ValueError:
        return plain
