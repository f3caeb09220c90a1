"""Patch sets: what a ``patchset.yml`` and its ``overlay/`` say, checked. The format is docs/reference/patch-set.md.

The controller reads the YAML; the plain values travel to the host, where the same code reads them again. Standard library only.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash
from ansible.module_utils.aerie.specifiers import Specifier, Version
from ansible.module_utils.aerie.words import listing, near

NAME = re.compile(r"[a-z][a-z0-9_]*")
STEPS = ("class", "function", "branch", "loop")
WHERES = ("before", "after", "start", "end")
SET_KEYS = ("name", "summary", "why", "versions", "needs", "conflicts", "requires", "upstream_since", "import", "hooks")
SET_REQUIRED = ("name", "summary", "why", "versions")
HOOK_KEYS = ("name", "file", "at", "call", "where", "insert", "import", "versions")
HOOK_REQUIRED = ("name", "file", "where", "insert")
REQUIREMENT_KEYS = ("package", "file", "value", "function", "argument", "decorator", "contains", "why", "cure")
REQUIREMENT_REQUIRED = ("package", "file", "contains", "why", "cure")
REQUIREMENT_HELP = "function is what the call is in, or the decorator on"
PROSE = ("summary", "why")


@dataclass(frozen=True)
class Step:
    """One step of the way to a place: into the class, function, branch or loop that ``value`` says."""

    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


@dataclass(frozen=True)
class Hook:
    """Lines to insert at one place: in ``file``, down ``at``, ``where`` around the statement that holds ``call``."""

    name: str
    file: str
    at: tuple[Step, ...]
    call: str | None
    where: str
    insert: str
    imports: str | None
    versions: Specifier


@dataclass(frozen=True)
class Requirement:
    """A list in another package's sources that must hold ``contains``: what ``value`` is assigned, or, in or on ``function``, an
    ``argument`` of a call or what a ``decorator`` is given."""

    package: str
    file: str
    value: str | None
    function: str | None
    argument: str | None
    decorator: str | None
    contains: int | str
    why: str
    cure: str

    @property
    def place(self) -> str:
        """The place in words."""
        if self.value is not None:
            return self.value
        return f"{self.argument} of {self.function}" if self.argument else f"@{self.decorator} of {self.function}"


@dataclass(frozen=True)
class PatchSet:
    """A named change to a package: modules that it adds (``overlay``, by path below site-packages) and hooks that it inserts."""

    name: str
    summary: str
    why: str
    versions: Specifier
    needs: tuple[str, ...]
    conflicts: tuple[str, ...]
    requires: tuple[Requirement, ...]
    upstream_since: Version | None
    hooks: tuple[Hook, ...]
    overlay: Mapping[str, str]
    shipped: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def sha256(self) -> str:
        """The hash of all that can change a tree; prose doesn't count."""
        definition = {key: value for key, value in self.shipped["definition"].items() if key not in PROSE}
        return canonical_hash({"definition": definition, "overlay": dict(self.overlay)})

    def hooks_for(self, version: Version) -> tuple[Hook, ...]:
        return tuple(hook for hook in self.hooks if version in hook.versions)

    def touches(self, path: str, version: Version) -> bool:
        """Say whether the set changes or adds the file ``path``."""
        return path in self.overlay or any(hook.file == path for hook in self.hooks_for(version))

    @classmethod
    def of(cls, shipped: Mapping[str, Any]) -> PatchSet:
        """Return the patch set that ``{name, definition, overlay}`` means; raise one error with everything that is wrong."""
        name, definition, overlay = shipped["name"], shipped["definition"], shipped["overlay"]
        problems = _Problems()
        if not isinstance(definition, Mapping):
            raise AerieError(f"patch set {name}: patchset.yml must hold a mapping with the keys {listing(SET_KEYS)}")
        problems.keys(definition, SET_KEYS, SET_REQUIRED, "")
        if definition.get("name", name) != name:
            problems.add(f"name is {definition['name']!r}, but its folder is {name!r}: these must be equal")
        if not NAME.fullmatch(name):
            problems.add(f"the name {name!r} must be lower-case letters, digits and underscores")
        hooks = definition.get("hooks") or []
        if not isinstance(hooks, Sequence) or isinstance(hooks, str):
            problems.add("hooks must be a list")
            hooks = []
        read = [_hook(hook, number, definition.get("import"), problems) for number, hook in enumerate(hooks, 1)]
        names = [hook.name for hook in read if hook]
        problems.each(f"two hooks are named {twice!r}" for twice in sorted({one for one in names if names.count(one) > 1}))
        if not hooks and not overlay:
            problems.add("it has neither hooks nor files in overlay/: it would change nothing")
        needed = definition.get("requires") or []
        if not isinstance(needed, list):
            problems.add(f"requires must be a list of mappings with the keys {listing(REQUIREMENT_KEYS)}")
            needed = []
        problems.each(f"overlay/{path}: {wrong}" for path in overlay if (wrong := wrong_path(path)))
        made = cls(
            name=name,
            summary=problems.text(definition, "summary"),
            why=problems.text(definition, "why"),
            versions=problems.value(Specifier.parse, definition.get("versions"), "versions") or Specifier("", ()),
            needs=problems.names(definition, "needs"),
            conflicts=problems.names(definition, "conflicts"),
            requires=tuple(found for number, one in enumerate(needed, 1) if (found := _requirement(one, number, problems))),
            upstream_since=problems.value(Version.parse, definition.get("upstream_since"), "upstream_since"),
            hooks=tuple(hook for hook in read if hook),
            overlay=dict(overlay),
            shipped=shipped,
        )
        raise_all(problems.found, f"patch set {name}")
        return made


