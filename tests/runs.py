"""What tests of whole runs share: a playbook run and its account, the processes of a host's root, a snapshot of a tree."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
HOST_OF_TESTS = PROJECT / ".cache/e2e/host"
"""This machine as a host of the tests: its environments are kept between runs."""

PROCESSES_OF = r"""
import os, pathlib, sys
root = os.path.realpath(sys.argv[1])
for entry in pathlib.Path("/proc").iterdir():
    if not entry.name.isdigit() or int(entry.name) == os.getpid():
        continue
    try:
        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        places = [os.readlink(entry / "cwd"), os.readlink(entry / "exe"), *words.split(" ")]
        environment = (entry / "environ").read_bytes().decode(errors="replace")
    except OSError:
        continue
    if sys.argv[0] not in words and (any(place == root or place.startswith(root + "/") for place in places) or root + "/" in environment):
        print(entry.name, words.strip())
"""
"""Python for any host, argument a directory: lists the processes that were started from it, run in it or know it by their environment."""


@dataclass(frozen=True)
class Run:
    """One ansible-playbook run: its exit status, all that it printed, and the account that tests/callbacks/count_module_calls.py kept."""

    status: int
    output: str
    calls: Mapping[str, list[str]]
    changed: Mapping[str, list[str]]
    stats: Mapping[str, Mapping[str, int]]

    def require_success(self) -> Run:
        assert self.status == 0, f"ansible-playbook ended with {self.status}:\n{self.output[-6000:]}"
        return self


def playbook(*arguments: str | Path, variables: Mapping[str, Any] | None = None, scratch: Path, seconds: int = 1200) -> Run:
    """Run ansible-playbook from the project's root as a person does, without a terminal. `scratch` takes the account of the run."""
    report = scratch / "run.json"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
        "ANSIBLE_CALLBACK_PLUGINS": f"{PROJECT / 'tests/callbacks'}{os.pathsep}{PROJECT / 'plugins/callback'}",
        "ANSIBLE_CALLBACKS_ENABLED": "count_module_calls",
        "ANSIBLE_NOCOLOR": "1",
        "AERIE_RUN_REPORT": str(report),
    }
    argv = [sys.executable, "-m", "ansible", "playbook", *map(str, arguments)]
    if variables:
        argv += ["--extra-vars", json.dumps(variables)]
    done = subprocess.run(
        argv, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
    )
    account = json.loads(report.read_text()) if report.exists() else {"calls": {}, "changed": {}, "stats": {}}
    return Run(done.returncode, done.stdout + done.stderr, **account)


def generated(path: Path) -> dict[str, Any]:
    """What a variables file says that a playbook made of a host's words."""
    sys.path.insert(0, str(PROJECT / "plugins"))
    from aerie_controller import generated_yaml

    found: dict[str, Any] = generated_yaml.read(path)
    return found


def processes_of(root: Path) -> list[str]:
    """Processes on this machine that belong to the host tree at `root`, each as "pid argv"."""
    argv = [sys.executable, "-c", PROCESSES_OF, str(root)]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    ours = {str(os.getpid()), str(os.getppid())}
    return [line for line in found if line.split()[0] not in ours]


def snapshot(root: Path) -> dict[str, str]:
    """What every file and link below `root` is. Files of more than 1 MiB are taken by size and time: environments are large."""
    state: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        if path.is_symlink():
            what = f"link to {path.readlink()}"
        elif path.is_dir():
            what = "directory"
        elif not path.is_file():
            what = "a socket or pipe"
        elif about.st_size > 1 << 20:
            what = f"{about.st_size} bytes of {about.st_mtime_ns}"
        else:
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        state[str(path.relative_to(root))] = f"{about.st_mode:o} {what}"
    return state
