"""Releases: SGLang's own sources on top of a shared environment, named after all that they are made from, never changed.

Standard library only: this runs on hosts. A release is made in three steps: its tree (:func:`make`), patches on it
(another module), and :func:`verify`, without which :func:`switch` does not make it ``current``.

What a release stands on may be adopted. An adopted environment is used as it is, and the release has its own copy of SGLang all
the same. An adopted tree is SGLang itself: its release is a skeleton that imports it, and is one for all patch sets.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash, fsync_dir, read_json, sha256_file, write_atomic, write_json
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.patching.source_tree import read_record
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import adoption, release_file
from ansible.module_utils.aerie.releases import environment as environments
from ansible.module_utils.aerie.words import listing, near, tail

RELEASE = release_file.RELEASE
ARGUMENTS = "server_arguments.json"
ADOPTED = "adopted.json"
PTH = "_aerie_environment.pth"
LINKS, PINS = ("current", "previous"), "pins"
SWITCH = ".switch.json"
"""Below ``releases``, while the links move: where they are going."""
ID = re.compile(r"[0-9][\w.+]*-[0-9a-f]{12}")
LINKED_FROM_BYTES = 1 << 20
SPECULATIVE = "sglang/srt/speculative"
SYSTEM_PROGRAMS = ("/bin", "/usr/bin", "/usr/local/bin")
"""Not linked into a release: they are on every server's search path."""

IMPORTS = ("sglang", "sglang.srt.speculative.eagle_worker_v2")

PROFILE_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_tiny_models",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    },
    "cuda": {"HF_HUB_OFFLINE": "1"},
}
"""What SGLang must be started with to be imported on a host of each profile."""

DUMP_PROGRAM = r"""
import argparse, importlib, json, re, sys

output, *imports = sys.argv[1:]
for name in imports:
    importlib.import_module(name)
import sglang, torch
from sglang.srt.server_args import ServerArgs

def plain(value):
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value

def deprecated(action):
    text = action.help if isinstance(action.help, str) else ""
    return type(action).__name__.startswith("Deprecated") or re.match(r"\W*deprecated", text, re.IGNORECASE) is not None

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
arguments = [
    {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "action": type(action).__name__,
        "type": getattr(action.type, "__name__", None if action.type is None else str(action.type)),
        "choices": None if action.choices is None else plain(list(action.choices)),
        "nargs": action.nargs,
        "default": plain(action.default),
        "deprecated": deprecated(action),
        "help": action.help if isinstance(action.help, str) and action.help != argparse.SUPPRESS else None,
    }
    for action in parser._actions
]
for argument in arguments:
    if argument["choices"]:
        argument["choices"].sort(key=str)
with open(output, "w") as stream:
    json.dump({"file": sglang.__file__, "version": sglang.__version__, "torch": torch.__version__, "arguments": arguments}, stream)
"""
"""Run as ``python -c DUMP_PROGRAM OUTPUT [MODULE...]``: imports the modules and writes what SGLang's own parser takes."""


ADOPT_PROGRAM = r'''"""Written by Aerie: puts the packages of an adopted Python behind the SGLang of this release."""

import os
import site
import sys
from importlib.machinery import PathFinder

OWN = os.path.dirname(os.path.abspath(__file__))
SGLANG = {tree!r} or OWN
SITE_DIRECTORIES = {site_directories!r}
SEARCH_PATH = {search_path!r}


class OwnSGLang:
    """Comes before the finders of an editable installation, which would lead elsewhere."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "sglang":
            return PathFinder.find_spec(name, [SGLANG])
        return PathFinder.find_spec(name, path) if name.startswith("sglang.") else None


def install():
    before = list(sys.path)
    for directory in SITE_DIRECTORIES:
        site.addsitedir(directory)
    added = [entry for entry in sys.path if entry not in before and entry not in SEARCH_PATH]
    own = before.index(OWN)
    first = before[:own] + ([] if SGLANG in before else [SGLANG]) + before[own:]
    sys.path[:] = first + [entry for entry in SEARCH_PATH if entry not in first] + added
    sys.meta_path.insert(0, OwnSGLang)


install()
'''
"""The module that an adopted release's ``.pth`` imports. Any Python that SGLang runs on runs it at each start."""