def wrong_path(path: str) -> str | None:
    """Say what is wrong with ``path`` as a file below site-packages, or None."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        return "must be a plain relative path below site-packages, such as sglang/srt/utils/common.py"
    return None if len(pure.parts) > 1 else "must lie inside the package, such as sglang/srt/utils/common.py"


@dataclass
class _Problems:
    found: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def each(self, problems: Iterable[str]) -> None:
        self.found.extend(problems)

    def keys(self, value: Mapping[str, Any], known: Sequence[str], required: Sequence[str], prefix: str) -> None:
        self.each(
            f"{prefix}unknown key {key!r}{near(str(key), known) or f': known are {listing(known)}'}" for key in value if key not in known
        )
        self.each(f"{prefix}{key} is missing" for key in required if value.get(key) is None)

    def text(self, value: Mapping[str, Any], key: str, prefix: str = "") -> str:
        found = value.get(key)
        if found is not None and (not isinstance(found, str) or not found.strip()):
            self.add(f"{prefix}{key} must be text, not {found!r}")
        return found.strip() if isinstance(found, str) else ""

    def names(self, value: Mapping[str, Any], key: str) -> tuple[str, ...]:
        found = value.get(key) or []
        if not isinstance(found, list) or not all(isinstance(one, str) and NAME.fullmatch(one) for one in found):
            self.add(f"{key} must be a list of names of patch sets, not {found!r}")
            return ()
        return tuple(found)

    def value(self, parse: Callable[[str], Any], found: Any, key: str, prefix: str = "") -> Any:
        if found is None:
            return None
        if not isinstance(found, str):
            self.add(f"{prefix}{key} must be text in quotes, not {found!r}")
            return None
        try:
            return parse(found)
        except AerieError as error:
            self.add(f"{prefix}{key}: {error}")
            return None


def _hook(hook: Any, number: int, set_import: Any, problems: _Problems) -> Hook | None:
    if not isinstance(hook, Mapping):
        problems.add(f"hook {number} must be a mapping with the keys {listing(HOOK_KEYS)}")
        return None
    name = hook.get("name")
    prefix = f"hook {name!r}: " if isinstance(name, str) else f"hook {number}: "
    problems.keys(hook, HOOK_KEYS, HOOK_REQUIRED, prefix)
    steps = []
    found = hook.get("at") or []
    for step in found if isinstance(found, list) else [found]:
        if not isinstance(step, Mapping) or len(step) != 1:
            problems.add(f"{prefix}at must be a list of one-key mappings ({listing(STEPS, last='or')}), not {step!r}")
            continue
        ((kind, value),) = step.items()
        if kind not in STEPS:
            problems.add(f"{prefix}at: unknown step {kind!r}{near(str(kind), STEPS) or f': known are {listing(STEPS)}'}")
        elif not isinstance(value, str):
            problems.add(f"{prefix}at: {kind} must be text, not {value!r}")
        elif kind == "branch" and value not in ("if", "else"):
            problems.add(f"{prefix}at: branch must be 'if' or 'else', not {value!r}")
        else:
            steps.append(Step(kind, value))
    where, call = hook.get("where"), hook.get("call")
    if where is not None and where not in WHERES:
        problems.add(f"{prefix}where must be {listing(WHERES, last='or')}, not {where!r}{near(str(where), WHERES)}")
    if where in ("before", "after") and not isinstance(call, str):
        problems.add(f"{prefix}where: {where} needs call, the dotted call in the statement that is meant")
    if where in ("start", "end") and call is not None:
        problems.add(f"{prefix}where: {where} is about the whole body: leave call out, or say before or after")
    if where in ("start", "end") and not found:
        problems.add(f"{prefix}where: {where} needs at, the class, function, branch or loop that is meant")
    file = problems.text(hook, "file", prefix)
    if file and (wrong := wrong_path(file)):
        problems.add(f"{prefix}file {file!r} {wrong}")
    text = hook.get("import", set_import)
    if text is not None and not isinstance(text, str):
        problems.add(f"{prefix}import must be text, not {text!r}")
        text = None
    return Hook(
        name=problems.text(hook, "name", prefix),
        file=file,
        at=tuple(steps),
        call=call if isinstance(call, str) else None,
        where=str(where),
        insert=textwrap.dedent(hook["insert"]).strip("\n") if problems.text(hook, "insert", prefix) else "",
        imports=text.strip() if text else None,
        versions=problems.value(Specifier.parse, hook.get("versions"), "versions", prefix) or Specifier("", ()),
    )


def _requirement(value: Any, number: int, problems: _Problems) -> Requirement | None:
    prefix = f"requires {number}: "
    if not isinstance(value, Mapping):
        problems.add(f"{prefix}must be a mapping with the keys {listing(REQUIREMENT_KEYS)}")
        return None
    before = len(problems.found)
    problems.keys(value, REQUIREMENT_KEYS, REQUIREMENT_REQUIRED, prefix)
    texts = {key: problems.text(value, key, prefix) or None for key in REQUIREMENT_KEYS if key != "contains"}
    ways = [way for way in ("value", "argument", "decorator") if texts[way]]
    if len(ways) != 1:
        problems.add(f"{prefix}needs one of value, argument and decorator, which says where the list is, not {listing(ways)}")
    elif (ways == ["value"]) == bool(texts["function"]):
        problems.add(f"{prefix}{'value stands alone' if ways == ['value'] else ways[0] + ' needs function'}: {REQUIREMENT_HELP}")
    if texts["file"] and (wrong := wrong_path(texts["file"])):
        problems.add(f"{prefix}file {texts['file']!r} {wrong}")
    contains = value.get("contains")
    if contains is not None and (isinstance(contains, bool) or not isinstance(contains, int | str)):
        problems.add(f"{prefix}contains must be a number or text, not {contains!r}")
    if len(problems.found) > before or contains is None:
        return None
    return Requirement(
        package=texts["package"] or "",
        file=texts["file"] or "",
        value=texts["value"],
        function=texts["function"],
        argument=texts["argument"],
        decorator=texts["decorator"],
        contains=contains,
        why=texts["why"] or "",
        cure=texts["cure"] or "",
    )


def selected(sets: Sequence[PatchSet], version: Version) -> tuple[list[PatchSet], list[str]]:
    """Return the sets of ``sets`` that ``version`` still needs, and a note for each that it has already; raise for wrong combinations."""
    names = [one.name for one in sets]
    problems = [f"{twice} is given twice" for twice in sorted({name for name in names if names.count(name) > 1})]
    upstream = {one.name for one in sets if one.upstream_since is not None and version >= one.upstream_since}
    for position, one in enumerate(sets):
        if one.name in upstream:
            continue
        if version not in one.versions:
            problems.append(
                f"{one.name} is for {one.versions}, not for {version.text}: leave it out for this version, or extend and test it"
            )
        for need in one.needs:
            if need not in names:
                problems.append(f"{one.name} needs {need}: give it too, before {one.name}")
            elif names.index(need) > position:
                problems.append(f"{one.name} needs {need}, which must come before it")
        problems.extend(
            f"{one.name} conflicts with {other}: give one of them" for other in one.conflicts if other in names and other not in upstream
        )
    raise_all(problems, "patch sets")
    notes = [
        f"patch set {one.name} was left out: {version.text} has it already (upstream since {one.upstream_since.text})"
        for one in sets
        if one.upstream_since and one.name in upstream
    ]
    return [one for one in sets if one.name not in upstream], notes
