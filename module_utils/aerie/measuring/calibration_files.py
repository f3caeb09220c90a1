"""What a calibration's files say: its levels, its verdict, what it sets. Standard library only: a pure function of the files.

A run's files lie below ``<run id>/<host>/``, or without the host where they were made; format: docs/reference/calibration.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_runner, calibration, calibration_depths
from ansible.module_utils.aerie.measuring.calibration import PLAIN, SPECULATIVE
from ansible.module_utils.aerie.profiling import overhead, profile_levels
from ansible.module_utils.aerie.words import cut, listing

SCHEMA = "aerie-calibration-run/1"
LAUNCH, OUTCOME = "launch.json", "level.json"


def level(directory: Path) -> calibration.Level | None:
    """Return what one level's windows gave; None where they gave no pair."""
    outcome = _json(directory / OUTCOME)
    windows, _ = _windows(directory)
    found = _intervals(directory, int(outcome["concurrency"]))
    first, second = outcome["modes"]
    return calibration.level(int(outcome["concurrency"]), windows, found, profile_levels.LATE_SECONDS, (first, second))


def _windows(directory: Path) -> tuple[list[overhead.Window], list[float]]:
    kept = _json(directory / profile_levels.WINDOWS, {"windows": []})["windows"]
    windows = [overhead.Window(one["pair"], one["state"], one["start"], one["end"]) for one in kept]
    return windows, [float(one["changed"]) for one in kept]


def _intervals(directory: Path, concurrency: int) -> list[overhead.Interval]:
    return overhead.intervals(profile_levels.read_lines(directory / profile_levels.LINES), concurrency)


def step_ms(directory: Path, state: str) -> float | None:
    """Return the time of a decode step in one mode; None where no step was clean."""
    windows, _ = _windows(directory)
    found = _intervals(directory, int(_json(directory / OUTCOME)["concurrency"]))
    return overhead.step_ms(
        [one for window in windows if window.state == state for one in overhead.within(found, window, profile_levels.LATE_SECONDS)]
    )


def switches(directory: Path) -> dict[str, list[float]]:
    """Return what each change of the mode cost in one level."""
    windows, changes = _windows(directory)
    found = _intervals(directory, int(_json(directory / OUTCOME)["concurrency"]))
    return calibration.switch_ms(windows, found, changes) if windows else {}


def read(run: Path) -> dict[str, Any]:
    """Return all that the files of one calibrated server say; raise AerieError where no level gave a figure, or one can't be read."""
    with untrusted.reading(run):
        found = _read(run)
    untrusted.check(found)
    return found


