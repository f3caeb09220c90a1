"""What dpkg and apt say: installed packages, versions and their order, simulated runs. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

from ansible.module_utils.aerie.errors import AerieError

QUERY = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}\t${Package}\t${Architecture}\t${Version}\n")

UNFINISHED = {
    "H": "half-installed",
    "U": "unpacked, not configured",
    "F": "half-configured",
    "W": "waits for triggers",
    "t": "has triggers pending",
}


@dataclass(frozen=True)
class Package:
    """One package that dpkg knows. Source: dpkg-query(1), db:Status-Abbrev."""

    name: str  # with its architecture where that is not the host's own
    version: str
    selection: str  # i install, h hold, r deinstall, p purge
    state: str  # i installed, c configuration files only, n not installed, else a key of UNFINISHED
    needs_reinstallation: bool

    @property
    def installed(self) -> bool:
        return self.state not in "nc"

    @property
    def held(self) -> bool:
        return self.selection == "h"

    @property
    def trouble(self) -> str | None:
        """What is unfinished about it."""
        return "must be installed again" if self.needs_reinstallation else UNFINISHED.get(self.state)


@dataclass(frozen=True)
class Move:
    """One package that changes: from a version, None for new, to one, None for removed."""

    name: str
    before: str | None
    after: str | None

    @property
    def is_downgrade(self) -> bool:
        return self.before is not None and self.after is not None and compare(self.after, self.before) < 0

    def __str__(self) -> str:
        return f"{self.name} {self.before or '(not installed)'} -> {self.after or '(removed)'}"


def parse_packages(text: str, architecture: str) -> dict[str, Package]:
    """Return what `QUERY` printed, by name; packages of which nothing is left are left out."""
    packages = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != 4:
            raise AerieError(f"dpkg-query printed a line that is no package's: {line[:120]!r}: look at dpkg-query --show on that host")
        abbreviation, name, own, version = fields
        if abbreviation[1:2] == "n":
            continue
        qualified = name if own in (architecture, "all", "") else f"{name}:{own}"
        packages[qualified] = Package(qualified, version, abbreviation[:1], abbreviation[1:2], abbreviation[2:3] == "R")
    return packages


def parse_simulation(text: str) -> list[Move]:
    """Return what `apt-get --simulate` would move.

    Its lines: ``Inst name [old] (new origin [arch])``, ``Remv name [old]``, ``Purg name [old]``; Conf lines move nothing.
    """
    moves: dict[str, Move] = {}
    for line in text.splitlines():
        if found := re.match(r"Inst (\S+) (?:\[([^\]]+)\] )?\((\S+) ", line):
            name, before, after = found.groups()
            removed = moves.get(name)  # removed and put back in one run, as apt orders conflicts
            moves[name] = Move(name, before or (removed.before if removed else None), after)
        elif found := re.match(r"(?:Remv|Purg) (\S+) \[([^\]]+)\]", line):
            moves.setdefault(found.group(1), Move(found.group(1), found.group(2), None))
    return [move for move in moves.values() if move.before != move.after]


def parse_madison(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return what `apt-cache madison` offers: (version, source) by name, newest first, sources of code left out."""
    offers: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 3 and not cells[2].endswith(" Sources"):
            offers.setdefault(cells[0], []).append((cells[1], cells[2]))
    return offers


def upstream(version: str) -> str:
    """Return the upstream part of a version: `580.105.08` of `580.105.08-1ubuntu1`."""
    return _split(version)[1]


def matches(version: str, wanted: str) -> bool:
    """Say whether a version is the wanted one, or begins with it up to a separator: `580` is of 580.105.08-1, `58` is not."""
    return version == wanted or (version.startswith(wanted) and version[len(wanted)] in ".-+~")


def compare(one: str, other: str) -> int:
    """Return how two versions are ordered: negative, zero or positive. Source: deb-version(7)."""
    return next((order for order in map(_compare_part, _split(one), _split(other)) if order), 0)


def _split(version: str) -> tuple[str, str, str]:
    epoch, separator, rest = version.partition(":")
    if not separator:
        epoch, rest = "0", version
    before, _, revision = rest.rpartition("-")
    return (epoch, before, revision) if before else (epoch, rest, "0")


def _compare_part(one: str, other: str) -> int:
    """Compare text and number in turns; `~` sorts before everything, the end included, and letters before other signs."""
    pairs = zip_longest(re.findall(r"(\D*)(\d*)", one), re.findall(r"(\D*)(\d*)", other), fillvalue=("", ""))
    for (text, number), (other_text, other_number) in pairs:
        for sign, other_sign in zip_longest(text, other_text, fillvalue=""):
            if difference := _weight(sign) - _weight(other_sign):
                return difference
        if difference := int(number or 0) - int(other_number or 0):
            return difference
    return 0


def _weight(sign: str) -> int:
    if sign == "~":
        return -1
    if not sign:
        return 0
    return ord(sign) if sign.isalpha() else ord(sign) + 256
