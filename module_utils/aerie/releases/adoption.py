"""Adoption: a Python of the host with its packages and its SGLang, or a checkout of SGLang, used as they are.

Standard library only: this runs on hosts. Nothing here writes: what is adopted is only looked at, by one survey program that
the adopted Python runs itself. It imports neither SGLang nor torch.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash, sha256_file
from ansible.module_utils.aerie.patching.source_tree import GIT, RECORD, SourceTree
from ansible.module_utils.aerie.releases import environment as environments
from ansible.module_utils.aerie.releases.environment import Interpreter
from ansible.module_utils.aerie.words import listing, tail

PACKAGE = "sglang"
ENVIRONMENT_SETTING = "sglang_release_adopt_environment"
TREE_SETTING = "sglang_release_adopt"
SHOWN_CHANGES = 12
SHOWN_DIFF_LINES = 60
SHOWN_FILES = 5

SURVEY_PROGRAM = r"""
import importlib.metadata, importlib.util, json, os, re, site, sys, sysconfig

def origin(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None

standard = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}

def holds_packages(entry):
    name = os.path.basename(entry)
    return os.path.exists(entry) and entry not in standard and name != "lib-dynload" and not re.match(r"python\d+\.zip$", name)

distributions, sglang = {}, []
for one in importlib.metadata.distributions():
    try:
        name, version = one.metadata["Name"], one.version
    except Exception:
        continue
    if not name or not version:
        continue
    name = re.sub(r"[-_.]+", "-", name).lower()
    distributions.setdefault(name, version)
    if name == "sglang":
        sglang.append({"path": str(getattr(one, "_path", "")), "version": version, "direct_url": one.read_text("direct_url.json")})
search_path = [entry for entry in dict.fromkeys(sys.path) if holds_packages(entry)]
print(json.dumps({
    "python": sys.executable,
    "version": ".".join(map(str, sys.version_info[:3])),
    "venv": importlib.util.find_spec("venv") is not None,
    "scripts": sysconfig.get_path("scripts"),
    "search_path": search_path,
    "site_directories": [entry for entry in site.getsitepackages() if entry in search_path],
    "distributions": distributions,
    "sglang_distributions": sglang,
    "sglang": origin("sglang"),
    "torch": origin("torch"),
}))
"""
"""Run as ``python -I -B -c SURVEY_PROGRAM``, by any Python that SGLang runs on: says what that Python has."""


@dataclass(frozen=True)
class Metadata:
    """What an installer wrote about an installation of SGLang; ``source`` is the directory that an editable one points to."""

    path: Path
    version: str
    source: Path | None

    def belongs_to(self, root: Path) -> bool:
        """Say whether it speaks of the package below ``root``: because it lies beside it, or points to it."""
        return root.resolve() == self.path.parent.resolve() or (self.source is not None and root.resolve().is_relative_to(self.source))


@dataclass(frozen=True)
class Survey:
    """A Python of the host and what it would import. ``sglang`` and ``torch`` are the files of these packages, or None."""

    python: Path
    version: str
    has_venv: bool
    programs: Path
    search_path: tuple[str, ...]
    site_directories: tuple[str, ...]
    distributions: Mapping[str, str]
    metadata: tuple[Metadata, ...]
    sglang: Path | None
    torch: Path | None

    @property
    def torch_build(self) -> Mapping[str, Any]:
        """What torch says of itself: ``__version__``, and ``cuda`` and ``hip``, each null in a build for another kind of machine."""
        assert self.torch is not None
        return environments.assignments((self.torch.parent / "version.py").read_text())

    @property
    def environment_id(self) -> str:
        """The environment's name: another path, Python or package makes it another environment."""
        return f"adopted-{canonical_hash(self.fingerprint())[:12]}"

    def fingerprint(self) -> dict[str, Any]:
        """Return all that the environment is named after, to be kept beside a release."""
        return {
            "python": str(self.python),
            "python_version": self.version,
            "torch_version": str(self.torch_build["__version__"]),
            "distributions": dict(sorted(self.distributions.items())),
        }