def _read(run: Path) -> dict[str, Any]:
    launch = _json(run / LAUNCH)
    places = [path.parent for path in run.glob(f"*/{OUTCOME}")]
    outcomes = {path: _json(path / OUTCOME) for path in places}
    comparisons = calibration_depths.comparisons(launch.get("candidate_steps") or ())
    compared = [list(comparison.names) for comparison in comparisons] or [[SPECULATIVE, PLAIN]]
    forced = [path for path in places if outcomes[path]["modes"] in compared]
    confirmed = [path for path in places if path not in forced]
    by_level = sorted(forced, key=lambda path: int(outcomes[path]["concurrency"]))
    levels = {path: one for path in by_level if (one := level(path))}
    failures = [
        {"concurrency": outcome["concurrency"], "status": outcome["status"], "reason": outcome["reason"]}
        for outcome in outcomes.values()
        if outcome["status"] != bench_runner.COMPLETED
    ]
    if not levels:
        said = str(failures[0]["reason"]).splitlines()[0] if failures else "no windows were measured"
        raise AerieError(f"the calibration gave no figures: {said}")
    decision = None
    if comparisons:
        measured = {
            comparison: [levels[path] for path in levels if outcomes[path]["modes"] == list(comparison.names)] for comparison in comparisons
        }
        decision = _decide(launch, measured, failures)
    found = decision.estimate if decision else calibration.estimate(levels.values(), int(launch["settings"]["seed"]))
    # What a change between two depths costs does not count: thresholds change to and from plain decoding.
    with_plain = [path for path in levels if outcomes[path]["modes"][1] == PLAIN]
    costs: dict[str, list[float]] = {}
    for path in with_plain:
        for state, values in switches(path).items():
            costs.setdefault(PLAIN if state == PLAIN else SPECULATIVE, []).extend(values)
    nearest = min(with_plain, key=lambda path: abs(int(outcomes[path]["concurrency"]) - (found.at or found.points[-1].concurrency)))
    steps = [value for mode in outcomes[nearest]["modes"] if (value := step_ms(nearest, mode))]
    most, sizes = int(launch["most"]), launch["batch_sizes"]
    limits = calibration.thresholds(found, most, sizes)
    pause = calibration.dwell(costs, statistics.fmean(steps) if steps else None)
    about = _about(launch) | {"adaptive_config": _adaptive(launch, limits, most)}
    evidence = {"source": calibration.ONE_SERVER, "most": most, "batch_sizes": sizes, "workload": launch["settings"]["workload"]}
    result = calibration.result(found, limits, pause, about, evidence)
    table = rows(found, launch.get("before"), limits, sizes)
    sentence = calibration.sentence(found)
    if decision:
        _add_depths(result, table, decision, limits)
        sentence += f" {calibration_depths.sentence(decision.steps_by_batch)}"
    return {
        "schema": SCHEMA,
        "calibration": result,
        "sentence": sentence,
        "before": launch.get("before"),
        "table": table,
        "confirmed": [_confirmed(path, outcomes[path]) for path in sorted(confirmed, key=lambda path: int(outcomes[path]["concurrency"]))],
        "failures": sorted(failures, key=lambda failure: int(failure["concurrency"])),
        "settings": launch["settings"],
        "argv": launch["argv"],
        "environment": launch["environment"],
    }


def _decide(
    launch: Mapping[str, Any],
    measured: calibration_depths.Measured,
    failures: Sequence[Mapping[str, Any]],
) -> calibration_depths.Decision:
    """Return depths and crossover; where a comparison has no figures, say what failed."""
    try:
        return calibration_depths.decide(
            measured,
            int(launch["arm"]["speculation"]["steps"]),
            int(launch["most"]),
            launch["batch_sizes"],
            int(launch["settings"]["seed"]),
        )
    except AerieError as error:
        reasons = [str(failure["reason"]).splitlines()[0] for failure in failures[:1]]
        raise AerieError(": ".join([str(error), *reasons])) from error


def _add_depths(
    result: dict[str, Any],
    table: list[dict[str, Any]],
    decision: calibration_depths.Decision,
    limits: calibration.Thresholds,
) -> None:
    """Add the depths and what they rest on to a calibration's result and to the rows of its levels."""
    depths, proof = decision.steps_by_batch, result.pop("evidence")
    result["steps_by_batch"] = {str(size): steps for size, steps in depths.items()}
    result["adaptive_config"] = calibration_depths.adaptive_config(depths, limits, proof["most"])
    proof["comparisons"] = calibration_depths.evidence(decision)
    for entry in (*proof["levels"], *table):
        size = calibration.padded(entry["concurrency"], proof["batch_sizes"])
        entry["steps"] = decision.steps_at(size)
    result["evidence"] = proof  # last, since it is the longest


