"""Golden prompts: a few answers that tell whether another release still computes the same. Standard library only: this runs on hosts.

A server answers each prompt greedily, one at a time, and tells its two best logprobs at every position, whose difference is the
difference of the logits. :func:`compare` then knows whether two answers part where the choice was close, as other arithmetic may
make them, or where it was clear, which only another computation does. docs/reference/golden-prompts.md explains the rule.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import canonical_hash, read_json, write_json
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving.server_http import Endpoint, ServerError
from ansible.module_utils.aerie.words import listing

SCHEMA = "aerie-golden/1"
TOKENS = 48
LOGIT_GAP = 0.25
ANSWER_SECONDS = 300
FLUSH_SECONDS = 5

EQUAL, ALLOWED, DIFFERENT, NOT_COMPARED = "equal", "allowed", "different", "not compared"

FORMAT_KEYS = ("dtype", "quantization", "kv_cache_dtype", "load_format")
SIMULATION = "SGLANG_SIMULATE_ACC_LEN"


@dataclass(frozen=True)
class Prompt:
    """One prompt and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Answer:
    """The token ids of one answer; ``gaps`` are best minus second-best logit at each position, None where the server told no logprobs."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...] | None
    cached: int | None = None


@dataclass(frozen=True)
class Subject:
    """Whose answers these are: what must be equal for two servers' answers to be comparable, and what makes them meaningless."""

    release: str
    sglang_version: str
    arm: str
    kind: str
    models: Mapping[str, str | None]
    simulated: str | None = None
    dummy: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Subject:
        """Read it from an instance's ``instance.json``."""
        arm = record.get("arm") or {}
        speculation = arm.get("speculation") or {}
        argv = [str(word) for word in record.get("argv") or ()]
        return cls(
            release=str(record.get("release")),
            sglang_version=str(record.get("sglang_version")),
            arm=str(arm.get("name")),
            kind=str(speculation.get("algorithm") or "no speculation"),
            models={role: model.get("identity") for role, model in (record.get("models") or {}).items()},
            simulated=_simulated(record.get("environment") or {}),
            dummy=("--load-format", "dummy") in itertools.pairwise(argv) or "--load-format=dummy" in argv,
        )


def _simulated(environment: Mapping[str, Any]) -> str | None:
    value = environment.get(SIMULATION)
    try:
        return str(value) if value is not None and float(value) > 0 else None
    except ValueError:
        return str(value)


