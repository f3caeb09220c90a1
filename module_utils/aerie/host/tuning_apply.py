"""Carrying out a plan of host tuning, whole or not at all. Standard library only: this runs on hosts."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic, write_json
from ansible.module_utils.aerie.host import tuning_files as files
from ansible.module_utils.aerie.host.tuning import File, Live, Plan
from ansible.module_utils.aerie.host.tuning_found import STATE, UNDONE, Run, State, at, run_command
from ansible.module_utils.aerie.host.tuning_settings import Settings


def apply(planned: Plan, root: Path, prior: State | None, run: Run = run_command) -> list[str]:
    """Carry out a plan and return what comes only at the next boot; whatever fails, files and live values are put back first."""
    state_path = at(root, STATE)
    done_files: list[File] = []
    done_commands: list[tuple[str, ...]] = []
    directories = _missing(
        root, [*(file.path for file in planned.files if file.after is not None), f"{files.WANTS}/{files.ACS_UNIT}", STATE]
    )
    journal = planned.state or State(directories=prior.directories if prior else (), previous=prior.previous if prior else {})
    try:
        write_json(state_path, replace(journal, pending=planned.commands).as_dict())
        for argv in planned.before:
            _must(run, argv)
        for file in planned.files:
            done_files.append(file)
            _put(root, file.path, file.after, file.mode)
        for argv in planned.commands:
            done_commands.append(argv)
            _must(run, argv)
        notes = [note for change in planned.live if (note := _set(root, change, run))]
    except BaseException as error:
        for argv in done_commands:
            if argv[1:2] == ("enable",):
                run((argv[0], "disable", "--now", argv[-1]))
        for change in reversed(planned.live):
            _put_back(root, change, run)
        for file in reversed(done_files):
            _put(root, file.path, file.before, file.mode)
        _restore_state(root, state_path, prior, directories)
        for argv in done_commands:  # what they made follows the files again
            if argv[1:2] not in (("enable",), ("restart",)):
                run(argv)
        for argv in planned.before:
            run((argv[0], "enable", "--now", argv[-1]))
        if isinstance(error, (AerieError, OSError)):
            raise AerieError(f"{error}: files and settings were put back as they were") from error
        raise
    if planned.state is not None:
        write_json(state_path, planned.state.as_dict())
    else:
        _restore_state(root, state_path, None, prior.directories if prior else ())
    _write_undone(root, planned.undone)
    return notes


def _set(root: Path, change: Live, run: Run) -> str | None:
    """Set a live value; return why it comes only at the next boot."""
    if change.by is not None:
        status, text = run(change.by)
        return None if status == 0 else f"{' '.join(change.by)} failed ({status}: {text[-300:]}): {change.before} stays until the next boot"
    if change.path is None:
        return None
    try:
        at(root, change.path).write_text(f"{change.after}\n")
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            return f"{change.path} can't be written now ({error.strerror}): {change.after} comes at the next boot"
        raise AerieError(f"{change.path}: the kernel does not take {change.after}: {error.strerror}") from error
    return None


def _put_back(root: Path, change: Live, run: Run) -> None:
    """Set a live value to what it was, whether or not it was changed before something failed."""
    if change.path is not None:
        with contextlib.suppress(OSError):
            at(root, change.path).write_text(f"{change.before}\n")
    elif change.back is not None:
        run(change.back)


def _put(root: Path, path: str, text: str | None, mode: int) -> None:
    place = at(root, path)
    if text is None:
        place.unlink(missing_ok=True)
    else:
        write_atomic(place, text, mode)


def _restore_state(root: Path, path: Path, state: State | None, directories: Iterable[str]) -> None:
    """Put the state file back, or remove it and the directories that were made, where nothing else lies in them."""
    if state is not None:
        write_json(path, state.as_dict())
    else:
        path.unlink(missing_ok=True)
    for directory in sorted(directories, reverse=True):
        with contextlib.suppress(OSError):
            at(root, directory).rmdir()


def _write_undone(root: Path, undone: Settings) -> None:
    path = at(root, UNDONE)
    if undone:
        write_json(path, {"kernel_command_line": list(undone.kernel_command_line), "modprobe": undone.modprobe})
    else:
        path.unlink(missing_ok=True)


def _missing(root: Path, paths: Iterable[str]) -> list[str]:
    return sorted({str(parent) for path in paths for parent in Path(path).parents if not at(root, str(parent)).exists()})


def _must(run: Run, argv: tuple[str, ...]) -> None:
    status, text = run(argv)
    if status != 0:
        raise AerieError(f"{' '.join(argv)} failed ({status}): {text[-1000:]}")
