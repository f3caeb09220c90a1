"""Doing what :mod:`packages` planned, and proving that nothing else happened. Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.host import apt, dpkg
from ansible.module_utils.aerie.host.apt import SOURCES, Repository, Stage
from ansible.module_utils.aerie.host.dpkg import Move, Package
from ansible.module_utils.aerie.host.packages import Plan, install_options, is_ours, loaded_driver, unit_state


def apply(made: Plan, tell: Callable[[str], None]) -> None:
    """Do what was planned, and prove that nothing else happened."""
    if made.removing:
        apply_removal(made, tell)
        return
    _write_files(made)
    if made.stage is not None:
        stage = made.stage
        never_ready = [name for name in made.repairs if made.before[name].state in "UH" and is_ours(name, made)]
        made.remember(packages=[*never_ready, *(move.name for move in made.moves if move.before is None)])
        if made.repairs:
            repair(made, stage, tell)
        if made.moves:
            install(made, stage, tell)
        stage.publish_lists()
    if made.hold or made.release:
        tell(f"holding {len(made.hold)} packages" if made.hold else f"letting go of {len(made.release)} packages")
        made.remember(holds=made.hold)
        apt.mark("hold", made.hold)
        apt.mark("unhold", made.release)
        made.manifest = replace(made.manifest, holds=tuple(sorted(set(made.manifest.holds) - set(made.release))))
        made.remember()
        verify_holds(made)
    for unit in made.enable:
        made.remember(units=[unit])
        apt.require(apt.run(("systemctl", "enable", "--quiet", unit)), f"systemctl enable {unit}")
    for unit in made.start:
        apt.require(apt.run(("systemctl", "start", unit)), f"systemctl start {unit}")


def _write_files(made: Plan) -> None:
    missing = [path.parent for path in made.files if not path.parent.is_dir()]
    made.remember(directories=map(str, missing))
    for path, content in made.files.items():
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, content)


def repair(made: Plan, stage: Stage, tell: Callable[[str], None]) -> None:
    """Let dpkg finish what it left unfinished, then let apt bring what that needs; then look what is still to do."""
    tell(f"repairing {', '.join(made.repairs)}")
    configured = apt.run(("dpkg", "--configure", "--pending", "--force-confdef", "--force-confold"))
    again = [name for name, package in apt.read_packages().items() if package.needs_reinstallation or package.state == "H"]
    if again:
        stage.install(
            "install",
            "--reinstall",
            "--allow-change-held-packages",
            "--allow-downgrades",
            *(f"{name}={made.before[name].version}" for name in again),
        )
    stage.install("install", "--fix-broken", "--allow-change-held-packages")
    left = {name: package.trouble for name, package in apt.read_packages().items() if package.trouble}
    if left:
        told = "; ".join(f"{name} {trouble}" for name, trouble in left.items())
        raise AerieError(f"dpkg could not repair {told}: {apt.explain(configured)}")
    now = apt.read_packages()
    made.before |= {name: package for name, package in now.items() if name in made.repairs}
    names = {name: version for name, version in made.versions.items() if name not in now or now[name].version != version}
    made.moves = [move for move in made.moves if move.name not in now or now[move.name].version != move.after] if names else []


def install(made: Plan, stage: Stage, tell: Callable[[str], None]) -> None:
    """Install exactly what was planned: every package by its version, so that apt has nothing left to decide."""
    coming = [move for move in made.moves if move.after is not None]
    held = [move.name for move in made.moves if move.name in made.before and made.before[move.name].held]
    tell(f"installing {len(coming)} packages: {', '.join(f'{name} {version}' for name, version in made.versions.items())}")
    before = {name: package.version for name, package in apt.read_packages().items() if package.installed}
    apt.mark("unhold", held)
    try:
        removed = [f"{move.name}-" for move in made.moves if move.after is None]
        stage.install(*install_options(made.request), *(f"{move.name}={move.after}" for move in coming), *removed)
    finally:
        now = apt.read_packages()
        apt.mark("hold", [name for name in held if name in now and now[name].installed])
    tell("checking what moved")
    verify_moves(made, before, now)


def verify_moves(made: Plan, before: Mapping[str, str], now: Mapping[str, Package]) -> None:
    """Raise when packages other than the planned ones moved, or planned ones did not."""
    after = {name: package.version for name, package in now.items() if package.installed}
    moved = {name: Move(name, before.get(name), after.get(name)) for name in {*before, *after} if before.get(name) != after.get(name)}
    planned = {move.name: move for move in made.moves}
    problems = [f"{move} was not planned" for name, move in sorted(moved.items()) if planned.get(name) != move]
    problems += [f"{move} was planned and did not happen" for name, move in sorted(planned.items()) if name not in moved]
    problems += [f"{name} {package.trouble}" for name, package in sorted(now.items()) if package.trouble]
    raise_all(problems, "the packages were installed, and the host is not as planned")


def verify_holds(made: Plan) -> None:
    """Raise when an upgrade of the host would move what is held."""
    done = apt.run(("apt-get", "--simulate", "--yes", "upgrade"))
    if done.returncode != 0:
        made.warnings.append(f"the holds could not be tried, apt-get upgrade does not work: {apt.explain(done)}")
        return
    held = set(made.manifest.holds)
    raise_all([str(move) for move in dpkg.parse_simulation(done.stdout) if move.name in held], "apt-get upgrade would move what is held")


def apply_removal(made: Plan, tell: Callable[[str], None]) -> None:
    """Take away what we brought: units, holds, packages with their configuration, files, lists, and what is empty then."""
    manifest = made.manifest
    for unit in manifest.units:
        if unit_state(unit)["UnitFileState"] == "enabled":
            apt.require(apt.run(("systemctl", "disable", "--now", "--quiet", unit)), f"systemctl disable {unit}")
    apt.mark("unhold", made.release)
    if made.moves:
        tell(f"removing {len(made.moves)} packages")
        before = {name: package.version for name, package in made.before.items() if package.installed}
        names = [name for name in manifest.packages if name in made.before]
        argv = ("apt-get", "--yes", "--quiet", "--allow-change-held-packages", "purge", *names)
        apt.require(apt.run(argv, locked_seconds=made.request.locked_seconds), "apt-get purge")
        now = apt.read_packages()
        made.moves = [move for move in made.moves if move.name in before]
        verify_moves(made, before, now)
    for path, content in made.files.items():
        if path == SOURCES:
            _forget_lists(path.read_text())
        if content is None:
            path.unlink(missing_ok=True)
    for name in sorted(manifest.directories, reverse=True):
        if Path(name).is_dir() and not any(Path(name).iterdir()):
            Path(name).rmdir()
    made.manifest_path.unlink(missing_ok=True)


def _forget_lists(sources: str) -> None:
    address = re.search(r"^URIs: (\S+)$", sources, re.MULTILINE)
    if address:
        prefix = Repository(address.group(1), "/", (), b"").lists_prefix
        for path in apt.LISTS.iterdir() if apt.LISTS.is_dir() else ():
            if path.name.startswith(prefix):
                path.unlink()


def driver_result(made: Plan) -> dict[str, Any]:
    """Return what of the result is about the driver, with the one that is loaded now."""
    return replace(made.driver, loaded=loaded_driver()).describe()
