"""A git checkout, read only: what a clean checkout of its HEAD would have in each file. Standard library only: this runs on hosts."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.specifiers import VERSION

SECONDS = 120
LOOKUPS = 24
REGULAR = ("100644", "100755")


@dataclass(frozen=True)
class GitCheckout:
    """The work tree ``top`` at ``commit``; names are below the directory ``prefix`` of it (empty, or ending in a slash).

    ``objects`` has git's name for the content of each regular file below the package, as the commit has it.
    """

    top: Path
    prefix: str
    commit: str
    objects: Mapping[str, str]
    _contents: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def find(cls, path: Path, package: str) -> GitCheckout | None:
        """Return the checkout whose HEAD has the ``package`` in the directory ``path``; None where there is none, or it isn't tracked."""
        real = path.resolve()
        top = next((directory for directory in (real, *real.parents) if (directory / ".git").exists()), None)
        if top is None:
            return None
        below = real.relative_to(top).as_posix()
        prefix = "" if below == "." else f"{below}/"
        commit = (
            _git(top, "rev-parse", "--verify", "HEAD^{commit}", why="its HEAD can't be read (no commit yet, or damaged)").decode().strip()
        )
        listed = _git(top, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{prefix}{package}/")
        objects = {}
        for line in filter(None, listed.split(b"\0")):
            facts, _, name = line.partition(b"\t")
            mode, _, sha = facts.decode().split(" ")
            if mode in REGULAR:
                objects[os.fsdecode(name).removeprefix(prefix)] = sha
        return cls(top, prefix, commit, objects) if objects else None

    @property
    def short(self) -> str:
        return self.commit[:12]

    def content(self, name: str) -> bytes | None:
        """Return the bytes of ``name`` as a clean checkout would have them, by its line endings and filters; None where HEAD lacks it.

        Many lookups are answered with one command for all files.
        """
        if name not in self.objects:
            return None
        if name not in self._contents:
            self._contents.update(self._read(self.objects if len(self._contents) >= LOOKUPS else [name]))
        return self._contents[name]

    def _read(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted = list(names)
        # git's header tells a file's size before its filters, so that only a mark that no file has can part one from the next.
        mark = uuid.uuid4().hex.encode()
        lines = b"".join(f"{self.objects[name]} ".encode() + os.fsencode(f"{self.prefix}{name}\n") for name in wanted)
        output = _git(
            self.top,
            "cat-file",
            "--filters",
            f"--batch={mark.decode()} %(objectname)",
            stdin=lines,
            why=f"files of its commit {self.short} can't be read (a damaged or partial clone?): try git fsck, or fetch them",
        )
        parts = output.split(mark + b" ")[1:]
        if len(parts) != len(wanted):
            raise AerieError(
                f"{self.top}: its commit {self.short} lacks files that it should have (a damaged or partial clone?): "
                f"try git fsck, or fetch them: {output.rsplit(mark, 1)[-1].decode(errors='replace').strip()[-200:]}"
            )
        return {name: part.partition(b"\n")[2].removesuffix(b"\n") for name, part in zip(wanted, parts, strict=True)}

    def sha256(self, name: str) -> str | None:
        """Return the sha256 of what ``content`` returns."""
        data = self.content(name)
        return None if data is None else sha256_bytes(data)

    def edited(self, package: str) -> list[str]:
        """Return the tracked files below ``package`` that differ from HEAD in the index or on the disk, deleted ones included."""
        argv = [
            "status",
            "--porcelain",
            "-z",
            "--no-renames",
            "--untracked-files=no",
            "--ignore-submodules=all",
            "--",
            f"{self.prefix}{package}",
        ]
        lines = _git(self.top, *argv).split(b"\0")
        return sorted(os.fsdecode(line[3:]).removeprefix(self.prefix) for line in lines if line)

    @cached_property
    def described(self) -> str | None:
        """The version by the newest tag like ``v1.2`` at or before the commit: ``1.2`` or ``1.2+7.g0123abc``; None without one."""
        argv = ["describe", "--tags", "--long", "--match", "v[0-9]*", "--match", "[0-9]*", self.commit]
        try:
            text = _git(self.top, *argv).decode().strip()
        except AerieError:
            return None
        tag, count, commit = text.rsplit("-", 2)
        version = tag.removeprefix("v") + ("" if count == "0" else f"+{count}.{commit}")
        return version if VERSION.fullmatch(version) else None

    @property
    def shallow(self) -> bool:
        return _git(self.top, "rev-parse", "--is-shallow-repository").strip() == b"true"


def _git(top: Path, *arguments: str, stdin: bytes = b"", why: str | None = None) -> bytes:
    """Run git on the checkout ``top`` so that it only reads: no index refresh, no lock, no network, no program but filters.

    That the directory is given makes it read a tree of another owner too, in versions that don't heed safe.directory from here.
    """
    # A filter is a program that the checkout's own configuration names: another user's is not run with our rights.
    settings = {} if top.stat().st_uid == os.geteuid() else {f"filter.{name}": "" for name in _filters(top)}
    return _run(top, *arguments, settings=settings, stdin=stdin, why=why)


@cache
def _filters(top: Path) -> tuple[str, ...]:
    listed = _run(top, "config", "--name-only", "--null", "--get-regexp", r"^filter\..*\.(smudge|process|clean)$", quiet=True)
    return tuple(name.decode(errors="surrogateescape").removeprefix("filter.") for name in listed.split(b"\0") if name)


def _run(
    top: Path,
    *arguments: str,
    settings: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    why: str | None = None,
    quiet: bool = False,
) -> bytes:
    chosen = {
        **(settings or {}),
        "safe.directory": str(top),
        "core.fsmonitor": "false",
        "core.untrackedCache": "false",
        "protocol.allow": "never",
        "status.relativePaths": "false",
    }
    argv = ["git", "--no-optional-locks", "--literal-pathspecs"]
    argv += [
        f"--git-dir={top / '.git'}",
        f"--work-tree={top}",
        *(part for key, value in chosen.items() for part in ("-c", f"{key}={value}")),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    try:
        done = subprocess.run([*argv, *arguments], cwd=top, env=environment, input=stdin, capture_output=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise AerieError(f"{top} is a git checkout, but there is no git on this host to tell its original files: install git") from None
    except OSError as error:
        raise AerieError(f"{top}: git could not be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise AerieError(f"{top}: git {arguments[0]} did not end within {SECONDS} s: is the file system slow or hanging?") from error
    if done.returncode != 0 and not quiet:
        said = done.stderr.decode(errors="replace").strip().replace("\n", "; ")[-500:]
        raise AerieError(f"{top}: this git checkout can't be used: {why or f'git {arguments[0]} failed'}: {said or 'git said nothing'}")
    return done.stdout
