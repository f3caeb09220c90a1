"""From a search to what a host is given: the end-to-end comparison that must confirm it, the decision, and the variables file. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import verdict
from ansible.module_utils.aerie.tuning import messages, search

SCHEMA = "aerie-nccl-tuned/1"
REFERENCE_ARM, ARM = "nccl-default", "nccl-"
CONFIRMED, UNCONFIRMED, REFUTED, SAME = "confirmed", "unconfirmed", "not_confirmed", search.SAME
_ENVIRONMENT = untrusted.MapOf(untrusted.Maybe(untrusted.TEXT))
RESULT_SHAPE = {
    "run_id": untrusted.WORD,
    "host": untrusted.WORD,
    "base": _ENVIRONMENT,
    "versions": untrusted.MAPPING,
    "objectives": untrusted.MapOf(
        {
            "verdict": untrusted.WORD,
            "candidate?": untrusted.Maybe(untrusted.TEXT),
            "changes?": _ENVIRONMENT,
            "environment": _ENVIRONMENT,
            "ratio?": untrusted.Maybe({"value": untrusted.NUMBER}),
            "medians_us?": untrusted.MapOf(untrusted.MapOf(untrusted.NUMBER)),
        }
    ),
}
METRICS = {messages.LATENCY: "output_throughput_tok_s", messages.THROUGHPUT: "total_throughput_tok_s"}
"""By what an objective is judged end to end, in records' metrics; all are tokens a second."""


@dataclass(frozen=True)
class Confirmation:
    """One experiment that compares a set with the default set on a server: arms that differ in environment only, or by one option."""

    objective: str
    experiment: Mapping[str, Any]
    arms: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """What one objective comes to."""

    objective: str
    verdict: str
    environment: Mapping[str, str | None]
    candidate: str | None
    why: str
    end_to_end: Mapping[str, Any] = field(default_factory=dict)


def confirmations(
    result: Mapping[str, Any],
    own_arm: Mapping[str, Any],
    in_force: Mapping[str, str],
    options: Sequence[str],
    workloads: Mapping[str, Mapping[str, Any]],
    repeats: int,
    timeout_seconds: int,
) -> list[Confirmation]:
    """Return the experiments that a search's winners, and the ``options`` of arms, are confirmed by; none where there is no winner.

    ``in_force`` is the host's nccl.env, which the arms must not inherit from.
    """
    found = []
    base = result["base"]
    for objective, workload in workloads.items():
        one = result["objectives"].get(objective)
        if one is None:
            continue
        arms = {REFERENCE_ARM: _arm(own_arm, base, in_force)}
        if one["verdict"] == search.BETTER:
            arms[f"{ARM}{objective}"] = _arm(own_arm, one["environment"], in_force)
        if objective == messages.LATENCY:
            for option in options:
                arm = _arm(own_arm, base, in_force)
                arms[f"{ARM}{option}"] = {**arm, "options": [*(arm.get("options") or []), option]}
        if len(arms) < 2:
            continue
        experiment = {
            "name": f"nccl-{objective}",
            "description": f"NCCL settings end to end, {objective}",
            "arms": list(arms),
            "workload": dict(workload),
            "repeats": repeats,
            "timeout_seconds": timeout_seconds,
        }
        found.append(Confirmation(objective, experiment, arms))
    return found


def _arm(own: Mapping[str, Any], environment: Mapping[str, str], in_force: Mapping[str, str]) -> dict[str, Any]:
    """Return the instance's own arm with exactly ``environment`` of NCCL: what else nccl.env has is taken away."""
    taken = {name: None for name in in_force if name not in environment}
    arm = {key: value for key, value in own.items() if key != "name"}
    return {**arm, "environment": {**(own.get("environment") or {}), **taken, **environment}}


def decide(result: Mapping[str, Any], records: Iterable[Mapping[str, Any]] | None) -> list[Decision]:
    """Return what each objective comes to; ``records`` of the confirmation, None where none was asked for."""
    kept = list(records) if records is not None else None
    found = []
    for objective, one in result["objectives"].items():
        ratio = one["ratio"]
        micro = f"micro-benchmark {_interval(ratio)}" if ratio else "no set was left to compare"
        if one["verdict"] != search.BETTER:
            found.append(Decision(objective, SAME, {}, None, f"no difference beyond noise: {micro}"))
            continue
        if kept is None:
            why = f"{one['candidate']}: {micro}; not confirmed end to end, as asked"
            found.append(Decision(objective, UNCONFIRMED, one["changes"], one["candidate"], why))
            continue
        seen = compare(kept, objective, f"{ARM}{objective}")
        confirmed = seen["low"] is not None and seen["low"] > 1
        why = f"{one['candidate']}: {micro}; end to end {seen['words']}"
        changes = one["changes"] if confirmed else {}
        if not confirmed:
            why += f": not adopted, since {'decode' if objective == messages.LATENCY else 'serving'} does not gain beyond noise"
        found.append(Decision(objective, CONFIRMED if confirmed else REFUTED, changes, one["candidate"], why, seen))
    return found


