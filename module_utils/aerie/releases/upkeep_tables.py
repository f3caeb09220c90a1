"""What is patched and what was freed, as plain text for a terminal: at most 100 columns, safe to print whatever a name contains."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.aerie.measuring.terminal_table import WIDTH, clean, cut
from ansible.module_utils.aerie.patching.patch_status import MISSING, describe_sets
from ansible.module_utils.aerie.words import listing

ORIGINALS = {"kept": "kept", "damaged": "DAMAGED", "missing": "MISSING", "in git": "in git", "not kept": "–", "none": "–"}
MOST_ROWS = 40
MOST_MISSING = 8
"""Of published files that no patch set touches: an image that was trimmed lacks hundreds."""


def status(host: str, releases: Sequence[Mapping[str, Any]], width: int = WIDTH) -> str:
    """Return what :func:`patch_status.survey` found on ``host``."""
    if not releases:
        return f"{clean(host)}: no release yet\n"
    return "\n".join(line.rstrip() for one in releases for line in (*_release(host, one, width), "")) + "\n"


def _release(host: str, release: Mapping[str, Any], width: int) -> list[str]:
    adopted = {"tree": "an adopted tree", "environment": "an adopted environment"}.get(str(release["adopted"]))
    words = [*release["links"], "verified" if release["verified"] else "not verified", *([adopted] if adopted else [])]
    lines = [cut(f"{host}: release {release['id']} ({', '.join(words)})", width), "─" * width]
    lines += _wrap(_facts(release), width)
    files, drift, more = _fewer(release["files"], release["drift"])
    if files:
        rows = [(one["path"], describe_sets(one), str(len(one["hooks"]) or "–"), _original(one)) for one in files]
        lines += ["", *table(("file", "state", "hooks", "original"), rows, width, right=(2,))]
        if len(files) < len(release["files"]):
            lines.append(f"… and {len(release['files']) - len(files)} more files{more}")
    for one in release["backups_beside"][:MOST_ROWS]:
        lines += _wrap(f"a copy, not Aerie's, lies beside: {one['path']}" + (f", which {one['words']}" if one["words"] else ""), width)
    interrupted = release["interrupted"]
    for one in drift:
        lines += _wrap(f"! {one}", width)
    if len(drift) < len(release["drift"]):
        lines.append(f"  … and {len(release['drift']) - len(drift)} more{more}")
    if interrupted:
        lines += _wrap(f"! {interrupted['next']}", width)
    return lines


def _fewer(files: Sequence[Mapping[str, Any]], drift: Sequence[str]) -> tuple[list[Mapping[str, Any]], list[str], str]:
    """Return the files and the words of drift that are shown, those of patch sets first, and what most of the others are."""
    gone = [one for one in files if one["state"] == MISSING and not one["sets"]]
    hidden = {one["path"] for one in gone[MOST_MISSING:]}
    unsaid = {f"{one['path']} {one['drift']}" for one in gone[MOST_MISSING:]}
    chosen = sorted((one for one in files if one["path"] not in hidden), key=lambda one: not one["sets"])
    more = ", missing though they were published" if hidden else ""
    return chosen[:MOST_ROWS], [one for one in drift if one not in unsaid][:MOST_ROWS], more


def _facts(release: Mapping[str, Any]) -> str:
    if release["version"] is None:
        return f"asked for: {listing(release['sets'])}"
    facts = [f"SGLang {release['version']}" + (f" at commit {release['commit'][:12]}" if release["commit"] else "")]
    facts.append(f"patch sets {listing(release['applied'])}" + (f" since {release['since']}" if release["since"] else ""))
    missing = [name for name in release["sets"] if name not in release["applied"]]
    if missing:
        facts.append(f"made for {listing(missing)} too, which it needs no more or has not got yet")
    if release["pristine"] is not None:
        facts.append(f"{release['pristine']} Python files as published")
    if release["applied"]:
        facts.append(f"originals are on {'the same' if release['store_same_filesystem'] else 'another'} file system")
    return "; ".join(facts)


def _original(file: Mapping[str, Any]) -> str:
    words = ORIGINALS[file["original"]["state"]] + (", an edit" if file["original"].get("accepted") else "")
    copied = file["original"].get("copied")
    return words if copied is None else f"{words}, {'copied' if copied else 'NOT copied'}"


def pruned(host: str, found: Mapping[str, Any], *, done: bool, width: int = WIDTH) -> str:
    """Return what :func:`prune.as_result` says of ``host``; ``done``: it is gone already."""
    size = human(found["freed_bytes"])
    lines = [f"{clean(host)}: " + (f"{size} {'freed' if done else 'to free'}" if found["removed"] else "nothing to free")]
    if found["removed"]:
        rows = [(_named(item), human(item["bytes"]), item["why"]) for item in found["removed"]]
        lines += ["─" * width, *table(("what", "size", "why"), rows, width, right=(1,))]
    if found["kept"]:
        lines += ["", *table(("stays", "why"), [(f"{one['kind']} {_short(one)}", one["why"]) for one in found["kept"]], width)]
    for note in found["notes"]:
        lines += _wrap(f"! {note}", width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _named(item: Mapping[str, Any]) -> str:
    return f"{item['files']} kept files" if item["files"] > 1 else f"{item['kind']} {_short(item)}"


def _short(item: Mapping[str, Any]) -> str:
    """Return the path without the part that its kind says already."""
    path = str(item["path"])
    return path.removeprefix(f"{item['kind']}s/")


def human(size: int) -> str:
    """Return a size for a person: three digits and a unit."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f} {units[0]}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int = WIDTH, right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table of text; the widest columns give way where ``width`` is short, ``right`` ones are set to the right."""
    cells = [[clean(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widths[widths.index(max(widths))] -= 1
    return [
        "  ".join(
            _fit(cell, room).rjust(room) if column in right else _fit(cell, room).ljust(room)
            for column, (cell, room) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _fit(cell: str, room: int) -> str:
    """Shorten a path at its start, where it says least, and other words at their end."""
    return f"…{cell[-(room - 1) :]}" if len(cell) > room and "/" in cell and " " not in cell else cut(cell, room)


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(clean(text), width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
