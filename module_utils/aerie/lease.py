"""The host lease: one controller changes a host at a time. Standard library only: this runs on hosts.

A lease is a small file with an owner and an expiry, not a lock: a controller that died is succeeded, never waited for
by hand. ``flock`` on a file beside it makes reading and writing the lease one step. While a module works, a thread of
it renews the lease (:class:`Keeper`), however long the work takes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease_file, locks
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_json

DEFAULT_SECONDS = 900
LOCK_SECONDS = 10.0
"""How long to wait for whoever reads or writes the lease, which takes them milliseconds."""
KEPT_PART = 3
"""A lease is renewed so many times while it lasts."""


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


@dataclass(frozen=True)
class Unreadable:
    """What is no lease stands where one should: a damaged file, or something else."""

    path: Path
    reason: str
    is_file: bool = True

    def __str__(self) -> str:
        return f"{self.path} is no lease ({self.reason})"


Lease = dict[str, Any]


def read(path: Path) -> Lease | Unreadable | None:
    """Return the lease at ``path``; None where there is none."""
    try:
        return lease_file.read(path)
    except FileNotFoundError:
        return None
    except IsADirectoryError:
        return Unreadable(path, "a directory", is_file=False)
    except (OSError, ValueError) as error:
        return Unreadable(path, getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: "))


def holder(path: Path) -> dict[str, str] | None:
    """Return who holds the lease at ``path``, for messages; None where nobody does, or where that can't be read."""
    found = read(path)
    return dict(found["owner"]) if isinstance(found, dict) else None


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Lease | Unreadable | None]:
    with locks.held(path.with_suffix(".lock"), LOCK_SECONDS, "somebody else has the lock of this host's lease"):
        yield read(path)


def _write(path: Path, owner: Owner, seconds: int, now: float) -> None:
    write_json(path, {"owner": asdict(owner), "seconds": seconds, "expires": now + seconds})


def _left(found: Lease, now: float) -> float:
    """Return how many seconds a lease lasts yet: no more than it was taken for, though a clock was set back since."""
    return min(float(found["expires"]) - now, float(found["seconds"]))


def _takeover(found: Lease | Unreadable | None, owner: Owner, *, breaking: bool, dead_runs: tuple[str, ...]) -> str | None:
    """Return the message of taking over what was ``found`` (None: nothing to say); raise when a live run holds it."""
    if found is None:
        return None
    if isinstance(found, Unreadable):
        # A file that is cut or damaged names nobody, and whoever wrote it stops at the next renewal.
        if not found.is_file and not breaking:
            raise AerieError(f"{found}: look what it is, and have it moved aside with -e aerie_lease_break=true")
        return f"{found}: taken as free" + ("" if found.is_file else f", and moved aside to {found.path}.<time>")
    held_by, left = Owner.of(found["owner"]), _left(found, time.time())
    if held_by.run == owner.run:
        return None
    if left > 0 and not breaking and held_by.run not in dead_runs:
        raise AerieError(
            f"this host is held by {held_by.user} on {held_by.controller} (run {held_by.run}) for another {left:.0f} s: "
            "wait for that run to end, or break its lease with -e aerie_lease_break=true if you know it is gone"
        )
    why = "it expired" if left <= 0 else "its run has ended" if held_by.run in dead_runs else "broken as asked"
    return f"took over the lease of {held_by.user} on {held_by.controller} (run {held_by.run}): {why}"


def check(path: Path, owner: Owner, *, breaking: bool = False, dead_runs: tuple[str, ...] = ()) -> str | None:
    """Raise AerieError where :func:`acquire` would; write nothing."""
    return _takeover(read(path), owner, breaking=breaking, dead_runs=dead_runs)


def acquire(
    path: Path, owner: Owner, seconds: int = DEFAULT_SECONDS, *, breaking: bool = False, dead_runs: tuple[str, ...] = ()
) -> str | None:
    """Take the lease at ``path`` for ``seconds``; return a message when somebody else's was taken over.

    A live lease of another run raises AerieError, unless ``breaking`` or the run is known to have ended (``dead_runs``).
    """
    with _held(path) as found:
        message = _takeover(found, owner, breaking=breaking, dead_runs=dead_runs)
        if isinstance(found, Unreadable) and path.is_dir() and not path.is_symlink():
            path.rename(path.with_name(f"{path.name}.{time.time_ns()}"))  # whatever it holds stays
        _write(path, owner, seconds, time.time())
        return message


def renew(path: Path, owner: Owner) -> int:
    """Prolong our lease and return its seconds; raise AerieError when it is not ours any more: then nothing may be changed."""
    with _held(path) as found:
        if found is None:
            raise AerieError(f"our lease on this host is gone ({path}): another run broke it; start again")
        if isinstance(found, Unreadable):
            raise AerieError(f"{found}, and was ours: it was damaged meanwhile; start again")
        held_by = Owner.of(found["owner"])
        if held_by.run != owner.run:
            raise AerieError(
                f"this host was taken over by {held_by.user} on {held_by.controller} (run {held_by.run}): stopped before changing more"
            )
        seconds = int(found["seconds"])
        _write(path, owner, seconds, time.time())
        return seconds


def release(path: Path, owner: Owner) -> bool:
    """Give our lease back; say whether there was one. Somebody else's stays."""
    with _held(path) as found:
        if not isinstance(found, dict) or Owner.of(found["owner"]).run != owner.run:
            return False
        path.unlink()
        return True


# ---- while work lasts ------------------------------------------------------------------------------


class Keeper:
    """A thread that renews a lease until the process ends, the lease is another's, or it is told to stop.

    Work asks for itself whether the lease is still ours (:func:`renew`), where it can stop.
    """

    def __init__(self, path: Path, owner: Owner, seconds: int) -> None:
        self.path, self.owner = path, owner
        self._every = seconds / KEPT_PART
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="aerie-lease")
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._is_over.wait(self._every):
            try:
                self._every = renew(self.path, self.owner) / KEPT_PART
            except (AerieError, OSError):
                return


_keeper: Keeper | None = None


def keep(path: Path, owner: Owner) -> None:
    """Renew our lease now, and from now on until this process ends; raise AerieError when it is not ours any more."""
    global _keeper
    seconds = renew(path, owner)
    if _keeper is None:
        _keeper = Keeper(path, owner, seconds)


def leave() -> Keeper | None:
    """Stop renewing, as before a fork, and return what was kept: a thread does not come along, and may hold a lock."""
    global _keeper
    kept, _keeper = _keeper, None
    if kept is not None:
        kept.stop()
    return kept


def resume(kept: Keeper | None) -> None:
    """Renew again what was :func:`leave` left; where it is another's by now, the work finds out itself."""
    if kept is not None:
        with contextlib.suppress(AerieError, OSError):
            keep(kept.path, kept.owner)


def renew_if_given(path: Path, value: dict[str, Any] | None) -> None:
    """Renew the lease that a module was given, if it was given one, and keep it while the module works."""
    if value:
        keep(path, Owner.of(value))
