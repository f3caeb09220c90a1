"""Which variables the roles know, and which of a host's variables no role knows. Pure: no Ansible import."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie.words import near

CLOSER = 0.92
"""The same for a name that begins with another word than any role's: it may be a variable of the user's own."""
CLOSE = 0.85
"""How alike a name that no role owns must be to a known one to count as its misspelling."""

EXCEPTIONS: Mapping[str, str] = {}
"""Variables that carry a role's prefix and are no role's: name to reason. docs/reference/variables.md lists the same."""


@dataclass(frozen=True)
class Roles:
    """What every role accepts: ``options[role][name]`` is the option's specification, over all of the role's entry points."""

    options: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def of(cls, argument_specs: Mapping[str, Mapping[str, Any]]) -> Roles:
        """Read ``{role: content of its argument_specs.yml}``."""
        options = {
            role: {
                name: option for entry in specs.get("argument_specs", {}).values() for name, option in (entry.get("options") or {}).items()
            }
            for role, specs in argument_specs.items()
        }
        return cls(options)

    def names(self) -> set[str]:
        """Return every variable that some role knows."""
        return {name for options in self.options.values() for name in options}

    def owner(self, name: str) -> str | None:
        """Return the role that owns ``name``: the longest one whose name, with an underscore, begins it."""
        owners = [role for role in self.options if name.startswith(f"{role}_")]
        return max(owners, key=len, default=None)

    def shares_family(self, name: str) -> bool:
        """Say whether ``name`` begins with the first word of some role's name, such as ``sglang``."""
        return name.split("_")[0] in {role.split("_")[0] for role in self.options}


def unknown(roles: Roles, variables: Mapping[str, str | None], exceptions: Iterable[str] = EXCEPTIONS) -> list[str]:
    """Return a problem for each variable with a role's prefix that no role knows, and for each that misspells the prefix itself.

    ``variables`` maps a host's variables to where they were set (None where that is not known). Names that begin with
    two underscores are internal and never asked about.
    """
    known, excepted = roles.names(), set(exceptions)
    problems = []
    for name, where in sorted(variables.items()):
        if name.startswith("__") or name in known or name in excepted:
            continue
        at = f" ({where})" if where else ""
        if owner := roles.owner(name):
            problems.append(f"{name}{at}: role {owner} has no such setting{near(name, known)}")
        elif difflib.get_close_matches(name, known, n=1, cutoff=CLOSE if roles.shares_family(name) else CLOSER):
            problems.append(f"{name}{at}: no role has such a setting{near(name, known)}")
    return problems


def strays(roles: Roles) -> list[str]:
    """Return a problem for each option that its role does not own, so that validation would look for it elsewhere."""
    return [
        f"role {role}: option {name} belongs to {roles.owner(name) or 'no role'} by its name"
        for role, options in roles.options.items()
        for name in options
        if roles.owner(name) != role
    ]
