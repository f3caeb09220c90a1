#!/usr/bin/env python3
"""Adopt a release of SGLang: apply every patch set to its wheel, and say what moved since the newest release that is known.

A release is known when the patch sets' hashes.json have it. ``--write`` adds this one; ``--known`` writes those of all known releases anew,
as is needed after a hook was changed. Exits with 0 when every set that is for the release applies, with 1 when one does not.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "plugins"))
from aerie_controller import patch_sets  # noqa: E402  makes the cores importable

from ansible.module_utils.aerie.patching import anchors  # noqa: E402  isort: skip
from ansible.module_utils.aerie.errors import AerieError  # noqa: E402
from ansible.module_utils.aerie.patching.patch_set import Hook, PatchSet, Step  # noqa: E402
from ansible.module_utils.aerie.specifiers import Version  # noqa: E402
from ansible.module_utils.aerie.words import listing  # noqa: E402

PACKAGE = "sglang"
WHEELS = PROJECT / ".cache/wheels"
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "any")
PYTHON = "3.12"  # the wheels of one release differ between Pythons in what is compiled, not in their sources
SPECULATIVE = "sglang/srt/speculative/"
ARGUMENTS = "sglang/srt/server_args.py"
FIELDS = "sglang/srt/arg_groups/fields/"
SPECULATION = re.compile(r"(^|_)spec(ulative)?(_|$)")
FLAG = re.compile(r"--[a-z0-9-]+")
WIDTH = 100
DIFF_LINES = 40


# Releases


def fetch(package: str, version: str, directory: Path = WHEELS, python: str | None = None) -> Path:
    """Return a wheel of ``package``, from ``directory`` or else by pip with its own settings, for ``python`` (such as 3.11) if given."""
    tag = f"cp{python.replace('.', '')}-" if python else ""
    pattern = f"{package}-{version}-{tag}*.whl"
    found = sorted(directory.glob(pattern))
    if found:
        return found[0]
    directory.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python or PYTHON, *platforms, "--dest", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, f"{package}=={version}"], capture_output=True, text=True, check=False
    )
    found = sorted(directory.glob(pattern))
    if not found:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise AerieError(f"{package} {version} can't be had: {reason} (or put its wheel into {directory})")
    return found[0]


class Release:
    """The sources in one wheel."""

    def __init__(self, version: str, wheel: Path) -> None:
        self.version = Version.parse(version)
        self.archive = zipfile.ZipFile(wheel)
        self.names = {name for name in self.archive.namelist() if name.endswith(".py")}

    def __enter__(self) -> Release:
        return self

    def __exit__(self, *_error: object) -> None:
        self.archive.close()

    def read(self, name: str) -> bytes | None:
        return self.archive.read(name) if name in self.names else None

    def below(self, directory: str) -> dict[str, bytes]:
        return {name: self.archive.read(name) for name in sorted(self.names) if name.startswith(directory)}

    def __str__(self) -> str:
        return self.version.text


# What hashes.json have


def hashes_file(patches: Path, name: str) -> Path:
    return patches / name / "hashes.json"


def read_hashes(patches: Path, name: str) -> dict[str, dict[str, str]]:
    """Return ``{version: {path: sha256 of the patched file}}`` of the set ``name``."""
    path = hashes_file(patches, name)
    return json.loads(path.read_text()) if path.exists() else {}


def write_hashes(patches: Path, name: str, hashes: Mapping[str, Mapping[str, str]]) -> None:
    """Write them, the versions in their order and the paths in the alphabet's."""
    ordered = {version: dict(sorted(hashes[version].items())) for version in sorted(hashes, key=Version.parse)}
    hashes_file(patches, name).write_text(json.dumps(ordered, indent=2) + "\n")


def known_versions(patches: Path) -> list[str]:
    """Return the versions that any set's hashes.json has, oldest first."""
    return sorted({version for name in patch_sets.available(patches) for version in read_hashes(patches, name)}, key=Version.parse)


def is_for(one: PatchSet, version: Version) -> bool:
    return version in one.versions and not (one.upstream_since is not None and version >= one.upstream_since)


def by_file(hooks: Iterable[Hook]) -> dict[str, list[Hook]]:
    files: dict[str, list[Hook]] = {}
    for hook in hooks:
        files.setdefault(hook.file, []).append(hook)
    return dict(sorted(files.items()))