@dataclass(frozen=True)
class PatchSetRef:
    """A patch set by name and content hash."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Ingredients:
    """All that a release is made from; ``environment`` and ``package`` are as sglang_environment returns them."""

    version: str
    profile: str
    environment: Mapping[str, Any]
    package: Mapping[str, Any]
    patch_sets: tuple[PatchSetRef, ...]

    @property
    def adopted(self) -> str | None:
        """What of it the host had already: ``environment``, ``tree`` (SGLang itself too), or None."""
        return self.package.get("adopted")

    @property
    def id(self) -> str:
        """The release's name: equal ingredients in equal order, equal names. An adopted tree is one release, whatever patches it has."""
        sets = [] if self.adopted == "tree" else [[patch_set.name, patch_set.sha256] for patch_set in self.patch_sets]
        digest = canonical_hash({"package": self.package["sha256"], "environment": self.environment["id"], "patch_sets": sets})
        return f"{self.version}-{digest[:12]}"


def describe(paths: HostPaths, release: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the parts of a release are."""
    path = paths.release(release["id"])
    minor = ".".join(str(release["python_version"]).split(".")[:2])
    return {
        "id": release["id"],
        "path": str(path),
        "site_packages": release.get("tree") or str(environments.site_packages_of(path, minor)),
        "python": str(path / "bin" / "python"),
        "release": dict(release),
    }


def planned(ingredients: Ingredients) -> dict[str, Any]:
    """Return what ``release.json`` says of a release that has just been made."""
    chosen = ("id", "path", "site_packages", "python", "adopted", "search_path")
    return {
        "id": ingredients.id,
        "sglang_version": ingredients.version,
        "profile": ingredients.profile,
        "environment": {key: ingredients.environment[key] for key in chosen if key in ingredients.environment},
        "package": {key: ingredients.package[key] for key in ("path", "sha256")},
        "adopted": ingredients.adopted,
        "tree": ingredients.package["path"] if ingredients.adopted == "tree" else None,
        "commit": ingredients.package.get("commit"),
        "patch_sets": patch_sets_of(ingredients),
        "python_version": ingredients.environment["python_version"],
        "torch_version": ingredients.environment["torch_version"],
        "verified": False,
        "verified_at": None,
    }


def patch_sets_of(ingredients: Ingredients) -> list[dict[str, str]]:
    """Return the patch sets as ``release.json`` has them."""
    return [{"name": patch_set.name, "sha256": patch_set.sha256} for patch_set in ingredients.patch_sets]


def read(paths: HostPaths, release_id: str) -> dict[str, Any] | None:
    """Return a release's ``release.json``, or None where there is no such release, or only a half made one.

    One that says something else than a release, or is another release's, counts as half made: it is made again.
    """
    if not is_id(release_id):
        return None
    try:
        return release_file.read(paths.release(release_id))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_id(name: str) -> bool:
    """Say whether a release may be called so: one component of a path, and no other place."""
    return bool(name) and "/" not in name and "\0" not in name and not name.startswith(".")


def existing(paths: HostPaths) -> list[str]:
    """Return the ids of the releases on the host."""
    return sorted(path.parent.name for path in paths.releases.glob(f"*/{RELEASE}"))


def linked(link: Path) -> str | None:
    """Return the id of the release that ``current``, ``previous`` or a pin points to; None where there is no link.

    Raises AerieError where it leads anywhere but to a release of its own root, whatever that is called.
    """
    try:
        target = link.readlink()
    except FileNotFoundError:
        return None
    except OSError:
        kind = "a directory" if link.is_dir() else "no link"
        raise AerieError(f"{link} is {kind}, and must be a link to a release: look what it is, and move it aside") from None
    root = link.parent if link.name in LINKS and link.parent.name != PINS else link.parent.parent
    place = Path(os.path.normpath(link.parent / target))
    if place.parent != root / "releases":
        raise AerieError(
            f"{link} leads to {target}, which is no release below {root / 'releases'}: point it to one of these "
            f"(ln -sfn releases/ID {link}), or remove it"
        )
    return place.name


def links(paths: HostPaths) -> dict[str, str | None]:
    """Return the releases that are ``current`` and ``previous``, once a switch that was cut off is finished."""
    found = {"current": linked(paths.current), "previous": linked(paths.previous)}
    return {**found, **(_begun(paths) or {})}


def make(paths: HostPaths, ingredients: Ingredients, progress: Progress) -> dict[str, Any]:
    """Make a release's tree; its ``release.json`` is written last, so a half made one is made again. Return that."""
    release = planned(ingredients)
    path = paths.release(ingredients.id)
    found = _adopted(ingredients) if ingredients.adopted else None
    if not found:
        if not (Path(ingredients.package["path"]) / environments.PACKAGE_MARKER).exists():
            raise AerieError(f"{ingredients.package['path']} is missing or half made: run the role sglang_release again")
        require_environment(release)
    if ingredients.adopted != "tree":
        environments.check_disk(paths.root, environments.PACKAGE_GIB)
    progress.update(f"making release {ingredients.id}")
    if path.exists():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A virtual environment names its own path, so it is made where it will stay.
    answer = environments.run([str(ingredients.environment["python"]), "-I", "-m", "venv", "--without-pip", str(path)])
    if answer.returncode:
        raise AerieError(f"the virtual environment {path} could not be made:\n{tail(answer.stdout + answer.stderr, 8)}")
    minor = ".".join(str(release["python_version"]).split(".")[:2])
    site_packages = environments.site_packages_of(path, minor)
    if found:
        _fill_adopted(path, site_packages, *found)
    else:
        _copy_package(Path(ingredients.package["path"]), site_packages)
        (site_packages / PTH).write_text(f"import site; site.addsitedir({ingredients.environment['site_packages']!r})\n")
        _link_programs(Path(ingredients.environment["path"]) / "bin", path / "bin")
    write_json(path / RELEASE, release)
    return release


def _adopted(ingredients: Ingredients) -> tuple[adoption.Survey, adoption.Package]:
    """Look at what is adopted once more; raise when it is not what sglang_environment saw."""
    found = adoption.survey(str(ingredients.environment["python"]))
    adoption.check(found, ingredients.profile)
    path = str(ingredients.package["path"])
    package = adoption.tree(found, path, ingredients.version) if ingredients.adopted == "tree" else adoption.installed(found)
    if (found.environment_id, package.sha256) != (ingredients.environment["id"], ingredients.package["sha256"]):
        raise AerieError(
            f"{path} or the packages of {found.python} have changed since they were looked at: run the role sglang_release again"
        )
    return found, package


def _fill_adopted(path: Path, site_packages: Path, found: adoption.Survey, package: adoption.Package) -> None:
    """Give a release its copy of SGLang (none of a tree, which is used in place) and the adopted packages behind it."""
    if package.adopted == "environment":
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for part in package.parts:
            shutil.copytree(package.root / part, site_packages / part, copy_function=_copy, ignore=ignore)
        if canonical_hash(adoption.contents(site_packages, package.parts)) != package.sha256:
            raise AerieError(f"{package.root} was changed while it was copied: run the role sglang_release again")
        _copy_metadata(package, site_packages)
    program = ADOPT_PROGRAM.format(
        tree=str(package.root) if package.adopted == "tree" else None,
        site_directories=list(found.site_directories),
        search_path=list(found.search_path),
    )
    (site_packages / f"{Path(PTH).stem}.py").write_text(program)
    (site_packages / PTH).write_text(f"import {Path(PTH).stem}\n")
    if found.programs.is_dir() and str(found.programs) not in SYSTEM_PROGRAMS:
        _link_programs(found.programs, path / "bin")
    write_json(path / ADOPTED, found.fingerprint())


def _copy_metadata(package: adoption.Package, site_packages: Path) -> None:
    """Write the copy's dist-info: its RECORD tells what the files were, by the wheel or by the commit that they came from."""
    assert package.metadata is not None
    source, target = package.metadata.path, site_packages / f"sglang-{package.version}.dist-info"
    if source.suffix == ".dist-info":
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("direct_url.json", "__pycache__"))
    else:
        target.mkdir()
        shutil.copy2(source / "PKG-INFO", target / "METADATA")
        if (source / "entry_points.txt").exists():
            shutil.copy2(source / "entry_points.txt", target)
    if package.commit:
        sources = adoption.sources_of(package)
        rows = io.StringIO()
        writer = csv.writer(rows, lineterminator="\n")
        for name in sources.files:
            digest = base64.urlsafe_b64encode(bytes.fromhex(sources.recorded(name) or "")).rstrip(b"=").decode()
            writer.writerow((name, f"sha256={digest}", (site_packages / name).stat().st_size))
        write_atomic(target / "RECORD", rows.getvalue())


