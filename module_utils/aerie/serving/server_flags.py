"""Server flags, checked against the installed release's own parser before a model is loaded. Standard library only: this runs on hosts.

The parser is known from ``server_arguments.json`` of a release: one object for each argument with ``flags``, ``dest``,
``type``, ``choices``, ``nargs``, ``default``, ``deprecated`` and ``help``, as argparse has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import read_json
from ansible.module_utils.aerie.words import listing, near

SPECULATION_FLAGS = {
    "algorithm": "speculative-algorithm",
    "draft_model": "speculative-draft-model-path",
    "steps": "speculative-num-steps",
    "topk": "speculative-eagle-topk",
    "draft_tokens": "speculative-num-draft-tokens",
}
SPECULATION_KEYS = (*SPECULATION_FLAGS, "candidate_steps")
CHAIN_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms that draft in steps, so that steps, topk and draft tokens belong together."""

ALGORITHMS = (
    *CHAIN_ALGORITHMS,
    *("NGRAM", "DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"),
)
"""Every algorithm of SGLang 0.5.9 to 0.5.23: speculative/spec_info.py, SpeculativeAlgorithm, and its alias NEXTN."""
NEEDS_DRAFT = ("EAGLE3", "STANDALONE", "DFLASH")
"""Algorithms without a draft layer in the target's checkpoint. arg_groups/speculative_hook.py ends a server without a draft model."""
OTHER_NAMES = {"MTP": "NEXTN", "EAGLE-3": "EAGLE3", "EAGLE2": "EAGLE"}
"""What papers and model cards call an algorithm, and SGLang's name of it."""

ADAPTIVE_FLAG = "speculative-adaptive"
ADAPTIVE_CONFIG_FLAG = "speculative-adaptive-config"
ADAPTIVE_ALGORITHMS = ("EAGLE", "EAGLE3")
"""Algorithms whose number of draft steps can change at run time. SGLang 0.5.15.post1
adaptive_spec_params.py, adaptive_unsupported_reason: with any other it stays silently fixed."""
FEWEST_CANDIDATES = 2

DYNAMIC_FLAG = "speculative-dynamic-disable-threshold"
DYNAMIC_VARIABLE = "AERIE_DYNAMIC_SETTINGS"
DYNAMIC_KEYS = ("threshold", "low", "min_dwell_steps", "adapt")
AUTO = "auto"

OWNED = {
    "model-path": "set the instance's model",
    "host": "set the instance's host",
    "port": "set the instance's port",
    "api-key": "set sglang_server_api_key",
    "config": "write its flags here",
    "enable-metrics": "it is always on",
} | {flag: f"set the arm's speculation.{key}" for key, flag in SPECULATION_FLAGS.items()}
"""Flags that have a setting of their own, and which."""

OWNED_WITH_CANDIDATES = dict.fromkeys(
    (ADAPTIVE_FLAG, ADAPTIVE_CONFIG_FLAG),
    "the arm's speculation.candidate_steps sets it: set candidate_steps alone",
)
"""Flags that ``candidate_steps`` sets, so that nothing else may set them beside it."""


def owned_flags(speculation: Any) -> Mapping[str, str]:
    """Return the flags that have a setting of their own in an arm with ``speculation``, and which."""
    return OWNED | OWNED_WITH_CANDIDATES if candidate_steps(speculation) else OWNED


@dataclass(frozen=True)
class Rename:
    """A flag that got another name (or became one value of another flag), and the version from which only the new one is known."""

    old: str
    new: str
    gone: str
    value: str | None = None


RENAMES = (
    # server_args.py of 0.5.15.post1 registers these as deprecated with the new names; 0.5.23's parser knows only the new ones.
    Rename("cuda-graph-max-bs", "cuda-graph-max-bs-decode", "0.5.23"),
    Rename("cuda-graph-bs", "cuda-graph-bs-decode", "0.5.23"),
    Rename("piecewise-cuda-graph-max-tokens", "cuda-graph-max-bs-prefill", "0.5.23"),
    Rename("piecewise-cuda-graph-tokens", "cuda-graph-bs-prefill", "0.5.23"),
    Rename("disable-piecewise-cuda-graph", "cuda-graph-backend-prefill", "0.5.23", "disabled"),
    Rename("enforce-piecewise-cuda-graph", "cuda-graph-backend-prefill", "0.5.23", "tc_piecewise"),
    Rename("enable-breakable-cuda-graph", "cuda-graph-backend-prefill", "0.5.23", "breakable"),
    Rename("speculative-dflash-draft-window-size", "speculative-draft-window-size", "0.5.23"),
    Rename("mamba-scheduler-strategy", "mamba-radix-cache-strategy", "0.5.23"),
    Rename("nsa-prefill-backend", "dsa-prefill-backend", "0.5.23"),
    Rename("nsa-decode-backend", "dsa-decode-backend", "0.5.23"),
    Rename("stream-output", "incremental-streaming-output", "0.5.23"),
    Rename("enable-prefill-context-parallel", "enable-prefill-cp", "0.5.23"),
    Rename("prefill-cp-mode", "cp-strategy", "0.5.23"),
)


