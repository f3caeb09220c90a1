"""A lock is held by one process, nobody waits for it without end, and who has it is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.aerie import locks
from ansible.module_utils.aerie.errors import AerieError

HOLD = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); time.sleep(120)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "directory" / ".lock"


@pytest.fixture
def stranger(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which may only read the lock file, and holds it."""
    path.parent.mkdir()
    path.touch()
    path.chmod(0o644)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_lock_file_is_private_and_held_by_one(path):
    with locks.held(path, 0, "somebody works"):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(AerieError, match="somebody works"), locks.held(path, 0, "somebody works"):
            pass
    with locks.held(path, 0, "somebody works"):
        pass


def test_a_lock_that_stays_held_is_given_up_with_its_holder_and_its_file(path, stranger):
    waited = []
    with pytest.raises(AerieError) as raised, locks.held(path, 0.2, "somebody works", lambda: waited.append(1)):
        pass
    assert f"(process {stranger.pid}, {sys.executable} -c" in str(raised.value)
    assert str(path) in str(raised.value)
    assert waited == [1]
    assert path.stat().st_mode & 0o777 == 0o600, "from now on nobody else opens it"


def test_a_lock_is_had_when_its_holder_ends(path, stranger):
    def end() -> None:
        stranger.kill()

    with locks.held(path, 20, "somebody works", end):
        pass


def test_a_link_in_its_place_is_not_followed(path, tmp_path):
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AerieError, match="a lock file can't be kept there"), locks.held(path, 0, "somebody works"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_does_not_go_to_programs_that_its_holder_starts(path):
    with locks.held(path, 0, "somebody works") as descriptor:
        assert not os.get_inheritable(descriptor)
