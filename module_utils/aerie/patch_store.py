"""Where originals are kept: by content hash, outside the trees, never overwritten. Standard library only: this runs on hosts.

Below the store's root: ``sha256/ab/<hash>`` (bytes of files), ``manifests/<tree>.json`` (what is applied to a tree, by whom, since when),
``journals/<tree>.json`` (a transaction that has begun and not ended), ``locks/<tree>.lock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import fsync_dir, read_json, sha256_bytes, write_atomic, write_json
from ansible.module_utils.aerie.source_tree import SourceTree


@dataclass(frozen=True)
class PatchStore:
    """The store at ``root``, seen from the tree ``tree`` (its identity)."""

    root: Path
    tree: str

    @classmethod
    def beside(cls, tree: SourceTree, root: Path) -> PatchStore:
        """Return the store at ``root`` for ``tree``; raise where it would lie inside it."""
        if root.resolve().is_relative_to(tree.path.resolve()):
            raise AerieError(f"store {root} lies inside {tree.path}: choose a place that isn't lost with it")
        return cls(root, tree.identity)

    @property
    def key(self) -> str:
        return sha256_bytes(self.tree.encode())[:16]

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifests" / f"{self.key}.json"

    @property
    def journal_path(self) -> Path:
        return self.root / "journals" / f"{self.key}.json"

    def object_path(self, sha256: str) -> Path:
        return self.root / "sha256" / sha256[:2] / sha256

    def put(self, data: bytes) -> str:
        """Keep ``data``, durably; return its hash. What is there already is checked and never overwritten."""
        sha256 = sha256_bytes(data)
        path = self.object_path(sha256)
        if self._intact(path, sha256) is None:
            made = [parent for parent in path.parents if not parent.exists()]
            write_atomic(path, data, 0o444)
            for directory in made:
                fsync_dir(directory.parent)
        return sha256

    def get(self, sha256: str) -> bytes | None:
        """Return the bytes with that hash, or None where the store hasn't them."""
        return self._intact(self.object_path(sha256), sha256)

    @staticmethod
    def _intact(path: Path, sha256: str) -> bytes | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if sha256_bytes(data) != sha256:
            raise AerieError(
                f"{path}: this kept original is damaged (its hash is another): restore it from a backup, or install the package anew"
            )
        return data

    def manifest(self) -> dict[str, Any] | None:
        return self._json(self.manifest_path)

    def journal(self) -> dict[str, Any] | None:
        return self._json(self.journal_path)

    @staticmethod
    def _json(path: Path) -> dict[str, Any] | None:
        try:
            return dict(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise AerieError(f"{path}: can't be read: {error}") from error

    def write_manifest(self, manifest: dict[str, Any] | None) -> None:
        self._write(self.manifest_path, manifest)

    def write_journal(self, journal: dict[str, Any] | None) -> None:
        self._write(self.journal_path, journal)

    @staticmethod
    def _write(path: Path, value: dict[str, Any] | None) -> None:
        if value is not None:
            made = [parent for parent in path.parents if not parent.exists()]
            write_json(path, value)
            for directory in made:
                fsync_dir(directory.parent)
        elif path.exists():
            path.unlink()
            fsync_dir(path.parent)

    def same_filesystem_as(self, path: Path) -> bool:
        """Say whether one broken file system would lose both the tree and its originals."""
        there = self.root
        while not there.exists():
            there = there.parent
        return there.stat().st_dev == path.stat().st_dev

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs off this tree; a run that was killed frees it."""
        path = self.root / "locks" / f"{self.key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AerieError(f"{self.tree}: another run is patching it now: wait for that to end") from None
            yield
        finally:
            os.close(descriptor)