@dataclass(frozen=True)
class Argument:
    """One argument of a release's parser, as argparse declares it."""

    flags: tuple[str, ...]
    dest: str
    type: str | None
    choices: tuple[str, ...] | None
    nargs: int | str | None
    deprecated: bool
    help: str

    @property
    def opposite(self) -> str | None:
        """Return the ``--no-…`` form of an argument that has one (argparse.BooleanOptionalAction)."""
        return next((flag for flag in self.flags if flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in self.flags), None)


@dataclass(frozen=True)
class Parser:
    """The arguments that one SGLang release knows."""

    version: str
    arguments: tuple[Argument, ...]
    _by_name: dict[str, tuple[str, Argument]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {plain(flag): (flag, argument) for argument in self.arguments for flag in argument.flags})

    @classmethod
    def load(cls, path: Path, version: str) -> Parser:
        """Read ``server_arguments.json``."""
        try:
            content = read_json(path)
            rows = content["arguments"] if isinstance(content, dict) else content
            return cls(version, tuple(_argument(row) for row in rows))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AerieError(f"{path}: the release's list of server arguments can't be read ({error}): make the release again") from error

    def find(self, name: str) -> tuple[str, Argument] | None:
        """Return the flag as the release spells it and its argument, or None."""
        return self._by_name.get(plain(name))

    @property
    def names(self) -> list[str]:
        """Return every name, without dashes in front."""
        return sorted(self._by_name)


def _argument(row: Mapping[str, Any]) -> Argument:
    choices = row.get("choices")
    return Argument(
        flags=tuple(flag for flag in row["flags"] if flag.startswith("--")),
        dest=row["dest"],
        type=row.get("type"),
        choices=tuple(str(choice) for choice in choices) if choices is not None else None,
        nargs=row.get("nargs"),
        deprecated=bool(row.get("deprecated")),
        help=row.get("help") or "",
    )


@dataclass(frozen=True)
class Layer:
    """Flags from one place of the configuration; a later layer wins over an earlier one."""

    origin: str
    flags: Mapping[str, Any]
    owner: bool = False
    """True for the flags that Aerie itself sets: it may set owned flags, and is not told about deprecation."""


