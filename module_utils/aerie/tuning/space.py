"""What a search tries: sets of variables, made from a space that is data, without those that are known to be bad. Pure."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.words import near

REFERENCE, OWN = "default", "NCCL's own choices"
SPACE_KEYS = ("dimensions", "refused", "arm_options")
REFUSED_KEYS = ("when", "why")


@dataclass(frozen=True)
class Candidate:
    """One set: what it changes of the default set (null takes away), and the environment that comes of it."""

    name: str
    changes: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the name as part of a file's."""
        return re.sub(r"[^A-Za-z0-9=._-]+", "_", self.name)

    @property
    def parts(self) -> frozenset[str]:
        """Return its changes, comparable with another set's."""
        return frozenset(f"{name}={value}" for name, value in self.changes.items())


@dataclass(frozen=True)
class Space:
    """The dimensions of a search, what is refused in it, and the options of arms that are measured end to end."""

    dimensions: Mapping[str, tuple[str | None, ...]]
    refused: tuple[tuple[Mapping[str, Any], str], ...] = ()
    arm_options: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Any, where: str = "nccl/space.yml") -> Space:
        """Return the space that the values of its file mean; raise one error with everything that is wrong."""
        if not isinstance(value, Mapping):
            raise AerieError(f"{where}: must be a mapping with dimensions")
        problems = [f"{key}: no such key{near(str(key), SPACE_KEYS)}" for key in value if key not in SPACE_KEYS]
        dimensions: dict[str, tuple[str | None, ...]] = {}
        for name, values in (value.get("dimensions") or {}).items():
            if not isinstance(values, list | tuple) or not values or any(isinstance(one, bool | list | dict) for one in values):
                problems.append(f"dimensions.{name} is {values!r}: it must be a list of texts, null for as it is")
                continue
            dimensions[str(name)] = tuple(dict.fromkeys([None, *(None if one is None else str(one) for one in values)]))
        if not dimensions and not problems:
            problems.append("dimensions is missing: without one there is nothing to try")
        refused = []
        for number, one in enumerate(value.get("refused") or (), 1):
            if not isinstance(one, Mapping) or set(one) != set(REFUSED_KEYS):
                problems.append(f"refused {number}: needs when and why, and nothing else")
                continue
            refused.append((dict(one["when"]), str(one["why"])))
        raise_all(problems, where)
        return cls(dimensions, tuple(refused), tuple(map(str, value.get("arm_options") or ())))


@dataclass(frozen=True)
class Situation:
    """Where the search runs: how many ranks, the farthest link between them, the host's GPUs."""

    ranks: int
    farthest: str | None = None
    gpus: int = 0


@dataclass(frozen=True)
class Choice:
    """The candidates, the default set first; what was refused and why; how many more combinations there are."""

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    left_out: int


def candidates(
    space: Space, table: nccl.Table, base: Mapping[str, str], pinned: Mapping[str, Any], there: Situation, most: int, seed: int
) -> Choice:
    """Return what to try around ``base``, at most ``most`` sets: all with one change first, then combinations drawn by ``seed``.

    Variables of ``pinned`` are the user's own and stay as they are.
    """
    reference = Candidate(REFERENCE, {}, dict(base))
    dimensions = {name: values for name, values in space.dimensions.items() if name not in pinned}
    refused: dict[str, str] = {}
    seen = {_key(reference.environment)}
    accepted: list[Candidate] = []

    def take(candidate: Candidate) -> None:
        if _key(candidate.environment) in seen:
            return
        seen.add(_key(candidate.environment))
        if reason := next(_refusals(space, table, candidate, there), None):
            refused[candidate.name] = reason
        else:
            accepted.append(candidate)

    own = {name: None for name in base if name in dimensions}
    if own:
        take(Candidate(OWN, own, {name: value for name, value in base.items() if name not in own}))
    for name, values in dimensions.items():
        for value in values:
            if value is not None:
                take(_changed(base, {name: value}))
    combinations = [
        {name: value for name, value in zip(dimensions, values, strict=True) if value is not None}
        for values in itertools.product(*dimensions.values())
    ]
    combinations = [changes for changes in combinations if len(changes) > 1]
    random.Random(f"space {seed}").shuffle(combinations)
    left_out = max(0, len(accepted) - most)
    accepted = accepted[:most]
    for number, changes in enumerate(combinations):
        if len(accepted) >= most:
            left_out += len(combinations) - number
            break
        take(_changed(base, changes))
    return Choice((reference, *accepted), tuple(refused.items()), left_out)


def _changed(base: Mapping[str, str], changes: Mapping[str, str]) -> Candidate:
    name = " ".join(f"{variable.removeprefix('NCCL_')}={value}" for variable, value in changes.items())
    return Candidate(name, dict(changes), {**base, **changes})


def _key(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))


def _refusals(space: Space, table: nccl.Table, candidate: Candidate, there: Situation) -> Iterator[str]:
    for when, why in space.refused:
        if all(_holds(name, values, candidate, there) for name, values in when.items()):
            yield why
    yield from nccl.examine(table, candidate.environment, {}, there.gpus).errors


def _holds(name: str, values: Any, candidate: Candidate, there: Situation) -> bool:
    wanted: Sequence[str] = [] if values == nccl.ANY else list(map(str, values))
    found = {"ranks": str(there.ranks), "links": there.farthest}.get(name, candidate.environment.get(name))
    return found is not None and (values == nccl.ANY or found in wanted)
