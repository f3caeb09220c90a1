"""What the cells of a run come to: dynamic over the better of baseline and EAGLE-3, level by level, with 90 % intervals. Pure.

**The unit is the pass.** Within a pass, all arms meet a level within seconds of each other; what drifts from pass to pass divides out. The
figures of a level are logarithms of ratios within a pass; their mean is the point and Student's t over passes gives the interval (a
bootstrap of five values is known to be too narrow). A launch is one: how far another start of the same servers would lie is not in it, so
runs of several launches are told apart, and their ratios shown side by side.

**The better arm is chosen without looking at what it is compared by.** To take, in each pass, the faster of two noisy figures favours luck:
the ratio would come out too low by the expected luck of the better one. So each pass is compared with the arm that was better in all the
*other* passes: what was lucky there has no part in this pass. Simulated, the point is right on the average whatever the arms are; the
interval holds the truth 90 times of 100 where one arm is clearly better, and 85 times where both are equal. Beside it stands what needs no
choice at all: the ratio to both arms, and the lower of the two lower ends. That dynamic reaches a share of the better arm means that it
does so of both, so this is a bound at the same confidence (an intersection-union test), if a cautious one.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cores  # noqa: F401
from ansible.module_utils.aerie.profiling import overhead

SCHEMA = "aerie-dynamic-bench/1"
BASELINE, EAGLE3, DYNAMIC = "baseline", "eagle3", "dynamic"
FIXED = (BASELINE, EAGLE3)
UPSTREAM = "upstream"
"""A baseline that plans prefills as SGLang does, without the patch set flashinfer_prefill_plan."""
POINT, LOW, CHANGING = 0.97, 0.94, 0.95
"""The goal: the point and the lower end at each level, and the point under a load that changes."""
SERVER, CLIENT = "server_tok_s", "client_tok_s"
SHORT = 0.8
"""Below this share of the level's clients on the average, a cell was not measured at its level."""


@dataclass(frozen=True)
class Ratio:
    """A geometric mean over passes, with its 90 % interval (null for one pass)."""

    value: float
    low: float | None
    high: float | None
    passes: int

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio | None:
        if not ratios:
            return None
        logs = [math.log(ratio) for ratio in ratios]
        middle = statistics.fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(middle), None, None, 1)
        reach = overhead.t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach), len(logs))


Speeds = Mapping[Any, Mapping[str, float]]
"""By pass: each arm's tokens per second."""


def whole(speeds: Speeds, arms: Iterable[str]) -> dict[Any, dict[str, float]]:
    """Return the passes in which each of ``arms`` has a figure."""
    wanted = tuple(arms)
    return {key: dict(found) for key, found in speeds.items() if all(found.get(arm) for arm in wanted)}


def better_elsewhere(speeds: Speeds, key: Any) -> str:
    """Return which fixed arm was better in the other passes, by the mean of logarithms; in ``key`` itself where it is the only one."""
    others = [found for other, found in speeds.items() if other != key] or list(speeds.values())
    lead = statistics.fmean(math.log(found[EAGLE3] / found[BASELINE]) for found in others)
    return EAGLE3 if lead > 0 else BASELINE


def over_better(speeds: Speeds, arm: str = DYNAMIC) -> tuple[Ratio | None, dict[str, int]]:
    """Return ``arm`` over the better of the fixed arms, and in how many passes each of these was the one compared with."""
    usable = whole(speeds, (*FIXED, arm))
    chosen = {key: better_elsewhere(usable, key) for key in usable}
    ratio = Ratio.of([found[arm] / found[chosen[key]] for key, found in usable.items()])
    return ratio, {name: sum(one == name for one in chosen.values()) for name in FIXED}


def over_both(speeds: Speeds, arm: str = DYNAMIC) -> dict[str, Ratio | None]:
    """Return ``arm`` over each of the fixed arms."""
    usable = whole(speeds, (*FIXED, arm))
    return {name: Ratio.of([found[arm] / found[name] for found in usable.values()]) for name in FIXED}