def require_environment(release: Mapping[str, Any]) -> None:
    """Raise when what a release stands on is gone."""
    environment = release["environment"]
    adopted = environment.get("adopted")
    if not (Path(environment["python"]).exists() if adopted else environments.is_whole(Path(environment["path"]))):
        where = environment["python"] if adopted else environment["path"]
        raise AerieError(f"release {release['id']}: its environment {where} is missing or half made: run the role sglang_release again")


def drift(paths: HostPaths, release: Mapping[str, Any]) -> str | None:
    """Say how what a release adopted differs from what it was made from, or None; always None where nothing was adopted."""
    if not release.get("adopted"):
        return None
    try:
        before = read_json(paths.release(release["id"]) / ADOPTED)
    except (OSError, ValueError) as error:
        return f"release {release['id']}: what it adopted can't be told: {error}"
    changed = adoption.drift(before)
    if changed is None and release.get("tree"):
        changed = adoption.moved(Path(release["tree"]), release.get("commit"))
    return f"release {release['id']}: {changed}" if changed else None


def require_unchanged(paths: HostPaths, release: Mapping[str, Any]) -> None:
    """Raise when what a release adopted is not what it was made from."""
    if changed := drift(paths, release):
        raise AerieError(f"{changed}: run the role sglang_release again, which makes a release of what is there now, or undo the change")


