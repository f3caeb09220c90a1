"""What starts, stops and watches servers: the interface that systemd and supervisor share. Standard library only: this runs on hosts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths

SYSTEMD_RUNNING = Path("/run/systemd/system")
SAFE_PATH = re.compile(r"[\w./+@:,=~-]+")


class Service(Protocol):
    """A service manager as one Aerie root uses it; ``name`` is an instance."""

    kind: str

    def definitions(self, name: str) -> dict[Path, str]:
        """Return the files that define ``name`` as a service, with their content."""
        ...

    def install(self, name: str) -> bool:
        """Write the definitions; return whether any changed."""
        ...

    def start(self, name: str) -> None:
        """Start ``name`` without waiting until it is ready."""
        ...

    def stop(self, name: str, seconds: float) -> None:
        """Stop ``name`` and wait until the manager no longer has a process for it."""
        ...

    def main_pid(self, name: str) -> int | None:
        """Return the process id of the launched server, or None when it does not run."""
        ...

    def is_active(self, name: str) -> bool:
        """Say whether the manager runs ``name``, or is about to start it again."""
        ...

    def is_installed(self, name: str) -> bool:
        """Say whether ``name`` is defined as a service."""
        ...

    def is_enabled(self, name: str) -> bool:
        """Say whether ``name`` starts at boot."""
        ...

    def enable(self, name: str) -> None:
        """Let ``name`` start at boot, where the manager can."""
        ...

    def disable(self, name: str) -> None:
        """Keep ``name`` from starting at boot."""
        ...

    def remove(self, name: str) -> None:
        """Take away the definition of ``name``, which is stopped."""
        ...


def choose(kind: str, running: Path = SYSTEMD_RUNNING) -> str:
    """Return ``systemd`` or ``supervisor`` for what a person asked for (``auto`` too)."""
    if kind not in ("auto", "systemd", "supervisor"):
        raise AerieError(f"aerie_service_manager: {kind!r} is not one of auto, systemd and supervisor")
    if kind == "supervisor":
        return kind
    usable = running.is_dir() and os.geteuid() == 0
    if kind == "systemd" and not usable:
        why = "systemd does not run here" if not running.is_dir() else "only root may define systemd units"
        raise AerieError(
            f"aerie_service_manager: systemd: {why}: use auto or supervisor{'' if not running.is_dir() else ', or become: true'}"
        )
    return "systemd" if usable else "supervisor"


def checked_root(paths: HostPaths) -> str:
    """Return the root as text that units, shell and supervisor's files take literally; raise if they would not."""
    root = str(paths.root)
    if not paths.root.is_absolute() or not SAFE_PATH.fullmatch(root):
        raise AerieError(
            f"aerie_root {root!r}: must be an absolute path of letters, digits and ./+@:,=~-_ (service files read others their own way)"
        )
    return root


def last_lines(path: Path, count: int = 20, secret: str | None = None) -> list[str]:
    """Return the last ``count`` lines of a log that are not blank, with ``secret`` blotted out."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 65536))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    if secret:
        text = text.replace(secret, "********")
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()][-count:]
