"""A package's sources: which version it is, and what its wheel, or its git checkout, says each file was. Standard library only."""

from __future__ import annotations

import ast
import base64
import csv
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_bytes
from ansible.module_utils.aerie.patching.git_checkout import GitCheckout
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing, near

RECORD, GIT, NONE = "record", "git", "none"


@dataclass(frozen=True)
class SourceTree:
    """The package ``package`` below ``path``: site-packages, or the directory of a git checkout that a Python imports it from.

    ``record`` has the sha256 of each file as its wheel had it. Without any for the package, ``git`` is the checkout that tracks it.
    """

    path: Path
    package: str
    version: Version
    record: Mapping[str, str]
    git: GitCheckout | None = None

    @classmethod
    def open(cls, path: Path, package: str, version: str | None = None) -> SourceTree:
        """Read what says how the package's files were: the RECORD beside it, else HEAD of the git checkout that tracks it, else nothing.

        An editable install's RECORD has no hash of the package, and doesn't count. The version is the one that is given, else that of the
        dist-info beside the package, else what its ``_version.py`` or ``version.py`` says, else what git's tags say.
        """
        if not (path / package).is_dir():
            there = [entry.name for entry in path.iterdir()] if path.is_dir() else []
            raise AerieError(
                f"{path} holds no package {package!r}{near(package, there)}: path must be the site-packages that it is installed in, "
                "or the directory of a checkout that it is imported from"
            )
        found = _dist_infos(path, package)
        if len(found) > 1:
            raise AerieError(f"{path} has several versions of {package} ({listing(one.name for one in found)}): remove the older ones")
        record = read_record(found[0] / "RECORD") if found else {}
        git = None if _covers(record, package) else GitCheckout.find(path, package)
        said = found[0].name.removesuffix(".dist-info").partition("-")[2] if found else None
        text = version or (_known(said) if git else said) or _version(path, package, git)
        return cls(path, package, Version.parse(text), record, git)

    @property
    def origin(self) -> str:
        """What says how the files were: ``record``, ``git`` or ``none``."""
        return GIT if self.git else RECORD if _covers(self.record, self.package) else NONE

    @property
    def commit(self) -> str | None:
        """The commit that a git checkout is at."""
        return self.git.commit if self.git else None

    @property
    def words(self) -> str:
        """What says how the files were, for messages."""
        if self.git:
            return f"HEAD (commit {self.git.short})"
        return "the wheel's RECORD" if self.record else "any record"

    def recorded(self, name: str) -> str | None:
        """Return the sha256 of the file ``name`` as its origin has it, or None where it has no such file, or there is no origin."""
        return self.git.sha256(name) if self.git else self.record.get(name)

    def pristine(self, name: str) -> bytes | None:
        """Return the bytes of the file ``name`` as its origin has them: git has them all, a RECORD only those that are there still."""
        if self.git:
            return self.git.content(name)
        found = self.read(name)
        return found if found is not None and sha256_bytes(found) == self.record.get(name) else None

    @property
    def files(self) -> list[str]:
        """The names of the package's files that the origin has, symbolic links left out."""
        known = self.git.objects if self.git else self.record
        return sorted(name for name in known if name.startswith(f"{self.package}/"))

    def edited(self) -> list[str]:
        """Return the package's tracked files that a git checkout has with other content than HEAD; an installed package tells none."""
        return self.git.edited(self.package) if self.git else []

    @property
    def home(self) -> Path:
        """The directory whose loss loses the package: the whole checkout, or where it is installed."""
        return self.git.top if self.git else self.path.resolve()

    @property
    def identity(self) -> str:
        """The tree, however it was reached: symlinks resolved."""
        return str(self.path.resolve() / self.package)

    def file(self, name: str) -> Path:
        """Return the path of the file ``name``; raise where that would lead out of the tree or through a symlink."""
        if not name.startswith(f"{self.package}/"):
            raise AerieError(f"{name} is not in the package {self.package}")
        path = self.path
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise AerieError(f"{path} is a symbolic link: the tree would not own what is changed; give it a copy")
        return path

    def read(self, name: str) -> bytes | None:
        """Return the bytes of the file ``name``, or None where there is none."""
        try:
            return self.file(name).read_bytes()
        except FileNotFoundError:
            return None
        except (IsADirectoryError, NotADirectoryError):
            raise AerieError(f"{self.path / name}: something else than a file is in the way") from None
        except OSError as error:
            raise AerieError(f"{error.filename}: {error.strerror}") from error

    def missing_directories(self, name: str) -> list[str]:
        """Return the directories that the file ``name`` needs and that aren't there, outermost first."""
        parents = [str(Path(*Path(name).parts[:count])) for count in range(1, len(Path(name).parts))]
        return [parent for parent in parents if not (self.path / parent).is_dir()]

    def unwritable(self, name: str) -> str | None:
        """Say why the file ``name`` could not be replaced, or None."""
        directory = (self.path / name).parent
        while not directory.exists():
            directory = directory.parent
        effective = os.access in os.supports_effective_ids
        if os.access(directory, os.W_OK | os.X_OK, effective_ids=effective):
            return None
        return f"{directory}: no permission to replace files here, or the file system is read-only: become its owner, or remount it"


def _covers(record: Mapping[str, str], package: str) -> bool:
    """Say whether a RECORD has hashes of the package itself; that of an editable install has not."""
    return any(name.startswith(f"{package}/") for name in record)


def _known(version: str | None) -> str | None:
    """Return ``version``, unless it is what setuptools-scm and SGLang say where they can't tell: 0.0.0 or 0.0.0.dev0."""
    return None if version is None or re.match(r"0(\.0)*(\D|$)", version) else version


def _version(path: Path, package: str, git: GitCheckout | None) -> str:
    written = [_known(_written_version(path / package / name)) for name in ("_version.py", "version.py")]
    found = next(filter(None, written), None) or (git.described if git else None)
    if found is None:
        shallow = ", and its git checkout is shallow and has no tag" if git and git.shallow else ", and no git tag tells it" if git else ""
        raise AerieError(
            f"{path} has no {package}-*.dist-info and no {package}/_version.py, so that its version isn't known{shallow}: give version"
        )
    return found


def _written_version(file: Path) -> str | None:
    """Return what a module assigns to ``__version__`` at its top level; an assignment in a try or if is a fallback."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for statement in body:
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []
        )
        value = getattr(statement, "value", None)
        named = any(isinstance(target, ast.Name) and target.id == "__version__" for target in targets)
        if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return None


def _dist_infos(path: Path, package: str) -> list[Path]:
    wanted = _normal(package)
    return [one for one in sorted(path.glob("*.dist-info")) if _normal(one.name.partition("-")[0]) == wanted]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_record(path: Path) -> dict[str, str]:
    """Read a RECORD: path, ``sha256=<url-safe base64>``, size. Source: packaging.python.org, Recording installed projects."""
    hashes = {}
    try:
        with path.open(newline="") as stream:
            for row in csv.reader(stream):
                if len(row) >= 2 and row[1].startswith("sha256="):
                    digest = row[1].removeprefix("sha256=")
                    hashes[row[0]] = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, csv.Error) as error:
        raise AerieError(f"{path}: can't be read as a wheel's RECORD: {error}") from error
    return hashes