def option_findings(records: Iterable[Mapping[str, Any]] | None, options: Sequence[str]) -> dict[str, Any]:
    """Return what the options of arms came to, end to end."""
    kept = list(records) if records is not None else []
    return {option: compare(kept, messages.LATENCY, f"{ARM}{option}") for option in options} if kept else {}


def compare(records: Sequence[Mapping[str, Any]], objective: str, arm: str) -> dict[str, Any]:
    """Return the speed-up of ``arm`` over the default set: paired by repeat, all numbers of clients counting alike."""
    speeds: dict[str, dict[tuple[int, int], float]] = {arm: {}, REFERENCE_ARM: {}}
    failures = []
    for record in records:
        name = str(record["arm"]["name"])
        if record["experiment"] != f"nccl-{objective}" or name not in speeds or record["kind"] != verdict.MEASURE:
            continue
        value = (record.get("metrics") or {}).get(METRICS[objective])
        if record["status"] == verdict.COMPLETED and value:
            speeds[name][record["repeat"], record["concurrency"]] = float(value)
        else:
            failures.append(f"{record['cell']}: {record['status']}: {str(record.get('reason') or 'no figure').splitlines()[0]}")
    levels = sorted({level for _, level in speeds[arm].keys() & speeds[REFERENCE_ARM].keys()})
    repeats = {
        repeat: [math.log(speeds[arm][repeat, level] / speeds[REFERENCE_ARM][repeat, level]) for level in levels]
        for repeat in sorted({repeat for repeat, _ in speeds[arm]})
        if all((repeat, level) in one for one in speeds.values() for level in levels)
    }
    whole = verdict.ratio(
        {repeat: math.exp(statistics.fmean(logs)) for repeat, logs in repeats.items() if logs}, dict.fromkeys(repeats, 1.0)
    )
    by_level = {
        str(level): asdict(found)
        for level in levels
        if (found := verdict.ratio(*({key[0]: value for key, value in speeds[name].items() if key[1] == level} for name in speeds)))
    }
    words = "gave no figures to compare" if whole is None else _interval(asdict(whole))
    if failures:
        words += f" ({len(failures)} cells failed: {failures[0]})"
    return {
        "ratio": whole.value if whole else None,
        "low": whole.low if whole else None,
        "high": whole.high if whole else None,
        "pairs": whole.pairs if whole else 0,
        "metric": METRICS[objective],
        "by_concurrency": by_level,
        "failures": failures,
        "words": words,
    }


def _interval(ratio: Mapping[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['value']:.3f}× (one pair: no interval)"
    return f"{ratio['value']:.3f}× ({ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['pairs']} pairs)"


def tuned(result: Mapping[str, Any], decisions: Sequence[Decision], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of ``nccl_tuned``: what the role nccl reads, and its evidence."""
    found = {
        "schema": SCHEMA,
        "run_id": result["run_id"],
        "host": result["host"],
        "ranks": result["bench"]["ranks"],
        "backend": result["bench"]["backend"],
        "profile": result["profile"],
        "base": dict(result["base"]),
        "versions": dict(result["versions"]),
        "host_fingerprint": (result.get("host_fingerprint") or {}).get("fingerprint"),
        "arm_options": {name: one["words"] for name, one in options.items()},
    }
    for decision in decisions:
        one = result["objectives"][decision.objective]
        found[decision.objective] = {
            "verdict": decision.verdict,
            "environment": dict(decision.environment),
            "candidate": decision.candidate,
            "why": decision.why,
            "micro_benchmark": {"ratio": one["ratio"], "medians_us": one["medians_us"]},
            "end_to_end": {key: value for key, value in decision.end_to_end.items() if key != "words"} or None,
        }
    return found


def require_result(result: Any) -> Mapping[str, Any]:
    """Return a search's result, or raise AerieError where it is none."""
    if not isinstance(result, Mapping) or "objectives" not in result:
        raise AerieError("nccl_tune: result is what state=searched returned as its 'result'")
    untrusted.check(result)
    untrusted.require(result, RESULT_SHAPE, "the result of the search")
    if others := [name for name in result["objectives"] if name not in messages.OBJECTIVES]:
        raise untrusted.Malformed(f"the result of the search has an objective {untrusted.shown(others[0])}")
    return result