def compared(speeds: Speeds, point: float, low: float | None, arm: str = DYNAMIC) -> dict[str, Any]:
    """Return all that is said of one level, or of one load that changes."""
    ratio, chosen = over_better(speeds, arm)
    both = over_both(speeds, arm)
    usable = whole(speeds, (*FIXED, arm))
    lows = [one.low for one in both.values() if one]
    return {
        "passes": len(usable),
        "tok_s": {name: _geometric([found[name] for found in usable.values()]) for name in (*FIXED, arm)},
        "over_better": asdict(ratio) if ratio else None,
        "compared_with": chosen,
        "over": {name: asdict(one) if one else None for name, one in both.items()},
        "cautious_low": None if not lows or None in lows else min(one for one in lows if one is not None),
        "goal": {"point": point, "low": low},
        "met": None if ratio is None or (low is not None and ratio.low is None) else _met(ratio, point, low),
    }


def _met(ratio: Ratio, point: float, low: float | None) -> bool:
    return ratio.value >= point and (low is None or (ratio.low or 0.0) >= low)


def _geometric(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def speeds_of(records: Iterable[Mapping[str, Any]], kind: str, figure: str) -> dict[Any, dict[Any, dict[str, float]]]:
    """Return, by level (of cells) or kind of load, by launch and pass, each arm's figure of what was measured as planned."""
    found: dict[Any, dict[Any, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        if record.get("kind") == kind and record.get("status") == "ok" and record.get(figure):
            if kind == "cell" and (record.get("running") or 0) < SHORT * record["level"]:
                continue
            place = record["level"] if kind == "cell" else record["shape"]
            found[place][record.get("launch", 0), record["pass"]][record["arm"]] = float(record[figure])
    return {place: {key: dict(arms) for key, arms in found[place].items()} for place in sorted(found, key=str)}


def analyse(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the records of one backend say, and whether the goal is met."""
    plan = next((record for record in records if record.get("kind") == "plan"), {})
    said: dict[str, Any] = {"schema": SCHEMA, "backend": plan.get("backend"), "simulated_acceptance": plan.get("pinned"), "figures": {}}
    for figure in (SERVER, CLIENT):
        cells, loads = speeds_of(records, "cell", figure), speeds_of(records, "load", figure)
        said["figures"][figure] = {
            "levels": {str(level): compared(cells[level], POINT, LOW) for level in sorted(cells)},
            "loads": {shape: compared(passes, CHANGING, None) for shape, passes in loads.items()},
        }
    main = said["figures"][SERVER]
    cells = speeds_of(records, "cell", SERVER)
    said["launches"] = _by_launch(cells)
    said["extra"] = _extra(cells)
    said["modes"] = _modes(records)
    verdicts = [one["met"] for part in main.values() for one in part.values()]
    said["met"] = bool(verdicts) and all(verdicts)
    failed = [record for record in records if record.get("kind") in ("cell", "load") and record.get("status") != "ok"]
    said["failed"] = [{key: record.get(key) for key in ("kind", "pass", "level", "shape", "arm", "reason")} for record in failed]
    return said


def _by_launch(cells: Mapping[Any, Speeds]) -> dict[str, dict[str, float]]:
    """Return the ratio of each launch by itself, where there are several."""
    launches = sorted({key[0] for passes in cells.values() for key in passes})
    if len(launches) < 2:
        return {}
    found: dict[str, dict[str, float]] = {}
    for launch in launches:
        own = {level: {key: one for key, one in passes.items() if key[0] == launch} for level, passes in cells.items()}
        ratios = {level: over_better(passes)[0] for level, passes in own.items()}
        found[str(launch)] = {str(level): one.value for level, one in ratios.items() if one}
    return found


def _extra(cells: Mapping[Any, Speeds]) -> dict[str, Any]:
    """Return how far the dynamic server in one mode is from a server that has only this one, and others from SGLang's baseline."""
    found: dict[str, Any] = {}
    for arm, server in (("plain", BASELINE), ("speculative", EAGLE3), (BASELINE, UPSTREAM), (DYNAMIC, UPSTREAM)):
        levels = {level: whole(passes, (arm, server)).values() for level, passes in cells.items()}
        ratios = {level: Ratio.of([one[arm] / one[server] for one in passes]) for level, passes in levels.items()}
        if any(ratios.values()):
            found[f"{arm} over {server}"] = {str(level): asdict(one) for level, one in ratios.items() if one}
    return found


def _modes(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return which share of the dynamic server's steps was plain, by level."""
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        steps = record.get("steps") or {}
        if record.get("kind") == "cell" and record.get("arm") == DYNAMIC and sum(steps.values()) > 0:
            counts[str(record["level"])][0] += steps.get("plain", 0.0)
            counts[str(record["level"])][1] += sum(steps.values())
    return {level: plain / total for level, (plain, total) in counts.items()}


# ---- tables ------------------------------------------------------------------------------------------------------------------------


def table(said: Mapping[str, Any], figure: str = SERVER) -> str:
    """Return the comparison as a Markdown table."""
    lines = [
        "| load | baseline tok/s | EAGLE-3 tok/s | dynamic tok/s | over the better | 90 % interval | compared with | plain steps | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    parts = said["figures"][figure]
    for name, one in [*parts["levels"].items(), *parts["loads"].items()]:
        ratio, goal = one["over_better"], one["goal"]
        speeds = " | ".join("–" if one["tok_s"][arm] is None else f"{one['tok_s'][arm]:,.0f}" for arm in (*FIXED, DYNAMIC))
        interval = "–" if not ratio or ratio["low"] is None else f"{ratio['low']:.3f}–{ratio['high']:.3f}"
        against = ", ".join(f"{arm} ({count})" for arm, count in one["compared_with"].items() if count) or "–"
        wanted = f"≥ {goal['point']}" + (f", low ≥ {goal['low']}" if goal["low"] else "")
        verdict = {True: "met", False: "missed", None: "not known"}[one["met"]]
        plain = said["modes"].get(name)
        label = f"{name} client{'' if name == '1' else 's'}" if name.isdigit() else name
        point = f"**{ratio['value']:.3f}**" if ratio else "–"
        share = "–" if plain is None else f"{100 * plain:.0f} %"
        lines.append(f"| {label} | {speeds} | {point} | {interval} | {against} | {share} | {verdict} ({wanted}) |")
    return "\n".join(lines) + "\n"


def report(said: Mapping[str, Any]) -> str:
    """Return everything as text."""
    pinned = said["simulated_acceptance"]
    head = f"{said['backend']}; every speed with EAGLE-3 is simulated: acceptance pinned at {pinned}" if pinned else f"{said['backend']}"
    text = [head, "", "By the server's own decode lines, prefills included:", "", table(said)]
    text += ["By what the clients were given:", "", table(said, CLIENT)]
    for name, levels in said["extra"].items():
        text.append(f"{name}: " + "; ".join(f"{level}: {_words(one)}" for level, one in levels.items()))
    for launch, levels in said["launches"].items():
        text.append(f"launch {launch}: " + "; ".join(f"{level}: {value:.3f}" for level, value in levels.items()))
    cautious = [
        f"{name}: {one['cautious_low']:.3f}" for name, one in said["figures"][SERVER]["levels"].items() if one["cautious_low"] is not None
    ]
    if cautious:
        text.append("lower end against the worse of both arms, without any choice: " + "; ".join(cautious))
    text += [f"FAILED: {one}" for one in said["failed"]]
    text.append("goal met" if said["met"] else "goal not met")
    return "\n".join(text) + "\n"


def _words(one: Mapping[str, Any]) -> str:
    return f"{one['value']:.3f}" + (f" ({one['low']:.3f}–{one['high']:.3f})" if one["low"] is not None else "")
