"""The rules of preflight/rules.yml: read strictly, and judged over one host's info. The format is docs/reference/preflight.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aerie_controller import PROJECT

# isort: split
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.words import listing, near

from . import expressions
from .schema import SCOPE, Shape

RULES = PROJECT / "preflight/rules.yml"
ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)
PROFILES = ("cuda", "cpu")
KEYS = ("id", "severity", "profiles", "only", "each", "when", "evidence", "cause", "cure", "commands", "reference")
REQUIRED = ("id", "severity", "when", "evidence", "cause", "cure", "reference")
MOST_LINES = 16
"""Of one finding's evidence: a host with a thousand bad rows says it with fewer."""


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with a host. ``each`` names lists, outermost first; ``when`` is asked for each of their elements."""

    id: str
    severity: str
    profiles: tuple[str, ...]
    only: expressions.Expression | None
    each: tuple[tuple[str, expressions.Expression], ...]
    when: expressions.Expression
    evidence: tuple[expressions.Text, ...]
    cause: expressions.Text
    cure: expressions.Text
    commands: tuple[expressions.Command, ...]
    """What can be copied into a shell or an inventory, a line each."""
    reference: str


@dataclass(frozen=True)
class Finding:
    """A rule that fires on a host, with what shows it."""

    id: str
    severity: str
    evidence: tuple[str, ...]
    cause: str
    cure: str
    reference: str
    not_known: tuple[str, ...] = ()
    """What could not be judged besides, as where one GPU of eight does not answer."""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unjudged:
    """A rule that nobody can judge on a host, and why: not a finding, and not all right either."""

    id: str
    why: tuple[str, ...]


@dataclass(frozen=True)
class Judgement:
    """What all rules say of one host."""

    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    fine: tuple[str, ...]


def load(path: Path = RULES) -> tuple[Rule, ...]:
    """Return the rules of a file; raise one error with everything that is wrong in it."""
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise AerieError(f"{path}: {error}") from error
    return read(value, str(path))


def read(value: Any, where: str) -> tuple[Rule, ...]:
    """Return the rules that a file's content means; raise with everything that is wrong."""
    problems: list[str] = []
    entries = value.get("rules") if isinstance(value, Mapping) and set(value) == {"rules"} else None
    if not isinstance(entries, list):
        raise AerieError(f"{where}: must be a mapping with one key, rules, a list")
    rules = [rule for number, entry in enumerate(entries, 1) if (rule := _rule(entry, number, problems))]
    ids = [entry.get("id") for entry in entries if isinstance(entry, Mapping)]
    problems += [f"two rules are called {twice}" for twice in sorted({str(one) for one in ids if ids.count(one) > 1})]
    raise_all(problems, where)
    return tuple(rules)


def _rule(value: Any, number: int, problems: list[str]) -> Rule | None:
    if not isinstance(value, Mapping):
        problems.append(f"rule {number}: must be a mapping with {listing(KEYS)}")
        return None
    name = f"rule {value['id']}" if isinstance(value.get("id"), str) else f"rule {number}"
    found = list(_problems(value))
    problems += [f"{name}: {problem}" for problem in found]
    if found:
        return None
    return Rule(
        id=value["id"],
        severity=value["severity"],
        profiles=tuple(value.get("profiles", PROFILES[:1])),
        only=expressions.expression(value["only"]) if "only" in value else None,
        each=tuple((name, expressions.expression(source)) for name, source in value.get("each", {}).items()),
        when=expressions.expression(value["when"]),
        evidence=tuple(expressions.text(one) for one in value["evidence"]),
        cause=expressions.text(value["cause"]),
        cure=expressions.text(value["cure"]),
        commands=tuple(expressions.command(source) for source in value.get("commands", [])),
        reference=value["reference"],
    )