@dataclass(frozen=True)
class Package:
    """An adopted SGLang: ``root`` is the directory that holds the package.

    ``parts`` are the directories below it that a copy consists of. ``sha256`` stands for all of their content; of a tree, which
    changes in place, for its path and commit.
    """

    root: Path
    version: str
    adopted: str
    sha256: str
    commit: str | None
    metadata: Metadata | None = None
    parts: tuple[str, ...] = (PACKAGE,)
    notes: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return it as modules hand it on."""
        return {"path": str(self.root), "sha256": self.sha256, "adopted": self.adopted, "commit": self.commit}


def survey(name: str, setting: str = ENVIRONMENT_SETTING) -> Survey:
    """Return what the Python called ``name`` has; raise when there is none, or it does not run."""
    found = shutil.which(name)
    if found is None:
        inside = f": name the Python in it, such as {Path(name) / 'bin/python'}" if Path(name).is_dir() else ""
        what = "is a directory" if inside else "is no program on this host: correct it, or leave it out to install an environment"
        raise AerieError(f"{setting}: {name} {what}{inside}")
    answer = environments.run([found, "-I", "-B", "-c", SURVEY_PROGRAM])
    try:
        facts = json.loads(answer.stdout.splitlines()[-1])  # what a site's own start-up prints comes before
    except (ValueError, IndexError):
        raise AerieError(f"{setting}: {found} does not run as a Python:\n{tail(answer.stderr or answer.stdout, 5)}") from None
    return Survey(
        python=Path(facts["python"]),
        version=facts["version"],
        has_venv=facts["venv"],
        programs=Path(facts["scripts"]),
        search_path=tuple(facts["search_path"]),
        site_directories=tuple(facts["site_directories"]),
        distributions=facts["distributions"],
        metadata=tuple(Metadata(Path(one["path"]), one["version"], _source(one["direct_url"])) for one in facts["sglang_distributions"]),
        sglang=Path(facts["sglang"]) if facts["sglang"] else None,
        torch=Path(facts["torch"]) if facts["torch"] else None,
    )


def check(found: Survey, profile: str) -> list[str]:
    """Return what is worth a warning; raise with all that keeps this Python from serving with ``profile``."""
    problems, notes = [], []
    if not found.has_venv:
        minor = ".".join(found.version.split(".")[:2])
        problems.append(f"it has no module venv, and releases are made with it: install it (Debian and Ubuntu: python{minor}-venv)")
    if found.torch is None:
        problems.append("it has no torch, so it can't run SGLang: install it there, or adopt another Python")
    else:
        build = found.torch_build
        version, cuda = build["__version__"], build.get("cuda")
        if profile == "cuda" and cuda is None:
            problems.append(f"its torch {version} is no build for CUDA, and profile cuda needs one: adopt a Python that has it")
        if profile == "cpu" and cuda is not None:
            notes.append(f"{found.python}: torch {version} is a build for CUDA {cuda}; profile cpu uses no GPU all the same")
    raise_all(problems, f"{found.python} can't be adopted")
    return notes


def installed(found: Survey, asked: str | None = None) -> Package:
    """Return the SGLang that the surveyed Python imports, to be copied; raise when its pristine files can't be known.

    ``asked`` is the version that it must be, if any.
    """
    if found.sglang is None:
        raise AerieError(
            f"{found.python} has no SGLang (the user's own packages and PYTHONPATH don't count): "
            f"correct {ENVIRONMENT_SETTING}, or set {TREE_SETTING} to a checkout"
        )
    root = found.sglang.parent.parent
    metadata = next((one for one in found.metadata if one.belongs_to(root)), None)
    if metadata is None:
        others = f" (there is {listing(str(one.path) for one in found.metadata)})" if found.metadata else ""
        raise AerieError(
            f"{found.python} imports SGLang from {root}, and no metadata tells its version{others}: install it there with pip, "
            f"or set {TREE_SETTING} to it"
        )
    sources = _sources(root, metadata)
    version = sources.version.text
    _refuse_other_version(version, asked, str(root))
    parts: tuple[str, ...] = (PACKAGE,)
    if sources.origin == RECORD:
        parts = tuple(sorted({name.split("/")[0] for name in sources.record if _is_part(name)}))
    files = contents(root, parts)
    if sources.origin == GIT:
        _refuse_edited(sources)
        notes = _told(
            root, (name for name in files if name.endswith(".py") and name not in sources.files), "aren't committed, and are copied"
        )
    else:
        edited = (name for name in sources.files if name in files and files[name] != sources.recorded(name))
        notes = _told(root, edited, f"differ from SGLang {version} as it was installed: a patch set that changes one is refused")
    return Package(root, version, "environment", canonical_hash(files), sources.commit, metadata, parts, notes)


def tree(found: Survey, path: str, asked: str | None = None) -> Package:
    """Return the checkout at ``path``, to be used in place; raise when it is none, or nothing tells its pristine files."""
    root = Path(path)
    if not (root / PACKAGE / "__init__.py").is_file():
        candidates = (root.parent, root / "python", root / PACKAGE / "python")
        hint = next((f": did you mean {one}?" for one in candidates if (one / PACKAGE / "__init__.py").is_file()), "")
        raise AerieError(
            f"{TREE_SETTING}: {path} does not hold the package {PACKAGE}{hint or ', as the directory python of a checkout does'}"
        )
    metadata = next((one for one in found.metadata if one.belongs_to(root)), None)
    sources = _sources(root, metadata, asked)
    version = sources.version.text
    _refuse_other_version(version, asked, path)
    return Package(root, version, "tree", canonical_hash({"tree": path, "commit": sources.commit}), sources.commit, metadata)


def describe(found: Survey, package: Package, profile: str) -> dict[str, Any]:
    """Return what other modules need to know, as of an environment of our own."""
    prefix = found.python.parent.parent if found.python.parent.name == "bin" else found.programs.parent
    return {
        "version": package.version,
        "profile": profile,
        "environment": {
            "id": found.environment_id,
            "path": str(prefix),
            "site_packages": (found.site_directories or found.search_path)[0],
            "python": str(found.python),
            "python_version": found.version,
            "torch_version": str(found.torch_build["__version__"]),
            "adopted": True,
            "search_path": list(found.search_path),
        },
        "package": package.describe(),
    }


def drift(before: Mapping[str, Any]) -> str | None:
    """Say how an adopted environment differs from what it was (its :meth:`Survey.fingerprint`), or None."""
    try:
        found = survey(str(before["python"]))
    except AerieError:
        return f"the adopted Python {before['python']} is gone"
    if found.torch is None:
        return f"the adopted Python {before['python']} has no torch any more"
    changed = list(differences(before, found.fingerprint()))
    if not changed:
        return None
    more = [f"{len(changed) - SHOWN_CHANGES} more"] if len(changed) > SHOWN_CHANGES else []
    return f"the adopted environment of {before['python']} was changed: {listing(changed[:SHOWN_CHANGES] + more)}"


def moved(root: Path, commit: str | None) -> str | None:
    """Say that an adopted tree is gone or at another commit than ``commit``, or None."""
    try:
        now = SourceTree.open(root, PACKAGE, "0").commit
    except AerieError as error:
        return f"the adopted tree can't be used: {error}"
    return None if now == commit else f"the adopted tree {root} was at commit {commit or 'none'}, and is at {now or 'none'}"


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield each difference of two fingerprints, such as ``torch 2.9.1 to 2.11.0``."""
    for key, name in (("python_version", "Python"), ("torch_version", "torch")):
        if before[key] != after[key]:
            yield f"{name} {before[key]} to {after[key]}"
    old, new = before["distributions"], after["distributions"]
    for name in sorted(set(old) | set(new)):
        if name == "torch" and name in old and name in new:
            continue  # told above, with the kind of its build
        if name not in new:
            yield f"{name} {old[name]} removed"
        elif name not in old:
            yield f"{name} {new[name]} added"
        elif old[name] != new[name]:
            yield f"{name} {old[name]} to {new[name]}"


