"""Whether a server would really run with the patch sets that were asked for. Standard library only: this runs on hosts.

Two questions, asked before a server is touched: is what was asked for applied to the release and still as it was written
(:func:`problems`, a few hashes), and would Python, started as the server will be, import that very tree (:func:`look`, one start of the
interpreter).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_plan
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release as releases
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing, tail

PACKAGE = "sglang"
PLUGIN_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
"""Entry points that SGLang loads by itself from 0.5.11 on. Source: sglang/srt/plugins/__init__.py."""
LOOK_SECONDS = 60
CURE = "run playbooks/patch.yml"

LOOK_PROGRAM = """
import importlib.util, json, sys
from importlib.metadata import entry_points

spec = importlib.util.find_spec(sys.argv[1])
found = []
if spec is not None:
    found = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
plugins = [
    {"group": group, "name": one.name, "value": one.value, "distribution": one.dist.name if one.dist else None}
    for group in sys.argv[2:]
    for one in entry_points(group=group)
]
print()
print(json.dumps({"found": found, "plugins": plugins}))
"""
"""Run as ``python -c LOOK_PROGRAM PACKAGE GROUP...``: says where the package would come from, without importing it, and who hooks in."""


@dataclass(frozen=True)
class Plugin:
    """A package that SGLang would load into the server by itself."""

    group: str
    name: str
    value: str
    distribution: str | None


def tree_of(paths: HostPaths, release: Mapping[str, Any]) -> Path | None:
    """Return the directory that a release imports SGLang from; None where ``release.json`` doesn't tell."""
    return Path(releases.describe(paths, release)["site_packages"]) if "python_version" in release else None


def problems(paths: HostPaths, release: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """Return why a server of this release would not run with ``wanted`` (name, sha256, upstream_since of each set; None: whatever it has).

    A set that the release's SGLang has itself (``upstream_since``) counts as active.
    """
    site_packages = tree_of(paths, release)
    where = f"release {release['id']}"
    made = [(one["name"], one["sha256"]) for one in release.get("patch_sets") or ()]
    asked = made if wanted is None else [(one["name"], one["sha256"]) for one in wanted]
    if made != asked:
        return [f"{where} was made with the patch sets {_named(made)}, and asked for are {_named(asked)}: {CURE}"]
    if site_packages is None:
        return []
    store = PatchStore(paths.originals, str(site_packages.resolve() / PACKAGE))
    try:
        manifest = store.manifest()
        applied = [(one["name"], one["sha256"]) for one in patch_plan.applied(store)]
        cut_off = ["a run was cut off while it patched it"] if store.journal() is not None else []
        found = cut_off or patch_plan.changed_since(_tree(site_packages, release, manifest), manifest)
    except AerieError as error:
        return [f"{where}: {error}"]
    needed = [(one["name"], one["sha256"]) for one in wanted or () if not _is_upstream(one, str(release["sglang_version"]))]
    if wanted is not None and applied != needed:
        return [f"{where}: asked for and needed are the patch sets {_named(needed)}, applied are {_named(applied)}: {CURE}", *found]
    return [f"{where} is not as it was patched: {one}: {CURE}" for one in found]


def _tree(site_packages: Path, release: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> SourceTree:
    """Return the tree; of a release's own copy without its RECORD, which takes longer to read than all the rest."""
    version = str(release["sglang_version"])
    if release.get("adopted") == "tree" and manifest:
        return SourceTree.open(site_packages, PACKAGE, version)
    return SourceTree(site_packages, PACKAGE, Version.parse(version), {})


def _is_upstream(wanted: Mapping[str, Any], version: str) -> bool:
    return wanted.get("upstream_since") is not None and Version.parse(version) >= Version.parse(str(wanted["upstream_since"]))


def _named(sets: Sequence[tuple[str, str]]) -> str:
    return listing(f"{name} ({sha256[:8]})" for name, sha256 in sets)


def look(python: str, environment: Mapping[str, str], directory: Path, site_packages: Path) -> tuple[Plugin, ...]:
    """Raise when ``python``, with exactly this environment and directory, would import another SGLang than that in ``site_packages``.

    Return the plugins that SGLang would load then.
    """
    with tempfile.TemporaryDirectory(prefix="aerie-look-") as empty:
        place = str(directory) if directory.is_dir() else empty
        try:
            answer = subprocess.run(
                [python, "-c", LOOK_PROGRAM, PACKAGE, *PLUGIN_GROUPS],
                env=dict(environment),
                cwd=place,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LOOK_SECONDS,
                check=False,
            )
        except OSError as error:
            raise AerieError(f"{python} can't be started: {error.strerror}: {CURE}") from error
        except subprocess.TimeoutExpired as error:
            raise AerieError(
                f"{python} did not say within {LOOK_SECONDS} s where it would import SGLang from: does its disk answer?"
            ) from error
    if answer.returncode:
        raise AerieError(
            f"{python} does not run with the server's environment (PYTHONHOME, PYTHONPATH?):\n{tail(answer.stderr or answer.stdout, 8)}"
        )
    said = json.loads(answer.stdout.splitlines()[-1])
    if not said["found"]:
        raise AerieError(f"{python} would find no SGLang at all with the server's environment: {CURE}")
    elsewhere = [one for one in said["found"] if not Path(one).resolve().is_relative_to(site_packages.resolve())]
    if elsewhere:
        raise AerieError(
            f"the server would import SGLang from {elsewhere[0]} and not from its own tree {site_packages}, so that no patch set would be "
            f"active: take away what leads there ({_leading(environment, directory, Path(elsewhere[0]))})"
        )
    if not (site_packages / PACKAGE / "srt/plugins").is_dir():
        return ()
    return tuple(Plugin(**one) for one in said["plugins"] if one["distribution"] != PACKAGE and _is_loaded(one, environment))


def _leading(environment: Mapping[str, str], directory: Path, found: Path) -> str:
    """Say what puts another copy on the search path."""
    if found.is_relative_to(directory / PACKAGE) or found.is_relative_to(directory.resolve() / PACKAGE):
        return f"a directory {PACKAGE} in {directory}"
    if any(found.resolve().is_relative_to(Path(part).resolve()) for part in environment.get("PYTHONPATH", "").split(":") if part):
        return f"PYTHONPATH={environment['PYTHONPATH']} in the server's environment"
    return "a .pth file, or a copy in the environment"


def _is_loaded(plugin: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Say whether SGLang would load it: ``SGLANG_PLUGINS``, where it is set, names those that it may."""
    allowed = {name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    return not allowed or plugin["name"] in allowed


def warning(plugin: Plugin) -> str:
    """Return what a person should know about a plugin."""
    return (
        f"SGLang will load the plugin {plugin.name} ({plugin.value}) of the package {plugin.distribution or '?'} into this server; it may "
        "replace any function, and where it fails that is only logged. It is no patch set of Aerie's: uninstall it, or set SGLANG_PLUGINS "
        "in sglang_server_environment to the names of those you want"
    )