def patched(hooks: Iterable[Hook], release: Release) -> tuple[dict[str, str], list[str]]:
    """Return the sha256 of each file with ``hooks`` in it, and the problems that stood in the way."""
    hashes, problems = {}, []
    for file, its_hooks in by_file(hooks).items():
        original = release.read(file)
        if original is None:
            problems.append(f"{file} is not in {release}")
            continue
        derived, found = anchors.derive(original, its_hooks, file)
        problems += found
        if derived is not None:
            hashes[file] = hashlib.sha256(derived.data).hexdigest()
    return hashes, problems


# Comparing two releases


@dataclass(frozen=True)
class Change:
    """Lines that a text gained and lost."""

    added: int
    removed: int

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __str__(self) -> str:
        return f"+{self.added} −{self.removed}"


def change(before: Sequence[str], now: Sequence[str]) -> Change:
    lines = list(difflib.unified_diff(before, now, n=0, lineterm=""))[2:]
    return Change(sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines))


def short_diff(before: Sequence[str], now: Sequence[str]) -> list[str]:
    lines = [line for line in difflib.unified_diff(before, now, n=2, lineterm="") if not line.startswith(("---", "+++"))]
    more = len(lines) - DIFF_LINES
    return lines if more <= 0 else [*lines[:DIFF_LINES], f"… and {more} more lines"]


def surrounding(source: bytes | None, steps: Sequence[Step]) -> tuple[str, list[str] | None]:
    """Return the name and the lines of the innermost class or function that ``steps`` lead into; None where it isn't there (once)."""
    path = [step.value for step in steps if step.kind in ("class", "function")]
    name = ".".join(path)
    if source is None:
        return name, None
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for word in path:
        found = [one for one in body if isinstance(one, anchors.DEFINITIONS) and one.name == word]
        if len(found) != 1:
            return name, None
        node, body = found[0], found[0].body
    lines = source.decode().splitlines()
    return name, lines if node is None else lines[node.lineno - 1 : node.end_lineno]


def elsewhere(release: Release, name: str) -> list[str]:
    """Where functions or classes of that last name are now, among the files about speculation."""
    return [
        f"{path}:{node.lineno}"
        for path, source in release.below(SPECULATIVE).items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, anchors.DEFINITIONS) and node.name == name.rpartition(".")[2]
    ]


@dataclass(frozen=True)
class Arguments:
    """A release's server arguments, each with its default, and which of them are about speculation."""

    defaults: Mapping[str, str]
    speculative: frozenset[str]

    @classmethod
    def of(cls, release: Release) -> Arguments:
        """Read them in whichever form this release writes them down.

        They are annotated fields: of ServerArgs, or from 0.5.20 of classes below arg_groups/fields, where spec.py is all about speculation.
        A flag that is no field, such as an older name of one, is written out there as it is typed.
        """
        defaults: dict[str, str] = {}
        speculative = set()
        for path, source in {ARGUMENTS: release.read(ARGUMENTS) or b"", **release.below(FIELDS)}.items():
            tree = ast.parse(source)
            for flag in ast.walk(tree):
                if isinstance(flag, ast.Constant) and isinstance(flag.value, str) and FLAG.fullmatch(flag.value):
                    defaults.setdefault(flag.value.removeprefix("--").replace("-", "_"), "that of another name")
            for node in tree.body:
                if not isinstance(node, ast.ClassDef) or (path == ARGUMENTS and node.name != "ServerArgs"):
                    continue
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and not field.target.id.startswith("_"):
                        defaults[field.target.id] = ast.unparse(field.value) if field.value else "none, required"
                        if path == f"{FIELDS}spec.py":
                            speculative.add(field.target.id)
        return cls(defaults, frozenset(speculative | {name for name in defaults if SPECULATION.search(name)}))


# The report