def supervisor_interpreter(names: Sequence[str]) -> Interpreter:
    """Return the first of ``names`` that can make environments; supervisor is never installed into an adopted one."""
    problems = []
    for name in dict.fromkeys(names):
        try:
            return environments.find_interpreter(name)
        except AerieError as error:
            problems.append(str(error))
    raise AerieError(f"supervisor needs a Python that can make virtual environments: {problems[0]}")


def contents(root: Path, parts: Sequence[str]) -> dict[str, str]:
    """Return the sha256 of every file of a package's ``parts`` by name; compiled files are left out."""
    found = {}
    for part in parts:
        for directory, directories, files in os.walk(root / part, followlinks=True):
            directories[:] = [name for name in directories if name != "__pycache__"]
            for name in files:
                path = Path(directory) / name
                if path.suffix != ".pyc" and path.is_file():
                    found[path.relative_to(root).as_posix()] = sha256_file(path)
    return found


def sources_of(package: Package) -> SourceTree:
    """Return what tells the pristine files of an adopted SGLang."""
    return SourceTree.open(package.root, PACKAGE, package.version)


def _sources(root: Path, metadata: Metadata | None, asked: str | None = None) -> SourceTree:
    """Open the sources below ``root``; their version is what the metadata says, else what they say themselves, else ``asked``."""
    said = metadata.version if metadata and not metadata.version.startswith("0.0") else None
    try:
        found = SourceTree.open(root, PACKAGE, said)
    except AerieError as error:
        if said:
            raise
        if asked is None:
            raise AerieError(f"{error} (set sglang_release_version)") from error
        found = SourceTree.open(root, PACKAGE, asked)
    if found.origin not in (RECORD, GIT):
        raise AerieError(
            f"the SGLang at {root} is neither in a git checkout that has it committed, nor has it a RECORD of its files, so that nobody "
            "knows what they were: install it with pip, or git init and commit the sources"
        )
    return found