def set_patch_sets(paths: HostPaths, ingredients: Ingredients, *, put_back: bool = False) -> dict[str, Any]:
    """Tell ``release.json`` of an adopted tree the patch sets that it will get; it must be verified again then.

    With ``put_back`` they are those that it had before, whose files are back; then it is as verified as it was with them.
    """
    release = find(paths, ingredients.id)
    wanted = patch_sets_of(ingredients)
    before = {key: release.get(key) for key in ("patch_sets", "verified", "verified_at")}
    remembered = release.get("before")
    found = remembered if put_back and remembered and remembered["patch_sets"] == wanted else None
    changed = release | (found or {"patch_sets": wanted, "verified": False, "verified_at": None}) | {"before": before}
    write_json(paths.release(ingredients.id) / RELEASE, changed)
    return changed


def verify(paths: HostPaths, release: Mapping[str, Any], progress: Progress, imports: Sequence[str] = IMPORTS) -> dict[str, Any]:
    """Prove that a release compiles, imports from its own tree and has a parser; keep the parser's arguments.

    Return ``release.json``, now verified; raise, leaving it as it was, when anything fails.
    """
    where = describe(paths, release)
    path, python, site_packages = Path(where["path"]), where["python"], Path(where["site_packages"])
    require_environment(release)
    require_unchanged(paths, release)
    progress.update(f"compiling release {release['id']}")
    answer = environments.run([python, "-m", "compileall", "-q", str(site_packages / SPECULATIVE)])
    if answer.returncode:
        raise AerieError(f"release {release['id']} does not compile, current stays as it was:\n{tail(answer.stdout + answer.stderr, 12)}")
    if release["profile"] == "cuda":
        environments.refuse_stand_ins(Path(python))
    progress.update("importing SGLang and reading its arguments")
    dump = dump_arguments(python, release["profile"], imports, f"release {release['id']} does not import, current stays as it was")
    if not Path(dump["file"]).resolve().is_relative_to(site_packages.resolve()):
        raise AerieError(
            f"release {release['id']} imports SGLang from {dump['file']} and not from its own tree {site_packages}: "
            f"remove that copy, or what puts it on the search path"
        )
    write_json(path / ARGUMENTS, dump["arguments"])
    verified = dict(release) | {
        "verified": True,
        "verified_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch_version": dump["torch"],
    }
    write_json(path / RELEASE, verified)
    return verified


