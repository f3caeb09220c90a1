"""Bringing a host's files to the controller, within bounds that the controller sets."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import collection, placing
from ansible.module_utils.aerie.measuring.collection import Examine
from ansible.module_utils.aerie.measuring.placing import Entry, Limits
from ansible.module_utils.aerie.words import clean_lines


def take_limits(arguments: dict[str, Any]) -> Limits:
    """Take the bounds out of a task's arguments: the module on the host has no use for them."""
    given = arguments.pop("fetch_limits", None) or {}
    if not isinstance(given, Mapping):
        raise AerieError("fetch_limits must have gib and files, both numbers of more than 0")
    values = {"gib": placing.DEFAULT_GIB, "files": placing.DEFAULT_FILES} | dict(given)
    try:
        limits = Limits(gib=float(values.pop("gib")), files=int(values.pop("files")))
    except (TypeError, ValueError):
        limits = Limits(0, 0)
    if values or not (0 < limits.gib <= 1 << 20 and limits.files > 0):
        raise AerieError("fetch_limits must have gib and files, both numbers of more than 0")
    return limits


def bring(
    action: Any,
    lacking: list[Entry],
    dest: Path,
    task_vars: dict[str, Any],
    what: str,
    limits: Limits,
    packing: Mapping[str, Any],
    *,
    examine: Examine | None = None,
    replace: bool = False,
) -> tuple[str, ...]:
    """Bring files to ``dest`` in one archive, which the action's module packs when it is called with ``packing``.

    Returns why groups of files stayed away. Raises AerieError where nothing can be brought.
    """
    placing.require_room(lacking, limits)
    shell = action._connection._shell
    remote = shell.join_path(shell.tmpdir or action._make_tmp_path(), f"{what}.tar.gz")
    arguments = dict(packing) | {"archive": remote, "wanted": [entry.path for entry in lacking]}
    packed = action._execute_module(module_args=arguments, task_vars=task_vars)
    if packed.get("failed"):
        raise AerieError(f"the host could not pack its {what}: {clean_lines(packed.get('msg'))}")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / f"{what}.tar.gz"
            most = collection.most_bytes(lacking)
            try:
                with files_of_at_most(most):
                    action._connection.fetch_file(remote, str(local))
                too_large = local.stat().st_size > most
            except (AnsibleError, OSError) as error:
                raise AerieError(
                    f"the archive of the host's {what} could not be fetched, or is larger than the {most:,} bytes "
                    f"that its list of files allows: {clean_lines(error)}"
                ) from error
            if too_large:
                raise AerieError(f"the archive of the host's {what} is larger than the {most:,} bytes that its list allows")
            return collection.unpack(local, lacking, dest, examine, replace=replace)
    finally:
        action._remove_tmp_path(shell.tmpdir, force=True)


@contextlib.contextmanager
def files_of_at_most(most: int) -> Iterator[None]:
    """Let no file grow beyond ``most`` bytes meanwhile, whichever process writes it for this one.

    What a host sends is received by sftp, scp or Ansible itself, none of which knows a bound. Each task has a worker process of its own.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bounded = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY:
        bounded = min(bounded, soft)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bounded, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