def _refuse_edited(sources: SourceTree) -> None:
    """Raise with the difference when files of a checkout are not as they were committed."""
    edited = sources.edited()
    if not edited:
        return
    lines: list[str] = []
    for name in edited:
        before, after = ((content or b"").decode(errors="replace").splitlines() for content in (sources.pristine(name), sources.read(name)))
        lines += difflib.unified_diff(before, after, f"{name} (HEAD)", name, lineterm="")
    cut = f"\n    … {len(lines) - SHOWN_DIFF_LINES} lines more" if len(lines) > SHOWN_DIFF_LINES else ""
    shown = "\n".join(f"    {line}" for line in lines[:SHOWN_DIFF_LINES])
    raise AerieError(
        f"{sources.path}: {listing(edited)} changed and not committed, so that a copy would have no commit to be known by: commit or "
        f"stash the changes, or set {TREE_SETTING} to use the tree in place\n{shown}{cut}"
    )


def _told(root: Path, names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return one note about the files ``names``, or none."""
    found = sorted(names)
    if not found:
        return ()
    more = [f"{len(found) - SHOWN_FILES} more"] if len(found) > SHOWN_FILES else []
    return (f"{root}: {listing(found[:SHOWN_FILES] + more)} {what}",)


def _is_part(name: str) -> bool:
    """Say whether a file of a RECORD is SGLang's: in its package, or in the libraries that a wheel may have beside it."""
    return name.startswith((f"{PACKAGE}/", f"{PACKAGE}.libs/"))


def _source(direct_url: str | None) -> Path | None:
    """Return the directory that an editable installation points to. Source: packaging.python.org, Recording the Direct URL Origin."""
    try:
        facts = json.loads(direct_url or "{}")
    except ValueError:
        return None
    if not facts.get("dir_info", {}).get("editable"):
        return None
    url = urlsplit(facts.get("url", ""))
    return Path(unquote(url.path)).resolve() if url.scheme == "file" else None


def _refuse_other_version(there: str, asked: str | None, where: str) -> None:
    if asked is not None and asked not in (there, there.partition("+")[0]):
        raise AerieError(
            f"sglang_release_version is {asked}, and the adopted SGLang at {where} is {there}: leave the version out, or adopt another"
        )
