"""The processes of one instance, found even when they hide their environment. Standard library only: this runs on hosts.

SGLang's schedulers and detokenizers rename themselves by setproctitle, which overwrites ``/proc/<pid>/environ``; what they
keep is their parent, their working directory (the instance's own) and a title that starts with ``sglang::``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.processes import Process

TITLE = "sglang::"


def of_instance(paths: HostPaths, name: str) -> list[Process]:
    """Return every live process of instance ``name``: those that carry its variables, those that SGLang renamed, and their children."""
    everything = processes.scan()
    home = paths.instance(name)
    found = {
        process.pid: process
        for process in everything
        if process.pid != os.getpid()
        and (
            (process.variable("AERIE_INSTANCE") == name and process.variable("AERIE_ROOT") == str(paths.root))
            or (process.argv and process.argv[0].startswith(TITLE) and _works_in(process.pid, home))
        )
    }
    grown = True
    while grown:
        children = [process for process in everything if process.ppid in found and process.pid not in found]
        found.update({child.pid: child for child in children})
        grown = bool(children)
    return sorted(found.values(), key=lambda process: process.pid)


def _works_in(pid: int, directory: Path) -> bool:
    return processes.link(pid, "cwd") == directory.resolve()


def end(paths: HostPaths, name: str, seen: Iterable[Process], seconds: float) -> list[Process]:
    """End what is left of instance ``name``, and of the processes ``seen`` before; return those that had to be killed."""
    before = {process.pid: process for process in seen}
    left = {process.pid: process for process in of_instance(paths, name)}
    # What was seen before and lives on is ours, though it changed its title or its directory.
    left |= {pid: process for pid, process in before.items() if processes.is_same(process)}
    return processes.end(left.values(), seconds) if left else []


def _nvidia_smi(query: str) -> list[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    argv = [program, query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None


def gpu_memory_used_mib() -> list[int] | None:
    """Return the memory in use on each GPU, by whomever, or None where there is no nvidia-smi to ask."""
    rows = _nvidia_smi("--query-gpu=memory.used")
    return None if rows is None else [int(row) if row.strip().isdigit() else 0 for row in rows]


def gpu_memory_mib(pids: Iterable[int]) -> int | None:
    """Return the GPU memory that ``pids`` hold, or None where there is no nvidia-smi to ask.

    In a container with process ids of its own the driver tells other ids, and this finds 0.
    """
    rows = _nvidia_smi("--query-compute-apps=pid,used_memory")
    if rows is None:
        return None
    wanted, total = set(pids), 0
    for row in rows:
        pid, _, used = row.partition(",")
        if pid.strip().isdigit() and int(pid) in wanted:
            total += int(used) if used.strip().isdigit() else 0
    return total


def wait_gpu_memory_free(pids: Iterable[int], seconds: float) -> int | None:
    """Wait until ``pids`` hold no GPU memory; return what they still hold (None: no GPU to ask)."""
    wanted = list(pids)
    deadline = time.monotonic() + seconds
    while (held := gpu_memory_mib(wanted)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return held
