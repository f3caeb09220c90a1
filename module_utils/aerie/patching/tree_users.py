"""Who uses a source tree that is to be patched in place, beside our servers. Standard library only: this runs on hosts.

A process that runs on while its sources change under it mixes old and new modules as soon as it imports one late.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.processes import Process
from ansible.module_utils.aerie.serving import server_processes

PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*")
SGLANG = re.compile(r"(?:^|[/\s])sglang(?![\w-])")


@dataclass(frozen=True)
class User:
    """A process and how it uses the tree."""

    process: Process
    why: str

    @property
    def title(self) -> str:
        """A program on a command line may have many lines; a message has one."""
        return " ".join(self.process.title.split())

    def __str__(self) -> str:
        return f"process {self.process.pid} ({self.title}), which {self.why}"


def foreign(paths: HostPaths, tree: Path, python: Path | None = None, instances: Iterable[str] = ()) -> list[User]:
    """Return the processes that run code of ``tree`` and belong to none of ``instances``; ``python`` imports from it.

    Meant are Python processes, those that SGLang renamed too, with their working directory, a word of their command line or an
    entry of PYTHONPATH in the tree, and those of ``python`` that run SGLang. This module's own process and its parents don't count.
    """
    everything = processes.scan()
    by_pid = {process.pid: process for process in everything}
    spared = _own(by_pid) | {process.pid for name in instances for process in server_processes.of_instance(paths, name)}
    found = []
    for process in everything:
        if process.pid in spared or not _is_python(process):
            continue
        parent = by_pid.get(process.ppid)
        # What SGLang renamed no longer shows whose Python it is; its parent does, as long as it lives.
        shown = parent if _is_renamed(process) and parent and _is_python(parent) and _runs_sglang(parent) else process
        if shown.pid not in spared and (why := _use(process, tree.resolve(), None) or _use(shown, tree.resolve(), python)):
            found.append(User(process, why))
    return found


def _own(everything: Mapping[int, Process]) -> set[int]:
    pid, line = os.getpid(), set()
    while pid and pid not in line:
        line.add(pid)
        pid = everything[pid].ppid if pid in everything else 0
    return line


def _is_python(process: Process) -> bool:
    program = processes.link(process.pid, "exe")
    names = [program.name if program else "", Path(process.argv[0]).name if process.argv else ""]
    return any(PYTHON.fullmatch(name) for name in names) or _is_renamed(process)


def _is_renamed(process: Process) -> bool:
    return bool(process.argv) and process.argv[0].startswith(server_processes.TITLE)


def _use(process: Process, tree: Path, python: Path | None) -> str | None:
    directory = processes.link(process.pid, "cwd")
    if directory is not None and _inside(directory, tree):
        return f"works in {directory}"
    for word in process.argv:
        path = word.partition("=")[2] if word.startswith("--") and "=" in word else word
        if path.startswith("/") and _inside(Path(path), tree):
            return f"has {path} on its command line"
    for entry in (process.variable("PYTHONPATH") or "").split(":"):
        if entry.startswith("/") and _inside(Path(entry), tree):
            return f"has {entry} in its PYTHONPATH"
    if python is not None and _runs_sglang(process) and _is_interpreter(process, python):
        return f"runs SGLang with {python}"
    return None


def _inside(path: Path, tree: Path) -> bool:
    try:
        return path.resolve().is_relative_to(tree)
    except (OSError, RuntimeError, ValueError):
        return False


def _runs_sglang(process: Process) -> bool:
    return _is_renamed(process) or any(SGLANG.search(word) for word in process.argv)


def _is_interpreter(process: Process, python: Path) -> bool:
    """Say whether the process runs ``python``, and not another virtual environment of the same interpreter, as far as it shows that."""
    shown = process.argv[0] if process.argv else ""
    if shown.startswith("/"):
        # Links below bin all name one interpreter; the directory says whose packages it uses.
        return Path(shown).parent.resolve() == python.parent.resolve() and Path(shown).resolve() == python.resolve()
    program = processes.link(process.pid, "exe")
    return program is not None and program == python.resolve()