def dump_arguments(python: str, profile: str, imports: Sequence[str], failure: str) -> dict[str, Any]:
    """Return what :data:`DUMP_PROGRAM` writes when ``python`` runs it; raise with ``failure`` and its last words."""
    with tempfile.TemporaryDirectory(prefix="aerie-verify-") as folder:
        output = Path(folder) / "dump.json"
        answer = environments.run([python, "-c", DUMP_PROGRAM, str(output), *imports], PROFILE_ENVIRONMENT[profile], directory=folder)
        if answer.returncode:
            raise AerieError(f"{failure}:\n{tail(answer.stderr or answer.stdout, 12)}")
        value: dict[str, Any] = json.loads(output.read_text())
    return value


def find(paths: HostPaths, release_id: str) -> dict[str, Any]:
    """Return the ``release.json`` of a release that must be there; ``previous`` means the one before the current."""
    if release_id == "previous":
        known_links = links(paths)
        target = known_links["previous"]
        if target is not None and target == known_links["current"]:
            raise AerieError(
                f"{paths.previous} leads to the current release, {target}, as a switch that was cut off leaves it: which one was "
                f"before is not known; name it in sglang_patches_rollback_to: there is {listing(existing(paths))}"
            )
        if target is None:
            tree = (read(paths, known_links["current"] or "") or {}).get("tree")
            what = f"name one of {listing(existing(paths))}"
            if tree:
                what = (
                    f"{tree} is patched in place, and is one release whatever patch sets it has; to have it as git has it, run "
                    "playbooks/rollback.yml with -e sglang_patches_rollback_to=pristine; to have other patch sets, playbooks/patch.yml"
                )
            raise AerieError(f"{paths.root} has no previous release to go back to: {what}")
        release_id = target
    if not _is_name(release_id):
        raise AerieError(f"{release_id!r} is no release id, such as 0.5.23-0123456789ab: there is {listing(existing(paths))}")
    release = read(paths, release_id)
    if release is None:
        known = existing(paths)
        raise AerieError(f"{paths.releases} has no release {release_id!r}{near(release_id, known)}: there is {listing(known)}")
    return release


def _is_name(text: str) -> bool:
    return bool(text) and text not in (".", "..") and "/" not in text and "\0" not in text


def _begun(paths: HostPaths) -> dict[str, str | None] | None:
    """Return where a switch that was cut off was going; None where none was."""
    try:
        value = read_json(paths.releases / SWITCH)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        value = None
    found = value if isinstance(value, dict) else {}
    current, previous = found.get("current"), found.get("previous")
    if (
        not isinstance(current, str)
        or not _is_name(current)
        or not (previous is None or (isinstance(previous, str) and _is_name(previous)))
    ):
        raise AerieError(f"{paths.releases / SWITCH} is damaged: look at {paths.current} and {paths.previous}, and remove it")
    return {"current": current, "previous": previous}


def finish_switch(paths: HostPaths) -> None:
    """Go on with a switch that was cut off, and clear away what it left beside the links."""
    for left in paths.root.glob(".*"):
        if left.is_symlink() and re.fullmatch(r"\.(current|previous)\.\d+", left.name):
            left.unlink(missing_ok=True)
    begun = _begun(paths)
    if begun is None:
        return
    if begun["previous"]:
        _point(paths.previous, Path("releases") / begun["previous"])
    else:
        paths.previous.unlink(missing_ok=True)
    _point(paths.current, Path("releases") / str(begun["current"]))
    (paths.releases / SWITCH).unlink(missing_ok=True)
    fsync_dir(paths.releases)


