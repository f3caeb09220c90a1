"""What is patched on a host, and what a prune frees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.patching.patch_status import MISSING, describe_sets
from ansible.module_utils.aerie.words import listing

from ..figures import NONE, human
from ..terminal import Part, figures, gap, heading, paragraph, table

ORIGINALS = {
    "kept": "kept",
    "damaged": "DAMAGED",
    "missing": "MISSING",
    "in git": "in git",
    "not kept": NONE,
    "none": NONE,
}
ADOPTED = {"tree": "an adopted tree", "environment": "an adopted environment"}
MOST_ROWS = 40
MOST_MISSING = 8
"""Of published files that no patch set touches: an image that was trimmed lacks hundreds."""


def status(host: str, releases: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return what :func:`patch_status.survey` found on ``host``."""
    if not releases:
        return [paragraph(f"{host}: no release yet")]
    report: list[Part] = []
    for release in releases:
        report += [*_release(host, release), gap()]
    return report


def _release(host: str, release: Mapping[str, Any]) -> Iterator[Part]:
    adopted = ADOPTED.get(str(release["adopted"]))
    verified = "verified" if release["verified"] else "not verified"
    words = [*release["links"], verified, *([adopted] if adopted else [])]
    yield heading(f"{host}: release {release['id']} ({', '.join(words)})")
    yield paragraph(_facts(release), indent=2)
    files, drift, more = _fewer(release["files"], release["drift"])
    if files:
        yield gap()
        rows = [(file["path"], describe_sets(file), str(len(file["hooks"]) or NONE), _original(file)) for file in files]
        yield table(["file", "state", *figures("hooks"), "original"], rows)
        if len(files) < len(release["files"]):
            yield paragraph(f"… and {len(release['files']) - len(files)} more files{more}")
    for backup in release["backups_beside"][:MOST_ROWS]:
        which = f", which {backup['words']}" if backup["words"] else ""
        yield paragraph(f"a copy, not Aerie's, lies beside: {backup['path']}{which}", indent=2)
    for sentence in drift:
        yield paragraph(f"! {sentence}", indent=2, style="warning")
    if len(drift) < len(release["drift"]):
        yield paragraph(f"… and {len(release['drift']) - len(drift)} more{more}", indent=2)
    if release["interrupted"]:
        yield paragraph(f"! {release['interrupted']['next']}", indent=2, style="warning")


def _fewer(files: Sequence[Mapping[str, Any]], drift: Sequence[str]) -> tuple[list[Mapping[str, Any]], list[str], str]:
    """Return the files and sentences of drift that are shown, those of patch sets first.

    The third value says what most of the others are.
    """
    missing = [file for file in files if file["state"] == MISSING and not file["sets"]]
    hidden = {file["path"] for file in missing[MOST_MISSING:]}
    unsaid = {f"{file['path']} {file['drift']}" for file in missing[MOST_MISSING:]}
    chosen = sorted((file for file in files if file["path"] not in hidden), key=lambda file: not file["sets"])
    more = ", missing though they were published" if hidden else ""
    return chosen[:MOST_ROWS], [sentence for sentence in drift if sentence not in unsaid][:MOST_ROWS], more


def _facts(release: Mapping[str, Any]) -> str:
    if release["version"] is None:
        return f"asked for: {listing(release['sets'])}"
    commit = f" at commit {release['commit'][:12]}" if release["commit"] else ""
    since = f" since {release['since']}" if release["since"] else ""
    facts = [f"SGLang {release['version']}{commit}", f"patch sets {listing(release['applied'])}{since}"]
    missing = [name for name in release["sets"] if name not in release["applied"]]
    if missing:
        facts.append(f"made for {listing(missing)} too, which it needs no more or has not got yet")
    if release["pristine"] is not None:
        facts.append(f"{release['pristine']} Python files as published")
    if release["applied"]:
        same = "the same" if release["store_same_filesystem"] else "another"
        facts.append(f"originals are on {same} file system")
    return "; ".join(facts)


def _original(file: Mapping[str, Any]) -> str:
    original = file["original"]
    words = ORIGINALS[original["state"]] + (", an edit" if original.get("accepted") else "")
    copied = original.get("copied")
    return words if copied is None else f"{words}, {'copied' if copied else 'NOT copied'}"


def pruned(host: str, outcome: Mapping[str, Any], *, done: bool) -> list[Part]:
    """Return what :func:`prune.as_result` says of ``host``; ``done``: it is gone already."""
    size = human(outcome["freed_bytes"])
    freed = f"{size} {'freed' if done else 'to free'}" if outcome["removed"] else "nothing to free"
    report = [heading(f"{host}: {freed}") if outcome["removed"] else paragraph(f"{host}: {freed}")]
    if outcome["removed"]:
        rows = [(_named(item), human(item["bytes"]), item["why"]) for item in outcome["removed"]]
        report.append(table(["what", *figures("size"), "why"], rows))
    if outcome["kept"]:
        kept = [(f"{item['kind']} {_short(item)}", item["why"]) for item in outcome["kept"]]
        report += [gap(), table(["stays", "why"], kept)]
    return report + [paragraph(f"! {note}", indent=2, style="warning") for note in outcome["notes"]]


def _named(item: Mapping[str, Any]) -> str:
    return f"{item['files']} kept files" if item["files"] > 1 else f"{item['kind']} {_short(item)}"


def _short(item: Mapping[str, Any]) -> str:
    """Return the path without the part that its kind says already."""
    return str(item["path"]).removeprefix(f"{item['kind']}s/")
