"""The host lease: one controller changes a host at a time. Standard library only: this runs on hosts.

A lease is a small file with an owner and an expiry, not a lock: a controller that died is succeeded, never waited for
by hand. ``flock`` on a file beside it makes reading and writing the lease one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json, write_json

DEFAULT_SECONDS = 900


@dataclass(frozen=True)
class Owner:
    """Who holds a lease: one run of Ansible (``run``), by ``user`` on ``controller``."""

    run: str
    user: str
    controller: str

    @classmethod
    def of(cls, value: dict[str, Any]) -> Owner:
        """Return the owner that a module's ``lease`` parameter names."""
        try:
            return cls(run=str(value["run"]), user=str(value["user"]), controller=str(value["controller"]))
        except KeyError as missing:
            raise AerieError(f"lease: {missing} is missing: pass what host_lease returned as its 'lease'") from None


@contextlib.contextmanager
def _held(path: Path) -> Iterator[dict[str, Any] | None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield read_json(path)
        except FileNotFoundError:
            yield None
        except ValueError:
            yield None


def _write(path: Path, owner: Owner, seconds: int, now: float) -> None:
    write_json(path, {"owner": asdict(owner), "seconds": seconds, "expires": now + seconds})


def _takeover(found: dict[str, Any] | None, owner: Owner, *, breaking: bool, dead_runs: tuple[str, ...]) -> str | None:
    """Return the message of taking over what was ``found`` (None: nothing to say); raise when a live run holds it."""
    if found is None:
        return None
    holder, left = Owner.of(found["owner"]), found["expires"] - time.time()
    if holder.run == owner.run:
        return None
    if left > 0 and not breaking and holder.run not in dead_runs:
        raise AerieError(
            f"this host is held by {holder.user} on {holder.controller} (run {holder.run}) for another {left:.0f} s: "
            "wait for that run to end, or break its lease with -e aerie_lease_break=true if you know it is gone"
        )
    why = "it expired" if left <= 0 else "its run has ended" if holder.run in dead_runs else "broken as asked"
    return f"took over the lease of {holder.user} on {holder.controller} (run {holder.run}): {why}"


def check(path: Path, owner: Owner, *, breaking: bool = False, dead_runs: tuple[str, ...] = ()) -> str | None:
    """Raise AerieError where :func:`acquire` would; write nothing."""
    try:
        found = read_json(path)
    except (FileNotFoundError, ValueError):
        found = None
    return _takeover(found, owner, breaking=breaking, dead_runs=dead_runs)


def acquire(
    path: Path, owner: Owner, seconds: int = DEFAULT_SECONDS, *, breaking: bool = False, dead_runs: tuple[str, ...] = ()
) -> str | None:
    """Take the lease at ``path`` for ``seconds``; return a message when somebody else's was taken over.

    A live lease of another run raises AerieError, unless ``breaking`` or the run is known to have ended (``dead_runs``).
    """
    with _held(path) as found:
        message = _takeover(found, owner, breaking=breaking, dead_runs=dead_runs)
        _write(path, owner, seconds, time.time())
        return message


def renew(path: Path, owner: Owner) -> None:
    """Prolong our lease, or raise AerieError when it is not ours any more: then nothing may be changed."""
    with _held(path) as found:
        if found is None:
            raise AerieError(f"our lease on this host is gone ({path}): another run broke it; start again")
        holder = Owner.of(found["owner"])
        if holder.run != owner.run:
            raise AerieError(
                f"this host was taken over by {holder.user} on {holder.controller} (run {holder.run}): stopped before changing more"
            )
        _write(path, owner, int(found["seconds"]), time.time())


def release(path: Path, owner: Owner) -> bool:
    """Give our lease back; say whether there was one. Somebody else's stays."""
    with _held(path) as found:
        if found is None or Owner.of(found["owner"]).run != owner.run:
            return False
        path.unlink()
        return True


def renew_if_given(path: Path, value: dict[str, Any] | None) -> None:
    """Renew the lease that a module was given, if it was given one."""
    if value:
        renew(path, Owner.of(value))