@dataclass(frozen=True)
class Answers:
    """All answers of one server, with all that says what they mean."""

    subject: Subject
    when: str
    prompts: str
    numbers: Mapping[str, Any]
    flushed: bool
    answers: Mapping[str, Answer]

    @property
    def exact(self) -> bool:
        """Whether the server computes in float32 all through, so that equal computations give equal tokens."""
        return (
            self.numbers.get("dtype") in ("float32", "float")
            and self.numbers.get("quantization") is None
            and self.numbers.get("kv_cache_dtype") in (None, "auto", "float32")
        )

    @property
    def logprobs(self) -> bool:
        return all(answer.gaps is not None for answer in self.answers.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Answers:
        """Read what :meth:`as_dict` wrote; raises KeyError or TypeError for anything else."""
        return cls(
            subject=Subject(**value["subject"]),
            when=value["when"],
            prompts=value["prompts"],
            numbers=value["numbers"],
            flushed=value["flushed"],
            answers={
                name: Answer(tuple(one["tokens"]), None if one["gaps"] is None else tuple(one["gaps"]), one["cached"])
                for name, one in value["answers"].items()
            },
        )


@dataclass(frozen=True)
class PromptResult:
    """How one prompt's two answers compare; ``at`` is the first position that differs, ``gap`` how close the choice was there."""

    name: str
    outcome: str
    at: int | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.at is None:
            return f"{self.name}: equal"
        gap = "gap unknown" if self.gap is None else f"gap {self.gap:.3g}"
        return f"{self.name}: diverged at {self.at}, {gap} ({'allowed' if self.outcome == ALLOWED else 'not allowed'})"


@dataclass(frozen=True)
class Comparison:
    """How two servers' answers compare: the worst outcome of any prompt, or why nothing was compared."""

    outcome: str
    rule: str
    prompts: tuple[PromptResult, ...] = ()
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"prompts": [asdict(one) | {"text": str(one)} for one in self.prompts]}

    def __str__(self) -> str:
        if self.outcome == NOT_COMPARED:
            return f"golden prompts were NOT compared: {self.reason}"
        parted = [one for one in self.prompts if one.outcome != EQUAL]
        told = f": {'; '.join(str(one) for one in parted)}" if parted else ""
        same = f"{len(self.prompts) - len(parted)} of {len(self.prompts)}"
        return f"{same} golden prompts answered token for token as before ({self.rule}){told}"


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a parsed file, a list of ``name`` and ``text``; raise with all that is wrong in it."""
    if not isinstance(value, list) or not value:
        raise AerieError("golden prompts: needs a list of prompts, each with name and text")
    problems, prompts, names = [], [], set()
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, Mapping) or not {"name", "text"} >= set(entry) or not all(isinstance(one, str) for one in entry.values()):
            problems.append(f"prompt {number}: needs name and text, and nothing else")
        elif not entry.get("name") or not (entry.get("text") or "").strip():
            problems.append(f"prompt {number}: name or text is empty, and an empty prompt kills SGLang's scheduler")
        elif entry["name"] in names:
            problems.append(f"prompt {number}: the name {entry['name']!r} is taken")
        else:
            names.add(entry["name"])
            prompts.append(Prompt(entry["name"], entry["text"]))
    raise_all(problems, "golden prompts")
    return tuple(prompts)


def prompts_hash(prompts: Iterable[Prompt], tokens: int = TOKENS) -> str:
    """Return what two runs must have in common to have been asked the same."""
    return canonical_hash([tokens, [[prompt.name, prompt.text] for prompt in prompts]])


def ask(
    endpoint: Endpoint,
    subject: Subject,
    prompts: Sequence[Prompt],
    tokens: int = TOKENS,
    tell: Callable[[], None] = lambda: None,
) -> Answers:
    """Ask every prompt, one at a time, from an empty prefix cache; ``tell`` is called before each. Raise ServerError where it fails."""
    info = endpoint.server_info(timeout=60)
    flushed = _flush(endpoint)
    answers: dict[str, Answer] = {}
    logprobs = True
    for prompt in prompts:
        tell()
        answers[prompt.name], logprobs = _ask_one(endpoint, prompt, tokens, logprobs)
    return Answers(
        subject=subject,
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        prompts=prompts_hash(prompts, tokens),
        numbers={key: info.get(key) for key in FORMAT_KEYS},
        flushed=flushed,
        answers=answers,
    )


def _ask_one(endpoint: Endpoint, prompt: Prompt, tokens: int, logprobs: bool) -> tuple[Answer, bool]:
    body: dict[str, Any] = {"text": prompt.text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    if logprobs:
        try:
            return _answer(endpoint.request("/generate", body | {"return_logprob": True, "top_logprobs_num": 2}, ANSWER_SECONDS)), True
        except ServerError as error:
            # A speculative algorithm that can't tell logprobs refuses the request; anything else is a failure.
            if "/generate answered 400" not in str(error):
                raise
    return _answer(endpoint.request("/generate", body, ANSWER_SECONDS)), False


def _answer(value: Any) -> Answer:
    """Read an answer of ``/generate``; logprobs that don't match its tokens one by one count as not told."""
    try:
        tokens = tuple(int(token) for token in value["output_ids"])
        about = value.get("meta_info") or {}
        top = about.get("output_top_logprobs") or []
        # 0.5.9 with SGLANG_ENABLE_SPEC_V2 tells those of the first token only.
        whose = [place[1] for place in about.get("output_token_logprobs") or []]
        told = tuple(whose[: len(tokens)]) == tokens and len(top) >= len(tokens)
        told = told and all(place is not None and len(place) >= 2 for place in top[: len(tokens)])
        gaps = tuple(place[0][0] - place[1][0] for place in top[: len(tokens)]) if told else None
        return Answer(tokens, gaps, about.get("cached_tokens"))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ServerError(f"/generate answered without token ids ({type(error).__name__}: {error}): {str(value)[:200]}") from error


