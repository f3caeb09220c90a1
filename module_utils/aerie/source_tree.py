"""An installed package's sources: which version it is, and what its wheel says each file was. Standard library only."""

from __future__ import annotations

import base64
import csv
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing, near


@dataclass(frozen=True)
class SourceTree:
    """The package ``package`` below the site-packages ``path``; ``record`` has the sha256 of each file as its wheel had it."""

    path: Path
    package: str
    version: Version
    record: Mapping[str, str]

    @classmethod
    def open(cls, path: Path, package: str, version: str | None = None) -> SourceTree:
        """Read the package's dist-info. Without one (a source checkout) ``version`` must be said, and no file is known to be pristine."""
        if not (path / package).is_dir():
            there = [entry.name for entry in path.iterdir()] if path.is_dir() else []
            raise AerieError(
                f"{path} holds no package {package!r}{near(package, there)}: path must be the site-packages that it is installed in"
            )
        found = _dist_infos(path, package)
        if len(found) > 1:
            raise AerieError(f"{path} has several versions of {package} ({listing(one.name for one in found)}): remove the older ones")
        if not found:
            if version is None:
                raise AerieError(f"{path} has no {package}-*.dist-info, so that its version isn't known: give version")
            return cls(path, package, Version.parse(version), {})
        text = version or found[0].name.removesuffix(".dist-info").partition("-")[2]
        return cls(path, package, Version.parse(text), _record(found[0] / "RECORD"))

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


def _dist_infos(path: Path, package: str) -> list[Path]:
    wanted = _normal(package)
    return [one for one in sorted(path.glob("*.dist-info")) if _normal(one.name.partition("-")[0]) == wanted]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _record(path: Path) -> dict[str, str]:
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
