"""Long work on a host that outlives the connection that started it. Standard library only: this runs on hosts.

A module starts a job by forking: the child leads a session of its own, so a cut SSH connection does not end it. It tells
its progress and its result by files that a controller reads whenever it likes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease, processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json
from ansible.module_utils.aerie.processes import Process

PROGRESS = "progress.json"
RESULT = "result.json"
PID = "pid"
LOG = "job.log"


class Progress:
    """Tells how far a job is, in a file that is whole at any time."""

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / PROGRESS if directory else None
        self._number = 0
        self._started = time.time()

    def update(self, message: str, done: int | None = None, total: int | None = None) -> None:
        """Publish ``message``; ``done`` of ``total`` steps are behind us where the job counts steps."""
        self._number += 1
        if self._path is not None:
            now = time.time()
            write_json(
                self._path,
                {"number": self._number, "message": message, "done": done, "total": total, "started": self._started, "time": now},
            )


def new_directory(jobs: Path, name: str) -> Path:
    """Return a new, empty directory for one job below ``jobs``; directories of jobs that ended over a day ago go."""
    jobs.mkdir(parents=True, exist_ok=True)
    for old in jobs.iterdir():
        if old.is_dir() and time.time() - old.stat().st_mtime > 86400 and not is_running(old):
            shutil.rmtree(old, ignore_errors=True)
    directory = jobs / f"{name}-{time.time_ns()}-{os.getpid()}"
    directory.mkdir()
    return directory


def start(directory: Path, work: Callable[[Progress], dict[str, Any]]) -> int:
    """Run ``work`` in a detached child that writes its result below ``directory``; return the child's process id.

    ``work`` returns the module's result; an AerieError becomes a failure with its message, anything else one with a traceback.
    """
    kept = lease.leave()  # the child renews it
    reader, writer = os.pipe()
    first = os.fork()
    if first:
        os.close(writer)
        os.waitpid(first, 0)
        with os.fdopen(reader) as stream:
            return int(stream.read())
    os.close(reader)
    os.setsid()
    second = os.fork()
    if second:
        # Before anybody can ask whether the job runs.
        (directory / PID).write_text(str(processes.identify(second) or ""))
        os.write(writer, str(second).encode())
        os._exit(0)
    os.close(writer)
    _detach(directory / LOG)
    lease.resume(kept)
    run_here(directory, work)
    os._exit(0)


def run_here(directory: Path, work: Callable[[Progress], dict[str, Any]]) -> None:
    """Run ``work`` in this process and write its result."""
    try:
        result = {"ok": True, **work(Progress(directory))}
    except AerieError as error:
        result = {"ok": False, "msg": str(error)}
    except BaseException as error:
        result = {"ok": False, "msg": f"{type(error).__name__}: {error}", "exception": traceback.format_exc()}
    write_json(directory / RESULT, result)


def _detach(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The pipes of the SSH session must close, or the connection waits for us.
    os.closerange(3, 1024)


def process(directory: Path) -> Process | None:
    """Return the process of the job of ``directory``; None once it has ended, whoever has its pid now.

    A pid alone, which jobs of older versions left, names a job only where it still is one of Ansible's
    modules, whose file is called AnsiballZ.
    """
    try:
        text = (directory / PID).read_text()
    except (OSError, ValueError):
        return None
    identity = processes.Identity.parse(text)
    if identity is not None:
        return processes.find(identity)
    current = processes.read(int(text)) if text.strip().isdecimal() else None
    return current if current is not None and any("AnsiballZ" in word for word in current.argv) else None


def is_running(directory: Path) -> bool:
    """Say whether the job of ``directory`` still works."""
    return not (directory / RESULT).exists() and process(directory) is not None


def read(directory: Path) -> dict[str, Any] | None:
    """Return a job's result, or None while it works; a job that died without one is a failure."""
    try:
        result: dict[str, Any] = read_json(directory / RESULT)
        return result
    except FileNotFoundError:
        pass
    if is_running(directory):
        return None
    try:  # it may have ended between the two looks
        final: dict[str, Any] = read_json(directory / RESULT)
        return final
    except FileNotFoundError:
        log = directory / LOG
        detail = log.read_text()[-2000:] if log.exists() else ""
        return {"ok": False, "msg": f"the job ended without a result (killed?): {directory}\n{detail}"}