def _problems(value: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{key}: no such key{near(str(key), KEYS)}" for key in value if key not in KEYS)
    yield from (f"{key} is missing" for key in REQUIRED if value.get(key) in (None, "", []))
    for key in ("id", "when", "only", "cause", "cure", "reference"):
        if key in value and not isinstance(value[key], str):
            yield f"{key} must be a text, not {value[key]!r}"
            return
    if value.get("severity") not in (*SEVERITIES, None):
        yield f"severity is {value['severity']!r}: it must be {listing(SEVERITIES, last='or')}"
    profiles = value.get("profiles", ["cuda"])
    if not isinstance(profiles, list) or not profiles or not set(profiles) <= set(PROFILES):
        yield f"profiles is {profiles!r}: it must be a list of {listing(PROFILES)}"
    evidence, each = value.get("evidence") or [], value.get("each") or {}
    commands = value.get("commands", [])
    if not isinstance(commands, list) or not all(isinstance(source, str) and source for source in commands):
        yield "commands must be a list of texts"
        return
    if not isinstance(evidence, list) or not all(isinstance(one, str) for one in evidence):
        yield "evidence must be a list of texts"
        return
    if not isinstance(each, Mapping) or not all(isinstance(one, str) for pair in each.items() for one in pair):
        yield "each must map a name to an expression"
        return
    scope: dict[str, Shape] = dict(SCOPE)
    sources = [("only", value["only"])] if "only" in value else []
    for key, source in sources:
        yield from (f"{key}: {problem}" for problem in expressions.expression_problems(source, scope))
    for name, source in each.items():
        found = list(expressions.expression_problems(source, scope))
        yield from (f"each.{name}: {problem}" for problem in found)
        scope[name] = expressions.UNKNOWN_SHAPE if found else expressions.element(expressions.shape_of(source, scope))
    if value.get("when"):
        yield from (f"when: {problem}" for problem in expressions.expression_problems(value["when"], scope))
    for key, source in (*(("evidence", one) for one in evidence), *((key, value.get(key) or "") for key in ("cause", "cure"))):
        inner = scope if key == "evidence" else SCOPE
        yield from (f"{key}: {problem}" for problem in expressions.text_problems(source, inner))
    for source in commands:
        yield from (f"commands: {problem}" for problem in expressions.text_problems(source, scope))
        if "\n" in source.strip():
            yield f"commands: {source!r} must be one line"


def judge(rules: Sequence[Rule], info: Mapping[str, Any], want: Mapping[str, Any]) -> Judgement:
    """Hold a host's info against the rules of its profile."""
    scope = {"info": expressions.wrap(info, "info"), "want": expressions.wrap(want, "want")}
    findings, unjudged, fine = [], [], []
    for rule in rules:
        if want.get("profile") not in rule.profiles:
            continue
        found = _judge(rule, scope)
        if isinstance(found, Finding):
            findings.append(found)
        elif isinstance(found, Unjudged):
            unjudged.append(found)
        else:
            fine.append(rule.id)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Judgement(tuple(findings), tuple(unjudged), tuple(fine))


def _judge(rule: Rule, scope: Mapping[str, Any]) -> Finding | Unjudged | None:
    whys: list[str] = []
    evidence: list[str] = []
    commands: list[str] = []
    fires = False
    try:
        if rule.only is not None and not rule.only(scope):
            return None
    except Exception as error:
        return Unjudged(rule.id, (_why(error),))
    for inner in _scopes(rule.each, scope, whys):
        try:
            if not rule.when(inner):
                continue
        except Exception as error:
            whys.append(_why(error))
            continue
        fires = True
        evidence += [line for text in rule.evidence if (line := text(inner))]
        commands += [command for render in rule.commands if (command := render(inner))]
    not_known = tuple(dict.fromkeys(whys))
    if fires:
        lines = list(dict.fromkeys(evidence))
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        return Finding(
            id=rule.id,
            severity=rule.severity,
            evidence=(*lines[:MOST_LINES], *more),
            cause=rule.cause(scope),
            cure=rule.cure(scope),
            reference=rule.reference,
            not_known=not_known,
            commands=tuple(dict.fromkeys(commands))[:MOST_LINES],
        )
    return Unjudged(rule.id, not_known) if not_known else None


def _scopes(each: Sequence[tuple[str, expressions.Expression]], scope: Mapping[str, Any], whys: list[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a scope for each element of the lists that ``each`` names; why a list is not known goes to ``whys``."""
    if not each:
        yield scope
        return
    (name, expression), rest = each[0], each[1:]
    try:
        elements = expressions.entries(expression(scope))
    except Exception as error:
        whys.append(_why(error))
        return
    yield from itertools.chain.from_iterable(_scopes(rest, {**scope, name: element}, whys) for element in elements)


def _why(error: Exception) -> str:
    if isinstance(error, expressions.NotKnownError):
        return str(error.message)
    return f"the rule can't take what it found ({type(error).__name__}: {error})"
