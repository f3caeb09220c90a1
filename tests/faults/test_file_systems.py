"""A full or read-only file system, or one without permission: one clear error that names the path, everything as before."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from package import ANEW, NARROW, WAYS, WIDE, Site, ideal

NOBODY = 65534
mounting = pytest.mark.skipif(os.geteuid() != 0, reason="mounting small file systems needs root: sudo make faults")


@contextmanager
def mounted(place: Path, *words: str) -> Iterator[Path]:
    place.mkdir()
    subprocess.run(["mount", *words, str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m,nr_inodes=400", "tmpfs") as place:
        yield place


def remount(place: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(place)], check=True)


def fill(place: Path, left: int) -> None:
    """Fill the file system until ``left`` blocks are free."""
    facts = os.statvfs(place)
    with (place / "filler").open("wb") as stream:
        stream.write(bytes(max(0, facts.f_bavail - left) * facts.f_bsize))


def fill_names(place: Path, left: int) -> None:
    """Make files until ``left`` more can be made."""
    (place / "fillers").mkdir()
    for number in range(os.statvfs(place).f_favail - left):
        (place / "fillers" / str(number)).touch()


def free(place: Path) -> None:
    for path in (place / "filler", *(place / "fillers").glob("*")):
        path.unlink(missing_ok=True)
    if (place / "fillers").is_dir():
        (place / "fillers").rmdir()


def as_self(function: Callable[[], object]) -> str:
    """Run ``function`` in a child; return what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            function()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        os.write(writer, error.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()


def as_nobody(function: Callable[[], object]) -> str:
    """The same without root's rights."""

    def function_of_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        function()

    return as_self(function_of_nobody)


def sites(memory: Path, small: Path) -> dict[str, Callable[[], Site]]:
    return {
        "tree": lambda: Site(small, memory / "store"),
        "store": lambda: Site(memory, small / "store"),
        "both": lambda: Site(small),
    }


@mounting
@pytest.mark.parametrize("filling", [fill, fill_names])
@pytest.mark.parametrize("full", ["tree", "store", "both"])
@pytest.mark.parametrize("start", list(WAYS))
def test_a_full_disk_at_any_level(memory, small, way, start, full, filling, everything, count):
    start, wanted = WAYS[start]
    site = sites(memory, small)[full]()
    site.apply(*start)
    site.copy_to(memory / "template")
    failed = 0
    for left in range(60) if everything else (0, 8, 40):
        site.restore_from(memory / "template")
        filling(small, left)
        error = as_self(lambda: site.apply(*wanted))
        free(small)
        if error:
            failed += 1
            assert error.startswith("AerieError: ") and os.strerror(errno.ENOSPC) in error and str(small) in error
            assert len(error.splitlines()) <= 2
            site.assert_clean(*(wanted if "everything was applied" in error else start))
        site.assert_goes_on(*wanted)
    count |= {"full disks": failed}


@mounting
def test_a_disk_that_is_full_when_all_must_be_put_back(small, way, memory):
    site = Site(small)
    site.apply(WIDE, NARROW)

    def fail() -> None:
        fill(small, 0)
        raise AerieError("the verifier says no")

    with pytest.raises(AerieError, match="the verifier says no") as refusal:
        site.apply(ANEW, verify=fail)
    if way == "exchanged":
        assert "everything in" in str(refusal.value)
        free(small)
        site.assert_clean(WIDE, NARROW)
    else:
        assert "was put back" in str(refusal.value) or f"{os.strerror(errno.ENOSPC)}" in str(refusal.value)
        free(small)
    site.assert_goes_on(WIDE, NARROW)


@mounting
@pytest.mark.parametrize("which", ["tree", "store", "both"])
@pytest.mark.parametrize("start", list(WAYS))
def test_a_file_system_that_became_read_only(memory, small, start, which):
    start, wanted = WAYS[start]
    site = sites(memory, small)[which]()
    site.apply(*start)
    remount(small, "ro")
    with pytest.raises(AerieError, match=rf"{small}.*(?i:read-only)"):
        site.apply(*wanted)
    assert site.content == ideal(start)[0]
    remount(small, "rw")
    site.assert_clean(*start)
    site.assert_goes_on(*wanted)


@mounting
def test_a_file_system_that_becomes_read_only_in_the_middle(memory, small, way):
    site = Site(small, memory / "store")

    def fail() -> None:
        remount(small, "ro")
        raise AerieError("the verifier says no")

    with pytest.raises(AerieError, match=r"(?s)says no.*not everything .* could be put back.*Read-only"):
        site.apply(WIDE, verify=fail)
    remount(small, "rw")
    site.apply()
    site.assert_clean()


@mounting
def test_an_overlay_file_system_as_in_a_container(memory, count):
    """Its directories come from below and can't be exchanged; files are replaced one by one."""
    for name in ("lower", "upper", "work"):
        (memory / name).mkdir()
    Site(memory / "lower")
    options = f"lowerdir={memory / 'lower'},upperdir={memory / 'upper'},workdir={memory / 'work'}"
    with contextlib.ExitStack() as mounts:
        try:
            place = mounts.enter_context(mounted(memory / "merged", "-t", "overlay", "-o", options, "overlay"))
        except subprocess.CalledProcessError:  # of mount alone; the end of the run says NOT RUN
            pytest.skip("this kernel mounts no overlay file system")
        site = Site.__new__(Site)
        site.path, site.store_path = place / "site-packages", memory / "store"
        site.assert_goes_on(WIDE, NARROW)
        site.assert_goes_on(ANEW)


def give_away(place: Path) -> None:
    if os.geteuid() == 0:
        for path in (place, *place.rglob("*")):
            os.lchown(path, NOBODY, NOBODY)


@pytest.mark.parametrize(
    "closed", ["site-packages", "site-packages/pkg", "site-packages/pkg/low", "store", "store/sha256", "store/journals", "store/manifests"]
)
def test_a_directory_without_permission(memory, closed):
    site = Site(memory)
    site.apply(NARROW)
    memory.chmod(0o755)
    give_away(memory)
    (memory / closed).chmod(0o555)
    try:
        error = as_nobody(lambda: site.apply(WIDE))
    finally:
        (memory / closed).chmod(0o755)
    if error:
        assert error.startswith("AerieError: ") and str(memory / closed) in error and "ermission" in error
        site.assert_clean(NARROW)
    else:
        site.assert_clean(WIDE)
    assert as_nobody(lambda: site.assert_goes_on(WIDE)) == ""


def test_the_unwritable_parent_of_the_package_is_no_obstacle(memory):
    site = Site(memory)
    memory.chmod(0o755)
    give_away(memory)
    site.path.chmod(0o555)
    try:
        assert as_nobody(lambda: site.assert_goes_on(WIDE)) == ""
    finally:
        site.path.chmod(0o755)


def test_a_file_size_limit_is_met_at_any_file(memory, way):
    site = Site(memory)
    failed = 0
    for limit in (10, 30, 60, 100, 300, 800, 1500, 2500, 4000, 8000):

        def limited(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            site.apply(ANEW)

        child_error = as_self(limited)
        if child_error:
            failed += 1
            assert child_error.startswith("AerieError: ") and os.strerror(errno.EFBIG) in child_error and str(memory) in child_error
            site.assert_clean()
        site.assert_goes_on(ANEW)
    assert failed > 4