def of_records(results: Path, host: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same from records of two arms of one benchmark's run; ``asked``: experiment, run_id, plain, speculative, most."""
    names = ("experiment", "run_id", "plain", "speculative", "most")
    absent = [name for name in names if not asked.get(name)]
    if absent:
        raise AerieError(f"sglang_calibrate_records lacks {listing(absent)}: it needs {listing(names)}")
    with untrusted.reading("the records of the comparison"):
        found = _of_records(results, host, asked)
    untrusted.check(found)
    return found


def _of_records(results: Path, host: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    place = results / str(asked["experiment"]) / str(asked["run_id"]) / host
    kept = [_json(path) for path in sorted(place.glob("*/record.json"))]
    if not kept:
        raise AerieError(f"there are no records below {place}: bring them with playbooks/collect.yml")
    if others := sorted({cut(one.get("host"), 80) for one in kept if one.get("host") != host}):
        raise AerieError(f"records below {place} say that they are of {listing(others)}, not of {host}: collect them again")
    for one in kept:
        if one["arm"]["name"] in (asked["plain"], asked["speculative"]) and one.get("patch_sets_in_check"):
            raise AerieError(
                f"arm {one['arm']['name']} of run {asked['run_id']} ran {listing(one['patch_sets_in_check'])} in check mode, a test "
                "whose speeds are no results: measure it without, or name another run"
            )
    found = calibration.estimate(calibration.from_records(kept, str(asked["plain"]), str(asked["speculative"])))
    record = next(one for one in kept if one["arm"]["name"] == asked["speculative"])
    most = int(asked["most"])
    launch = {
        **record,
        "started": min(str(one["times"]["started"]) for one in kept),
        "most": most,
        "settings": {"workload": record["workload"]},
    }
    limits = calibration.thresholds(found, most)
    about = _about(launch) | {"adaptive_config": _adaptive(launch, limits, most)}
    evidence = {"source": calibration.RECORDS, "most": most, "batch_sizes": None, "workload": record["workload"], "records": dict(asked)}
    return {
        "schema": SCHEMA,
        "calibration": calibration.result(found, limits, calibration.dwell({}, None), about, evidence),
        "sentence": calibration.sentence(found),
        "before": None,
        "table": rows(found, None, limits, None),
        "confirmed": [],
        "failures": [],
        "settings": launch["settings"],
        "argv": record["argv"],
        "environment": record["environment"],
    }


def rows(
    found: calibration.Estimate, before: Mapping[str, int] | None, after: calibration.Thresholds, sizes: list[int] | None
) -> list[dict[str, Any]]:
    """Return what thresholds before and after make of each level: the mode, and its speed as a share of the better mode's."""
    told = []
    for point in found.points:
        was = calibration.chosen(point, before["high"] if before else None, before["low"] if before else None, sizes)
        now = calibration.chosen(point, after.high, after.low, sizes)
        told.append({"concurrency": point.concurrency, "before": _choice(was), "after": _choice(now)})
    return told


def _choice(found: tuple[str, float | None]) -> dict[str, Any]:
    return {"mode": found[0], "of_better": None if found[1] is None else round(found[1], 4)}


def _confirmed(path: Path, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the thresholds after did against those before, at one level, measured."""
    found = level(path)
    point = calibration.estimate([found]).points[0] if found else None
    return {
        "concurrency": outcome["concurrency"],
        "after_tok_s": found.speculative_tok_s if found else None,
        "before_tok_s": found.plain_tok_s if found else None,
        "after_over_before": point.ratio if point else None,
        "low": point.low if point else None,
        "high": point.high if point else None,
    }


def _about(launch: Mapping[str, Any]) -> dict[str, Any]:
    release = launch["release"]
    return {
        "run_id": launch["run_id"],
        "date": launch["started"],
        "arm": {"name": launch["arm"]["name"], "speculation": launch["arm"].get("speculation")},
        "models": launch["models"],
        "release": release.get("id"),
        "versions": {
            "sglang": release.get("sglang_version"),
            "torch": release.get("torch_version"),
            "patch_sets": {one["name"]: one.get("sha256") for one in release.get("patch_sets") or []},
        },
        "acceptance_simulated": launch["acceptance_simulated"],
        "host": launch["host"],
        "host_fingerprint": launch["host_fingerprint"],
    }


def _adaptive(launch: Mapping[str, Any], limits: calibration.Thresholds, most: int) -> dict[str, Any]:
    steps = int((launch["arm"].get("speculation") or {}).get("steps") or 1)
    return calibration.adaptive_config(limits, steps, most)


def manifest(root: Path, directory: Path) -> list[dict[str, Any]]:
    """Return a calibration's files below ``root``, with size and hash; the controller decides where they go."""
    return profile_levels.manifest(root, directory, traces=False)


def _json(path: Path, *default: Any) -> Any:
    return profile_levels.read_json(path, "calibration", *default)
