"""Takes personal details out of a recording; the same detail gets the same other name everywhere in it.

Standard library only: this runs on hosts, so that the details never leave them.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.aerie.host.pci_config import EXTENDED

UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
LONG_HEXADECIMAL = re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE)
IDENTIFIER = re.compile(r"\b0x[0-9a-f]{16}\b", re.IGNORECASE)
MAC = re.compile(r"(?<![\w:-])[0-9a-f]{2}(?:(?::[0-9a-f]{2}){5,}|(?:-[0-9a-f]{2}){5,})(?![\w:-])", re.IGNORECASE)
IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.]|-\d)")
IPV6 = re.compile(r"(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?![\w:.])", re.IGNORECASE)
SERIAL = re.compile(r"<(\w*serial\w*|pdi|gpu_fabric_guid|clusterUuid)>([^<]+)<")
HOME = re.compile(r"/home/([^/\s:\"'<>,]+)")
SECRET_OPTION = re.compile(r"--[\w-]*(?:key|token|password|secret)[\w-]*")

CONTENT = ("identity",)
"""Of a model: hashes of published content, which tell nothing of anybody, and are of no use when replaced."""

SYSTEM_TREES = ("/proc/", "/sys/", "/etc/", "/var/", "/run/")
SERIAL_EXTENSION = 0x0003
HOSTNAME, USER = "/proc/sys/kernel/hostname", "id -un"
NUMBERED = re.compile(r"(?:host|user)\d+")
LOGGED_BY = re.compile(r"(?<=\] )\S+(?= kernel: )")


@dataclass
class Pseudonyms:
    """Other names, given in order of appearance; ``names`` are words to replace, with the kind of each (``host``, ``user``)."""

    names: Mapping[str, str] = field(default_factory=dict)
    given: dict[tuple[str, str], str] = field(default_factory=dict)

    def other(self, kind: str, detail: str, form: Callable[[int], str]) -> str:
        key = (kind, detail.lower())
        if key not in self.given:
            self.given[key] = form(sum(known == kind for known, _ in self.given) + 1)
        return self.given[key]

    def name(self, kind: str, detail: str) -> str:
        return self.other(kind, detail, lambda number: f"{kind}{number}")

    def text(self, content: str) -> str:
        """Return ``content`` without personal details."""
        content = LOGGED_BY.sub("host1", SERIAL.sub(self._serial, content))
        content = UUID.sub(
            lambda match: self.other("uuid", match.group(), lambda number: f"00000000-0000-4000-8000-{number:012d}"), content
        )
        content = LONG_HEXADECIMAL.sub(self._hexadecimal, content)
        content = IDENTIFIER.sub(lambda match: self.other("identifier", match.group(), lambda number: f"0x{number:016x}"), content)
        content = MAC.sub(
            lambda match: self.other("mac", match.group(), lambda number: f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"), content
        )
        content = IPV6.sub(self._address, IPV4.sub(self._address, content))
        content = HOME.sub(lambda match: f"/home/{self._user(match.group(1))}", content)
        for word in sorted(self.names, key=len, reverse=True):
            content = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", self.name(self.names[word], word), content)
        return content

    def _user(self, name: str) -> str:
        return name if NUMBERED.fullmatch(name) else self.name("user", name)

    def _serial(self, match: re.Match[str]) -> str:
        if match.group(2).strip() in ("N/A", "[N/A]", ""):
            return match.group()
        return f"<{match.group(1)}>{self.other('serial', match.group(2), lambda number: f'{number:013d}')}<"

    def _hexadecimal(self, match: re.Match[str]) -> str:
        digits = match.group()
        return self.other("hexadecimal", digits, lambda number: f"{number:0{len(digits)}x}")

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match.group())
        except ValueError:
            return match.group()
        if address.is_loopback or address.is_unspecified:
            return match.group()
        if address.version == 4:
            return self.other("ipv4", match.group(), lambda number: f"198.51.100.{number % 256}")
        return self.other("ipv6", match.group(), lambda number: f"2001:db8::{number:x}")


def personal_names(recording: Mapping[str, Any], besides: Iterable[str] = ()) -> dict[str, str]:
    """Return the words of a recording that name the host or its user, with the kind of each.

    A host named ``vm`` or ``nvidia`` is not one: that word tells nothing of anybody, and to replace it would spoil what was read.
    """
    files, commands = recording.get("files", {}), recording.get("commands", {})
    named = [name for name in (str(files.get(HOSTNAME) or "").strip(), *besides) if re.search("[A-Za-z]", name) and not _is_address(name)]
    domains = [domain for name in named if "." in (domain := name.partition(".")[2])]
    hosts = [*named, *(name.partition(".")[0] for name in named), *domains]
    users = {str(commands.get(USER, {}).get("stdout") or "").strip()}
    found = {**dict.fromkeys(hosts, "host"), **dict.fromkeys(users, "user")}
    general = _vocabulary(recording) | {"", "root", "localhost", "localdomain"}
    return {name: kind for name, kind in found.items() if name.lower() not in general and not NUMBERED.fullmatch(name)}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _vocabulary(recording: Mapping[str, Any]) -> set[str]:
    """Return the words of the system's own paths, of what was run, and of the distribution's name."""
    tables = ("files", "directories", "links", "stats")
    paths = [path for table in tables for path in recording.get(table, {}) if path.startswith(SYSTEM_TREES)]
    run = [argv for argv in recording.get("commands", {}) if not argv.startswith("/")]
    system = str(recording.get("files", {}).get("/etc/os-release", ""))
    document = str(recording.get("commands", {}).get("nvidia-smi -q -x", {}).get("stdout", ""))
    terms = re.findall(r"<product_name>[^<]+|<\w+", document)
    return {word.lower() for text in (*paths, *run, system, *terms) for word in re.findall(r"[A-Za-z0-9]+", text)}


def anonymize(recording: Mapping[str, Any], besides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the recording without personal details; ``besides`` are further names of the host."""
    pseudonyms = Pseudonyms(personal_names(recording, besides))
    home = str(recording.get("environment", {}).get("HOME") or "")
    moved = home if home.count("/") > 1 and not home.startswith("/home/") else None

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return pseudonyms.text(value.replace(moved, "/home/user1") if moved else value)
        if isinstance(value, Mapping):
            if set(value) == {"base64"}:
                return {"base64": base64.b64encode(_without_serial(base64.b64decode(value["base64"]))).decode()}
            return {clean(key): value[key] if key in CONTENT else clean(value[key]) for key in value}
        if isinstance(value, list | tuple):
            return [clean(item) for item in _without_secrets(value)]
        return value

    cleaned: dict[str, Any] = {key: clean(recording[key]) for key in sorted(recording)}
    if cleaned.get("files", {}).get(HOSTNAME):
        cleaned["files"][HOSTNAME] = "host1\n"
    if (user := cleaned.get("commands", {}).get(USER)) and user["stdout"].strip() not in ("root", ""):
        user["stdout"] = "user1\n"
    return cleaned


def _without_secrets(words: Iterable[Any]) -> list[Any]:
    """Blank what follows an option that takes a secret, in an argv."""
    kept: list[Any] = []
    for word in words:
        option, separator, _ = str(word).partition("=")
        if kept and isinstance(kept[-1], str) and SECRET_OPTION.fullmatch(kept[-1]):
            kept.append("…")
        elif separator and SECRET_OPTION.fullmatch(option):
            kept.append(f"{option}=…")
        else:
            kept.append(word)
    return kept


def _without_serial(config: bytes) -> bytes:
    """Zero the serial number in a configuration space. Source: PCI Express Base Specification 5.0, 7.9.3."""
    cleaned, offset, seen = bytearray(config), EXTENDED, set()
    while EXTENDED <= offset <= len(config) - 4 and offset not in seen:
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            break
        if header & 0xFFFF == SERIAL_EXTENSION:
            cleaned[offset + 4 : offset + 12] = bytes(len(cleaned[offset + 4 : offset + 12]))
        seen.add(offset)
        offset = header >> 20
    return bytes(cleaned)