class Report:
    """Lines for a terminal, and what there is to do at the end."""

    def __init__(self) -> None:
        self.to_do: list[str] = []

    @staticmethod
    def say(text: str = "", indent: int = 0) -> None:
        """A line, shortened where it would be too wide."""
        line = " " * indent + text
        print(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…")

    @staticmethod
    def prose(text: str, indent: int = 0, bullet: str = "") -> None:
        print(textwrap.fill(text, WIDTH, initial_indent=" " * indent + bullet, subsequent_indent=" " * (indent + len(bullet))))

    def todo(self, text: str) -> None:
        if text not in self.to_do:
            self.to_do.append(text)


def report_set(one: PatchSet, before: Release | None, now: Release, report: Report) -> bool:
    """Say for each hook of ``one`` where it was and is; return whether all were found and the result compiles."""
    hooks = one.hooks_for(now.version)
    hashes, problems = patched(hooks, now)
    report.say()
    if problems:
        report.say(f"{one.name}: DOES NOT APPLY to {now}")
    else:
        report.say(f"{one.name}: applies to {now}: {len(hooks)} hooks in {len(hashes)} files")
    lost = 0
    for file, its_hooks in by_file(hooks).items():
        report.say(file, 2)
        source = now.read(file)
        old_source = before.read(file) if before else None
        old_lines = {hook.name: line for hook, line in anchors.locate(old_source, its_hooks)} if old_source else {}
        if source is None:
            report.say(f"GONE, and {len(its_hooks)} hooks with it", 4)
            lost += len(its_hooks)
            report.todo(f"{file} is gone: find where what its hooks were for happens now")
            continue
        for hook, line in anchors.locate(source, its_hooks):
            old = old_lines.get(hook.name)
            was = str(old) if isinstance(old, int) and before is not None and before.version in hook.versions else "–"
            if isinstance(line, int):
                report.say(f"line {was:>5} → {line:<5} {hook.name}", 4)
                note_change(hook, old_source, source, report)
            else:
                lost += 1
                report.say(f"line {was:>5} → LOST  {hook.name}", 4)
                report.prose(str(line), 10)
                show_surroundings(hook, old_source, source, before, now, report)
    compile_problems = [problem for problem in problems if "valid Python" in problem]
    for problem in compile_problems:
        report.prose(problem, 2)
    if lost:
        report.todo(f'{one.name}: {lost} hooks are lost: give each versions: "<{now}", and write for ">={now}" what the new source needs')
    return not problems


def note_change(hook: Hook, old_source: bytes | None, source: bytes, report: Report) -> None:
    name, old = surrounding(old_source, hook.at)
    _, new = surrounding(source, hook.at)
    if old is not None and new is not None and (changed := change(old, new)):
        report.todo(f"{name} in {hook.file} changed ({changed}): are its hooks still in the order of the work?")


def show_surroundings(hook: Hook, old_source: bytes | None, source: bytes, before: Release | None, now: Release, report: Report) -> None:
    name, old = surrounding(old_source, hook.at)
    _, new = surrounding(source, hook.at)
    if new is None:
        there = elsewhere(now, name)
        report.prose(f"{name} is not in this file any more" + (f"; there is {listing(there[:3])}" if there else ""), 10)
    elif old is not None and old != new:
        report.say(f"{name}, {before} → {now}:", 10)
        for line in short_diff(old, new):
            report.say(line, 12)


def report_files(before: Release, now: Release, report: Report) -> None:
    old, new = before.below(SPECULATIVE), now.below(SPECULATIVE)
    lines = {name: (old.get(name, b"").decode().splitlines(), new.get(name, b"").decode().splitlines()) for name in old.keys() | new.keys()}
    changed = {name: difference for name in sorted(old.keys() & new.keys()) if (difference := change(*lines[name]))}
    appeared, vanished = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    report.say()
    equal = len(old.keys() & new.keys()) - len(changed)
    report.say(f"{SPECULATIVE}: {len(appeared)} appeared, {len(vanished)} vanished, {len(changed)} changed, {equal} equal")
    for name in appeared:
        report.say(f"appeared  {name.removeprefix(SPECULATIVE)} ({len(lines[name][1])} lines)", 2)
    for name in vanished:
        report.say(f"vanished  {name.removeprefix(SPECULATIVE)} ({len(lines[name][0])} lines)", 2)
    for name, difference in changed.items():
        report.say(f"changed   {name.removeprefix(SPECULATIVE)} ({difference})", 2)


def report_arguments(before: Release, now: Release, report: Report) -> None:
    old, new = Arguments.of(before), Arguments.of(now)
    names = sorted(old.speculative | new.speculative)
    appeared = [name for name in names if name not in old.defaults]
    vanished = [name for name in names if name not in new.defaults]
    differing = [name for name in names if name in old.defaults and name in new.defaults and old.defaults[name] != new.defaults[name]]
    report.say()
    report.say(
        f"server arguments about speculation: {len(appeared)} appeared, {len(vanished)} vanished, "
        f"{len(differing)} with another default, {len(new.speculative)} in all"
    )
    for name in appeared:
        report.say(f"appeared  {name} (default {new.defaults[name]})", 2)
    for name in vanished:
        report.say(f"vanished  {name}", 2)
        report.todo(f"the server argument {name} vanished: look for it in profiles/, inventory/ and experiments/")
    for name in differing:
        report.say(f"default   {name}: {old.defaults[name]} → {new.defaults[name]}", 2)
        report.todo(f"the default of {name} is another: a baseline that leaves it out is another, too")
    if not new.speculative:
        report.todo(f"no server argument was found in {ARGUMENTS} nor below {FIELDS}: they are written down in a new form")


def adopt(version: str, against: str | None, patches: Path, wheels: Path, write: bool) -> bool:
    """Print the report, and return whether every set that is for ``version`` applies."""
    wanted = Version.parse(version)
    known = known_versions(patches)
    older = [one for one in known if Version.parse(one) < wanted]
    reference = against or (older[-1] if older else None)
    now = Release(version, fetch(PACKAGE, version, wheels))
    before = Release(reference, fetch(PACKAGE, reference, wheels)) if reference else None
    report = Report()
    newest = "" if against else ", the newest before it that is known"
    report.say(f"SGLang {now}" + (f" against {before}{newest}" if before else ": nothing older is known to compare it with"))
    sets = patch_sets.load(patch_sets.available(patches), patches)
    applied = True
    for one in sets:
        if is_for(one, wanted):
            applied = report_set(one, before, now, report) and applied
        elif one.upstream_since is not None and wanted >= one.upstream_since:
            report.say(f"\n{one.name}: {now} has it already (upstream since {one.upstream_since.text})")
        else:
            report.say(f"\n{one.name}: is for {one.versions}, not for {now}")
    if before is not None:
        report_files(before, now, report)
        report_arguments(before, now, report)
    differing = list(stale(sets, now, patches))
    report.say()
    if applied and write:
        for one in sets:
            if is_for(one, wanted):
                write_hashes(patches, one.name, read_hashes(patches, one.name) | {version: patched(one.hooks_for(wanted), now)[0]})
        report.say(f"hashes.json: {now} is known now")
    elif write:
        report.say("hashes.json: nothing was written, as not every set applies")
    elif differing:
        report.say(f"hashes.json of {listing(differing)}: not what comes out for {now}")
    else:
        report.say(f"hashes.json: what comes out for {now} is what is written there")
    if report.to_do:
        report.say("\nWhat to look at")
        for item in report.to_do:
            report.prose(item, 2, "- ")
    report.say(f"\nNext: {next_step(version, applied, known=not differing or write)}")
    return applied


def next_step(version: str, applied: bool, known: bool) -> str:
    if not applied:
        return f"mend what is lost, then make adopt-version VERSION={version} again"
    if not known:
        return f"make adopt-version VERSION={version} WRITE=1"
    return "make test-contract; to deploy it: make lock and versions.yml (docs/reference/versions.md)"


def stale(sets: Iterable[PatchSet], release: Release, patches: Path) -> Iterator[str]:
    """The sets whose hashes.json lack ``release``, or have something else than what comes out."""
    for one in sets:
        recorded = read_hashes(patches, one.name).get(release.version.text)
        if is_for(one, release.version) and patched(one.hooks_for(release.version), release)[0] != recorded:
            yield one.name


def write_known(patches: Path, wheels: Path) -> bool:
    """Write the hashes of every known release anew; return whether every set applies to each that it is for."""
    versions = known_versions(patches)
    releases = [Release(version, fetch(PACKAGE, version, wheels)) for version in versions]
    applied = True
    for one in patch_sets.load(patch_sets.available(patches), patches):
        hashes = {}
        for release in releases:
            if not is_for(one, release.version):
                continue
            hashes[release.version.text], problems = patched(one.hooks_for(release.version), release)
            applied = applied and not problems
            for problem in problems:
                Report.prose(f"{release}: {problem}")
        if applied and hashes != read_hashes(patches, one.name):
            write_hashes(patches, one.name, hashes)
            Report.say(f"{one.name}: wrote the hashes of {len(hashes)} releases")
        elif applied:
            Report.say(f"{one.name}: the hashes of {len(hashes)} releases are as they were")
    return applied


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="the release, such as 0.5.24")
    parser.add_argument("--write", action="store_true", help="add its hashes to patches/*/hashes.json when every set applies")
    parser.add_argument("--against", metavar="VERSION", help="compare with this release instead of the newest older one that is known")
    parser.add_argument("--known", action="store_true", help="write the hashes of all known releases anew, instead")
    parser.add_argument("--patches", type=Path, default=patch_sets.PATCHES, help="the directory of the patch sets")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="where wheels are kept, and looked for first")
    arguments = parser.parse_args(words)
    if arguments.known is (arguments.version is not None):
        parser.error("give a version, such as 0.5.24, or --known")
    try:
        if arguments.known:
            return 0 if write_known(arguments.patches, arguments.wheels) else 1
        return 0 if adopt(arguments.version, arguments.against, arguments.patches, arguments.wheels, arguments.write) else 1
    except AerieError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as when it is piped into head
    sys.exit(main())
