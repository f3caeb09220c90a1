"""Where everything of Aerie lies on a host. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostPaths:
    """The tree below ``root`` (``aerie_root``): one place that names every directory of it."""

    root: Path

    @property
    def environments(self) -> Path:
        return self.root / "environments"

    @property
    def packages(self) -> Path:
        return self.root / "packages"

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def current(self) -> Path:
        return self.root / "current"

    @property
    def previous(self) -> Path:
        return self.root / "previous"

    @property
    def originals(self) -> Path:
        return self.root / "originals"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def instances(self) -> Path:
        return self.root / "instances"

    @property
    def caches(self) -> Path:
        return self.root / "caches"

    @property
    def supervisor(self) -> Path:
        return self.root / "supervisor"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def lease(self) -> Path:
        return self.root / "lease.json"

    def release(self, release_id: str) -> Path:
        return self.releases / release_id

    def instance(self, name: str) -> Path:
        return self.instances / name
