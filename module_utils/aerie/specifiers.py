"""Versions and version specifiers of Python packages (PEP 440, without local versions). Standard library only: this runs on hosts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import total_ordering

from ansible.module_utils.aerie.errors import AerieError

VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.?(a|b|rc)(\d+))?(?:\.?post(\d+))?(?:\.?dev(\d+))?(?:\+[a-z0-9.]+)?", re.IGNORECASE)
CLAUSE = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*(\S+?)\s*")
PRE_RANK = {"a": 0, "b": 1, "rc": 2}
LATEST = 3


@total_ordering
@dataclass(frozen=True)
class Version:
    """One version, ordered as PEP 440 says: dev < a < b < rc < final < post. ``text`` is what was written."""

    text: str
    release: tuple[int, ...]
    pre: tuple[int, int] | None
    post: int | None
    dev: int | None

    @classmethod
    def parse(cls, text: str) -> Version:
        match = VERSION.fullmatch(text.strip())
        if match is None:
            raise AerieError(f"{text!r} is not a version such as 0.5.12.post1")
        release, pre, pre_number, post, dev = match.groups()
        return cls(
            text=text.strip(),
            release=tuple(int(part) for part in release.split(".")),
            pre=(PRE_RANK[pre.lower()], int(pre_number)) if pre else None,
            post=int(post) if post is not None else None,
            dev=int(dev) if dev is not None else None,
        )

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, int], int, tuple[int, int]]:
        release = self.release
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        # 1.0.dev1 comes before 1.0a1, but 1.0.post1.dev1 after 1.0.
        no_pre = (-1, 0) if self.dev is not None and self.post is None else (LATEST, 0)
        pre = no_pre if self.pre is None else self.pre
        return release, pre, -1 if self.post is None else self.post, (1, 0) if self.dev is None else (0, self.dev)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.key == other.key

    def __lt__(self, other: Version) -> bool:
        return self.key < other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def is_early(self) -> bool:
        return self.pre is not None or self.dev is not None


def _same_release(one: Version, other: Version) -> bool:
    return one.key[0] == other.key[0]


def _less(version: Version, bound: Version) -> bool:
    # PEP 440: <V leaves out V's own pre-releases, unless V is one.
    return version < bound and not (
        version.is_early and not bound.is_early and _same_release(version, bound) and version.post == bound.post
    )


def _greater(version: Version, bound: Version) -> bool:
    # PEP 440: >V leaves out V's own post-releases, unless V is one.
    return version > bound and not (version.post is not None and bound.post is None and _same_release(version, bound))


COMPARE: dict[str, Callable[[Version, Version], bool]] = {
    "==": lambda version, bound: version == bound,
    "!=": lambda version, bound: version != bound,
    ">=": lambda version, bound: version >= bound,
    "<=": lambda version, bound: version <= bound,
    ">": _greater,
    "<": _less,
}


@dataclass(frozen=True)
class Clause:
    """One comparison of a specifier; with ``prefix`` (``==0.5.*``) only that many parts of the release count."""

    operator: str
    bound: Version
    prefix: bool

    def __contains__(self, version: Version) -> bool:
        if self.prefix:
            length = len(self.bound.release)
            padded = version.release + (0,) * (length - len(version.release))
            return (padded[:length] == self.bound.release) is (self.operator == "==")
        return COMPARE[self.operator](version, self.bound)


@dataclass(frozen=True)
class Specifier:
    """Which versions are meant, such as ``>=0.5.16,<0.6``; the empty one means all."""

    text: str
    clauses: tuple[Clause, ...]

    @classmethod
    def parse(cls, text: str) -> Specifier:
        clauses = []
        for part in filter(str.strip, text.split(",")):
            match = CLAUSE.fullmatch(part)
            if match is None:
                raise AerieError(
                    f"{text!r} is no version specifier like '>=1.2,<2': {part.strip()!r} needs one of {' '.join(COMPARE)} and a version"
                )
            operator, bound = match.groups()
            prefix = bound.endswith(".*")
            if prefix and operator not in ("==", "!="):
                raise AerieError(f"{text!r}: .* goes with == and != only")
            clauses.append(Clause(operator, Version.parse(bound.removesuffix(".*")), prefix))
        return cls(text.strip(), tuple(clauses))

    def __contains__(self, version: Version) -> bool:
        return all(version in clause for clause in self.clauses)

    def __str__(self) -> str:
        return self.text or "any version"