def switch(paths: HostPaths, release_id: str, previous: str | None = None) -> None:
    """Point ``current`` to a verified release, and ``previous`` to what it pointed to; each link moves in one step.

    Where both are going is written down first: whoever comes after a switch that was cut off finishes it, so that
    ``previous`` never means the release that is current.
    A switch that is taken back gives the ``previous`` that was there before it, or an empty string where there was none.
    """
    release = find(paths, release_id)
    if release.get("verified") is not True:
        raise AerieError(f"release {release_id} was not verified and can't become current")
    finish_switch(paths)
    before = linked(paths.current)
    if before == release_id:
        return
    remembered = (before or linked(paths.previous)) if previous is None else previous or None
    write_json(paths.releases / SWITCH, {"current": release_id, "previous": remembered})
    finish_switch(paths)


def caches_of(paths: HostPaths, release_id: str | None) -> list[Path]:
    """Return the caches that servers of a release left, one for each driver."""
    return sorted(paths.caches.glob(f"{release_id}-*")) if release_id else []


def set_aside(paths: HostPaths, caches: Sequence[Path]) -> list[str]:
    """Move caches where no server looks for them; return where they are now, as seen from the root."""
    aside = paths.caches / ".aside"
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    moved = []
    for cache in caches:
        aside.mkdir(exist_ok=True)
        target = aside / f"{cache.name}.{now}"
        cache.rename(target)
        moved.append(str(target.relative_to(paths.root)))
    return moved


def refuse_removal(paths: HostPaths, release_id: str) -> None:
    """Raise when a release must stay: because a link points to it, or a process runs from it."""
    for link in (paths.current, paths.previous):
        if linked(link) == release_id:
            raise AerieError(f"release {release_id} is {link.name} and is kept: make another one current first")
    inside = f"{paths.release(release_id)}/"
    users = [process for process in processes.scan() if any(word.startswith(inside) for word in process.argv)]
    if users:
        raise AerieError(f"release {release_id} is in use by process {users[0].pid} ({users[0].title}): stop its server first")


def remove(paths: HostPaths, release_id: str) -> None:
    """Remove a release; its ``release.json`` goes first, so that a killed run leaves none that looks whole."""
    refuse_removal(paths, release_id)
    path = paths.release(release_id)
    (path / RELEASE).unlink(missing_ok=True)
    fsync_dir(path)
    shutil.rmtree(path)


def _copy(source: str, target: str) -> str:
    # Sources are copied, as patches must never reach the pristine package; large libraries are never patched.
    if source.endswith(".so") and Path(source).stat().st_size >= LINKED_FROM_BYTES:
        try:
            os.link(source, target)
            return target
        except OSError:
            pass
    return shutil.copy2(source, target)


def _copy_package(package: Path, site_packages: Path) -> None:
    """Copy the pristine package, and compare every file with the RECORD of its wheel while it is read.

    Raise where one was changed, added or taken away since it was unpacked: each release would be made of it.
    """
    (record,) = package.glob("sglang-*.dist-info/RECORD")
    recorded: dict[str, str | None] = dict(read_record(record))
    recorded |= {environments.PACKAGE_MARKER: None, record.relative_to(package).as_posix(): None}
    different: list[str] = []

    def copy(source: str, target: str) -> str:
        name = Path(source).relative_to(package).as_posix()
        expected = recorded.pop(name, "")
        if expected is not None and expected != sha256_file(Path(source)):
            different.append(name)
        return _copy(source, target)

    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, site_packages, copy_function=copy, ignore=ignore, dirs_exist_ok=True)
    different += recorded
    if different:
        shown = [*sorted(different)[:5], *([f"{len(different) - 5} more"] if len(different) > 5 else [])]
        raise AerieError(
            f"{package} is no longer what its wheel was (changed, added or gone: {listing(shown)}): remove that directory and run "
            "playbooks/install.yml, which unpacks it again"
        )
    (site_packages / environments.PACKAGE_MARKER).unlink()


def _link_programs(source: Path, target: Path) -> None:
    """Make the environment's programs, such as ninja, part of the release's bin: just-in-time compilers look there."""
    for program in source.iterdir():
        link = target / program.name
        if not link.exists() and not re.match(r"python|pip|activate|Activate|sglang$", program.name):
            link.symlink_to(program)


def _point(link: Path, target: Path) -> None:
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    beside.replace(link)
    fsync_dir(link.parent)