@dataclass(frozen=True)
class CommandLine:
    """What the layers come to: the arguments, what is wrong with them, and what a person should know."""

    arguments: tuple[str, ...]
    values: Mapping[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    origins: Mapping[str, str] = field(default_factory=dict)
    """Which layer had the last word on each flag (by dest), also where that was to leave it out."""


def plain(name: str) -> str:
    """Return a flag's name in one spelling: ``--tp-size``, ``tp_size`` and ``tp-size`` are the same."""
    return name.strip().lstrip("-").replace("_", "-")


def command_line(parser: Parser, layers: Iterable[Layer], owned_flags: Mapping[str, str] = OWNED) -> CommandLine:
    """Merge ``layers`` and check every flag against ``parser``; all problems come back at once, none is raised."""
    owned = {found[1].dest: cure for flag, cure in owned_flags.items() if (found := parser.find(flag))}
    settings: dict[str, tuple[str, Argument, Any, Layer]] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for layer in layers:
        seen: dict[str, str] = {}
        for written, value in layer.flags.items():
            where = f"{layer.origin}: --{plain(str(written))}"
            name, value, warning = _translated(parser, plain(str(written)), value)
            found = parser.find(name)
            if found is None:
                problems.append(f"{where}: {_unknown(parser, name)}")
                continue
            flag, argument = found
            if warning:
                warnings.append(f"{where}: {warning}")
            elif argument.deprecated and not layer.owner and value not in (None, False):
                warnings.append(f"{where}: deprecated in SGLang {parser.version}{_first_sentence(argument.help)}")
            if argument.dest in seen:
                spellings = [f"--{name.strip().lstrip('-')}" for name in (str(written), seen[argument.dest])]
                problems.append(f"{layer.origin}: {' and '.join(spellings)} are the same flag: write one of them")
                continue
            seen[argument.dest] = str(written)
            if argument.dest in owned and not layer.owner:
                problems.append(f"{where}: {owned[argument.dest]} and leave the flag out")
                continue
            # A later layer's flag comes last in the order too, so that a plan reads from general to special.
            settings.pop(argument.dest, None)
            origins[argument.dest] = layer.origin
            if value is False and argument.opposite and not flag.startswith("--no-"):
                flag, value = argument.opposite, True
            if value is not None and value is not False:
                settings[argument.dest] = (flag, argument, value, layer)
    line: list[str] = []
    for flag, argument, value, layer in settings.values():
        words, problem = _words(argument, value)
        if problem:
            problems.append(f"{layer.origin}: {flag}: {problem}")
        elif len(words) == 1 and words[0].startswith("-"):
            line.append(f"{flag}={words[0]}")
        else:
            line += [flag, *words]
    values = {dest: setting[2] for dest, setting in settings.items()}
    return CommandLine(tuple(line), values, tuple(problems), tuple(warnings), origins)


def _translated(parser: Parser, name: str, value: Any) -> tuple[str, Any, str | None]:
    if parser.find(name):
        return name, value, None
    for rename in RENAMES:
        if name == rename.old and parser.find(rename.new):
            new = f"--{rename.new}{' ' + rename.value if rename.value else ''}"
            text = f"SGLang {parser.version} calls it {new} (the old name is gone by {rename.gone}): translated"
            if rename.value is not None:
                value = rename.value if value else None
            return rename.new, value, text
        if name == rename.new and rename.value is None and parser.find(rename.old):
            return rename.old, value, f"SGLang {parser.version} still calls it --{rename.old}: translated"
    return name, value, None


def _unknown(parser: Parser, name: str) -> str:
    longer = [known for known in parser.names if known.startswith(name)]
    if len(longer) == 1:
        return f"an abbreviation of --{longer[0]} in SGLang {parser.version}: write it in full, another release may know two that start so"
    suggestion = near(name, parser.names)
    if not suggestion and longer:
        suggestion = f"; flags that start so: {listing(longer[:5])}"
    return f"SGLang {parser.version} has no such flag{suggestion}"


def _first_sentence(text: str) -> str:
    cleaned = re.sub(r"^\s*(\[Deprecated\]|Deprecated\.?)\s*", "", text.strip())
    return f": {cleaned.splitlines()[0]}" if cleaned else ""


def _words(argument: Argument, value: Any) -> tuple[list[str], str | None]:
    """Return a setting's words on the command line, or why it can't have that value."""
    if argument.nargs == 0:
        return ([], None) if value is True else ([], f"takes no value, got {value!r}: write true")
    if value is True:
        return ([], None) if argument.nargs in ("?", "*") else ([], _needs_value(argument))
    values = value if isinstance(value, list | tuple) else [value]
    if argument.nargs is None and isinstance(value, list | tuple):
        if argument.type in (None, "str", "int", "float"):
            return [], f"takes one value, got a list of {len(values)}"
        values = [json.dumps(list(value), separators=(",", ":"))]
    if not values and argument.nargs != "*":
        return [], _needs_value(argument)
    if isinstance(argument.nargs, int) and len(values) != argument.nargs:
        return [], f"takes {argument.nargs} values, got {len(values)}"
    words = []
    for item in values:
        word = json.dumps(item, separators=(",", ":"), sort_keys=True) if isinstance(item, dict | list) else str(item)
        problem = _type_problem(argument, item, word)
        if problem:
            return [], problem
        words.append(word)
    return words, None


def _needs_value(argument: Argument) -> str:
    kind = {"int": "a whole number", "float": "a number"}.get(argument.type or "", "a value")
    return f"needs {kind if not argument.choices else 'one of ' + listing(argument.choices)}"


def _type_problem(argument: Argument, item: Any, word: str) -> str | None:
    if isinstance(item, bool):
        return f"{_needs_value(argument)}, got {str(item).lower()}"
    if word == "":
        return _needs_value(argument)
    if argument.type == "int" and not re.fullmatch(r"[+-]?\d+", word):
        return f"needs a whole number, got {word!r}"
    if argument.type == "float" and not _is_float(word):
        return f"needs a number, got {word!r}"
    if argument.type == "loads" and not _is_json(word):
        return f"needs JSON, got {word!r}: write it as YAML and it is converted"
    if argument.choices is not None and word not in argument.choices:
        return f"{word!r} is not one of {listing(argument.choices)}{near(word, argument.choices)}"
    return None


def _is_float(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def speculation_problems(speculation: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what is wrong with an arm's ``speculation`` in itself."""
    if not speculation:
        return
    for key in speculation:
        if key not in SPECULATION_KEYS:
            yield f"speculation.{key}: no such setting{near(key, SPECULATION_KEYS)}"
    algorithm = str(speculation.get("algorithm") or "").upper()
    if not algorithm:
        yield "speculation.algorithm is missing: name one, such as EAGLE3, or set speculation to null"
        return
    if algorithm not in ALGORITHMS:
        yield f"speculation.algorithm: {unknown_algorithm(algorithm)}"
    numbers = {key: speculation.get(key) for key in ("steps", "topk", "draft_tokens")}
    wrong = [key for key, number in numbers.items() if number is not None and not (_is_whole(number) and int(number) > 0)]
    for key in wrong:
        yield f"speculation.{key}: needs a whole number above 0, got {numbers[key]!r}"
    if speculation.get("candidate_steps") is not None:
        yield from _candidate_problems(speculation, algorithm)
    if wrong or algorithm not in CHAIN_ALGORITHMS:
        return
    missing = [key for key, number in numbers.items() if number is None]
    if missing:
        # arg_groups/speculative_hook.py: without them SGLang chooses by the target's architecture, (5, 4, 8) for a Llama.
        yield f"speculation: {listing(missing)} missing: set steps, topk and draft_tokens, or SGLang chooses by model"
        return
    steps, topk, draft_tokens = (int(numbers[key] or 0) for key in ("steps", "topk", "draft_tokens"))
    if topk == 1 and draft_tokens != steps + 1:
        cure = f"set draft_tokens to {steps + 1} (is {draft_tokens}) or steps to {draft_tokens - 1} (is {steps})"
        yield f"speculation: topk 1 drafts a chain, whose draft_tokens are steps + 1: {cure}"


def _candidate_problems(speculation: Mapping[str, Any], algorithm: str) -> Iterator[str]:
    """Yield why SGLang can't choose between the ``candidate_steps`` of a speculation."""
    where, value = "speculation.candidate_steps", speculation["candidate_steps"]
    if not isinstance(value, list) or not all(_is_whole(steps) and int(steps) > 0 for steps in value):
        yield f"{where}: needs a list of whole numbers above 0, such as [1, 3], got {value!r}"
        return
    candidates = [int(steps) for steps in value]
    if len(set(candidates)) != len(candidates):
        yield f"{where}: {value} names a number twice: write each once"
    elif len(candidates) < FEWEST_CANDIDATES:
        yield f"{where}: {value} leaves nothing to choose: name two or more numbers, or leave it out"
    steps, topk = speculation.get("steps"), speculation.get("topk")
    if _is_whole(steps) and int(str(steps)) not in candidates:
        yield f"{where}: {value} must contain steps ({steps}): add it, or set steps to one of them"
    if _is_whole(topk) and int(str(topk)) != 1:
        yield f"{where}: only chains change their number of steps: set speculation.topk to 1 (is {topk})"
    if algorithm in ALGORITHMS and algorithm not in ADAPTIVE_ALGORITHMS:
        yield (
            f"{where}: {algorithm} drafts a fixed number of steps: set speculation.algorithm to "
            f"{listing(ADAPTIVE_ALGORITHMS, last='or')}, or leave candidate_steps out"
        )


def candidate_steps(speculation: Any) -> tuple[int, ...]:
    """Return the numbers of draft steps that a checked ``speculation`` lets SGLang choose from, sorted.

    Empty where the number is fixed, or ``candidate_steps`` is no list of numbers.
    """
    value = speculation.get("candidate_steps") if isinstance(speculation, Mapping) else None
    if not isinstance(value, list) or not all(_is_whole(steps) for steps in value):
        return ()
    return tuple(sorted(int(steps) for steps in value))


def adaptive_config(candidates: Sequence[int], steps_by_batch: Mapping[Any, Any] | None = None) -> dict[str, dict[str, list[int]]]:
    """Return the content of ``--speculative-adaptive-config``; empty without candidates.

    A calibration's ``steps_by_batch`` gives a slot with a single candidate for each of its batch
    sizes, so that SGLang has nothing to choose. Otherwise one slot has all of them, and SGLang
    chooses by the observed acceptance.
    """
    if not candidates:
        return {}
    if not steps_by_batch:
        return {"1": {"candidate_steps": sorted(candidates)}}
    sizes = sorted(steps_by_batch, key=int)
    return {str(size): {"candidate_steps": [int(steps_by_batch[size])]} for size in sizes}


def initial_speculation(speculation: Mapping[str, Any], config: Mapping[str, Mapping[str, Sequence[int]]]) -> dict[str, Any]:
    """Return ``speculation`` with steps and draft tokens that the slots of ``config`` allow.

    SGLang refuses a --speculative-num-steps that is in no slot.
    """
    slots = [slot["candidate_steps"] for slot in config.values()]
    if not slots or int(speculation["steps"]) in {steps for slot in slots for steps in slot}:
        return dict(speculation)
    return {**speculation, "steps": slots[0][0], "draft_tokens": slots[0][0] + 1}


def adaptive_flags(path: str) -> dict[str, Any]:
    """Return the flags with which SGLang reads its adaptive configuration from ``path``."""
    return {ADAPTIVE_FLAG: True, ADAPTIVE_CONFIG_FLAG: path}


def unknown_algorithm(algorithm: str) -> str:
    """Return that SGLang has no such algorithm (upper case), and which was probably meant."""
    name = OTHER_NAMES.get(algorithm)
    suggestion = f"; SGLang calls it {name}" if name else near(algorithm, ALGORITHMS)
    return f"SGLang has no algorithm {algorithm!r} (it has {listing(ALGORITHMS)}){suggestion}"


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and re.fullmatch(r"\d+", str(value)) is not None


def speculation_flags(speculation: Mapping[str, Any] | None, draft_path: str | None) -> dict[str, Any]:
    """Return the flags that a checked ``speculation`` means."""
    if not speculation:
        return {}
    settings = {**speculation, "draft_model": draft_path}
    return {flag: settings[key] for key, flag in SPECULATION_FLAGS.items() if settings.get(key) is not None}


def dynamic_problems(dynamic: Any, speculation: Any) -> Iterator[str]:
    """Yield what is wrong with an arm's ``dynamic`` in itself."""
    if dynamic is None:
        return
    if not isinstance(dynamic, Mapping):
        yield f"dynamic: needs null or a dictionary with {listing(DYNAMIC_KEYS)}, got {dynamic!r}"
        return
    for key in dynamic:
        if key not in DYNAMIC_KEYS:
            yield f"dynamic.{key}: no such setting{near(key, DYNAMIC_KEYS)}"
    if not speculation:
        yield "dynamic: the arm doesn't speculate, so that there is nothing to turn off: set speculation, or leave dynamic out"
    threshold = dynamic.get("threshold")
    if threshold is None:
        yield "dynamic.threshold is missing: set a number of running requests above which to decode plainly, or auto for a calibrated one"
    elif threshold != AUTO and not _is_whole(threshold):
        yield f"dynamic.threshold: needs a whole number of requests, 0 or more, or auto, got {threshold!r}"
    for key in ("low", "min_dwell_steps"):
        if dynamic.get(key) is not None and not _is_whole(dynamic[key]):
            yield f"dynamic.{key}: needs a whole number, 0 or more, got {dynamic[key]!r}"
    low = dynamic.get("low")
    if threshold == AUTO and low is not None:
        yield "dynamic.low: the calibration says it where threshold is auto: leave it out, or give a number as threshold"
    elif _is_whole(threshold) and _is_whole(low) and int(str(low)) > int(str(threshold)):
        yield f"dynamic.low: must not exceed dynamic.threshold ({threshold}), got {low}"
    if dynamic.get("adapt") is not None and not isinstance(dynamic["adapt"], bool):
        yield f"dynamic.adapt: needs true or false, got {dynamic['adapt']!r}"


def dynamic_flags(dynamic: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the flags that a checked ``dynamic`` means."""
    return {DYNAMIC_FLAG: str(dynamic["threshold"])} if dynamic and dynamic.get("threshold") is not None else {}


def dynamic_environment(dynamic: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the variables that a checked ``dynamic`` means: all but its threshold, for the policy."""
    given = {key: value for key, value in (dynamic or {}).items() if key != "threshold" and value is not None}
    settings = {key: value if isinstance(value, bool) else int(value) for key, value in given.items()}
    return {DYNAMIC_VARIABLE: json.dumps(settings, sort_keys=True)} if settings else {}