def _flush(endpoint: Endpoint) -> bool:
    """Empty the prefix cache, and say whether the server did: it refuses while it has other requests."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while True:
        try:
            endpoint.request("/flush_cache", {}, 30)
            return True
        except ServerError as error:
            if isinstance(error.__cause__, json.JSONDecodeError):
                return True  # it answers in prose
            if "/flush_cache answered 400" not in str(error) or time.monotonic() > deadline:
                return False
        time.sleep(0.2)


def obstacle(before: Answers, after: Answers) -> str | None:
    """Return why two servers' answers say nothing about each other, or None where they do."""
    for one in (before, after):
        subject = one.subject
        if subject.simulated is not None:
            return f"release {subject.release} ran with {SIMULATION}={subject.simulated}: a simulated acceptance makes up tokens"
        if subject.dummy or one.numbers.get("load_format") == "dummy":
            return f"release {subject.release} ran with dummy weights, which are random at each start"
    if before.prompts != after.prompts:
        return f"release {before.subject.release} was asked other prompts"
    if before.subject.kind != after.subject.kind:
        return f"the arms are of two kinds ({before.subject.kind} before, {after.subject.kind} now)"
    known = before.subject.models, after.subject.models
    if not all(models and all(models.values()) for models in known):
        return "it is not known which models these are (they have no identity): let the role sglang_models run before"
    if dict(known[0]) != dict(known[1]):
        changed = sorted(role for role in {*known[0], *known[1]} if known[0].get(role) != known[1].get(role))
        return f"{listing(changed)} {'is another model' if len(changed) == 1 else 'are other models'} than before"
    return None


def compare(before: Answers, after: Answers, logit_gap: float = LOGIT_GAP) -> Comparison:
    """Compare two servers' answers.

    In float32 every token must be equal. Elsewhere an answer may part from the one before at a position where that one's best
    two logits were closer than ``logit_gap``; what follows is another text and is not compared.
    """
    if why := obstacle(before, after):
        return Comparison(NOT_COMPARED, "", reason=why)
    exact = before.exact and after.exact
    results = tuple(_compare_one(name, answer, after.answers[name], exact, logit_gap) for name, answer in before.answers.items())
    outcomes = {one.outcome for one in results}
    outcome = next(one for one in (DIFFERENT, ALLOWED, EQUAL) if one in outcomes)
    if exact:
        rule = "float32: all must be equal"
    elif before.logprobs:
        rule = f"may diverge where the best two logits were closer than {logit_gap:g}"
    else:
        rule = "all must be equal, as the release before told no logprobs for every token"
    return Comparison(outcome, rule, results)


def _compare_one(name: str, before: Answer, after: Answer, exact: bool, logit_gap: float) -> PromptResult:
    pairs = itertools.zip_longest(before.tokens, after.tokens)
    at = next((position for position, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return PromptResult(name, EQUAL)
    gap = before.gaps[at] if before.gaps is not None and at < len(before.gaps) else None
    return PromptResult(name, ALLOWED if not exact and gap is not None and gap < logit_gap else DIFFERENT, at, gap)


# What is kept on the host


def kept_path(paths: HostPaths, instance: str) -> Path:
    """Return the file that keeps an instance's answers."""
    return paths.root / "golden" / f"{instance}.json"


def kept(paths: HostPaths, instance: str) -> dict[str, Answers]:
    """Return the answers that are kept of an instance by release; what can't be read is as good as none."""
    try:
        value = read_json(kept_path(paths, instance))
        if value["schema"] != SCHEMA:
            return {}
        return {release: Answers.from_dict(one) for release, one in value["answers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep(paths: HostPaths, instance: str, answers: Answers) -> None:
    """Keep the answers, in place of older ones of the same release; those of releases that are gone go."""
    known = {release: one for release, one in kept(paths, instance).items() if paths.release(release).is_dir()}
    known[answers.subject.release] = answers
    value = {"schema": SCHEMA, "instance": instance, "answers": {release: one.as_dict() for release, one in known.items()}}
    write_json(kept_path(paths, instance), value)
