"""What a profile's files say: each level's cycle, shares, speed, overhead and trace, from its raw files alone. Standard library only.

A run's files lie below ``<run id>/<host>/<arm>/``, or without the host where they were made; the same files give the same figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.profiling import overhead, phases

SCHEMA = "aerie-profile/1"
LAUNCH, OUTCOME, WINDOWS, LINES, TRACE = "launch.json", "level.json", "windows.json", "decode.jsonl", "trace.json"
TRACES = "traces"
LATE_SECONDS = 0.02
"""How late a line of the server's log may have been seen; so much of each window's beginning is left out."""

LAUNCH_FACTS = (
    "arm",
    "instance",
    "acceptance_simulated",
    "argv",
    "environment",
    "patch_modes",
    "patch_sets_in_check",
    "release",
    "models",
    "settings",
    "client",
    "host_fingerprint",
)


def set_aside(directory: Path) -> None:
    """Move an earlier profile of the same arm in the same run out of the way: raw files are never overwritten."""
    if directory.exists():
        shelf = directory.parent / bench_runner.SUPERSEDED
        shelf.mkdir(exist_ok=True)
        directory.rename(shelf / f"{directory.name}.{1 + sum(1 for _ in shelf.glob(f'{directory.name}.*'))}")


def dump_lines(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return what was seen in the server's log as JSON lines."""
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def read(directory: Path) -> dict[str, Any]:
    """Return the figures of one level; those that it has no files for are null."""
    outcome = _json(directory / OUTCOME)
    level = int(outcome["concurrency"])
    windows = [overhead.Window(**window) for window in _json(directory / WINDOWS, {"windows": []})["windows"]]
    seen = [json.loads(line) for line in _text(directory / LINES).splitlines()]
    found = overhead.intervals(seen, level)
    chosen = {state: [window for window in windows if window.state == state] for state in (overhead.ON, overhead.OFF)}
    inside = {state: [interval for window in chosen[state] for interval in _within(found, window)] for state in chosen}
    compared = overhead.measure(windows, found, LATE_SECONDS) if chosen[overhead.ON] else None
    span = (windows[0].start, windows[-1].end) if windows else (0.0, 0.0)
    accepted = [line["accept"] for line in seen if line.get("accept") is not None and span[0] <= line["t"] <= span[1]]
    return {
        "concurrency": level,
        "status": outcome["status"],
        "reason": outcome.get("reason"),
        "tok_s": overhead.tokens_per_second(inside[overhead.OFF]),
        "tok_s_on": overhead.tokens_per_second(inside[overhead.ON]),
        "step_ms": overhead.step_ms(inside[overhead.OFF]),
        "step_ms_on": overhead.step_ms(inside[overhead.ON]),
        "accept_length": statistics.fmean(accepted) if accepted else None,
        "overhead": compared.as_dict() if compared else None,
        "windows": len(windows),
        "intervals": sum(map(len, inside.values())),
        "clean_intervals": sum(interval.clean for members in inside.values() for interval in members),
        "phases": _phases(directory, chosen[overhead.ON], level),
        "trace": _json(directory / TRACE, None),
        "trace_reason": outcome.get("trace_reason"),
        "traces": outcome.get("traces") or {},
    }


def _within(found: Sequence[overhead.Interval], window: overhead.Window) -> list[overhead.Interval]:
    return overhead.within(found, window, LATE_SECONDS)


def _phases(directory: Path, windows: Sequence[overhead.Window], level: int) -> dict[str, Any] | None:
    """Sum up the cycles that began in a window and in which all clients ran; null where there is none."""
    cycles = phases.read(_text(directory / bench_runner.PHASES), str(directory / bench_runner.PHASES))
    full = [cycle for window in windows for cycle in phases.between(cycles, window.start, window.end) if cycle.batch == level]
    return phases.summarise(full).as_dict() if full else None


def in_words(level: Mapping[str, Any]) -> str:
    """Return a level's figures on one line, as progress tells them."""
    if level["status"] != bench_runner.COMPLETED:
        return f"{str(level['status']).upper()}: {str(level['reason']).splitlines()[0]}"
    said = [f"{level['tok_s']:.0f} tok/s"] if level["tok_s"] else ["no throughput told"]
    if level["phases"]:
        named = sorted(level["phases"]["phases"].items(), key=lambda phase: -phase[1]["share"])[:2]
        said += [f"cycle {level['phases']['mean_cycle_ms']:.2f} ms", *(f"{name} {100 * phase['share']:.0f} %" for name, phase in named)]
    elif level["step_ms"]:
        said.append(f"step {level['step_ms']:.2f} ms")
    if level["overhead"]:
        said.append(f"on/off {level['overhead']['on_over_off']:.3f}")
    if level["trace"]:
        said.append(f"{level['trace']['steps']} steps traced")
    elif level["trace_reason"]:
        said.append(f"no trace: {str(level['trace_reason']).splitlines()[0]}")
    return "  ".join(said)


def arm(directory: Path) -> dict[str, Any]:
    """Return an arm's definition and levels."""
    launch = _json(directory / LAUNCH)
    levels = [read(path.parent) for path in directory.glob(f"c*/{OUTCOME}")]
    return {
        **{name: launch.get(name) for name in LAUNCH_FACTS},
        "started": launch.get("started"),
        "levels": sorted(levels, key=lambda level: int(level["concurrency"])),
    }


def whole(run: Path) -> dict[str, Any]:
    """Return everything that a run's collected files say, by host, arms in the order in which they were profiled."""
    hosts = {}
    for host in sorted(path for path in run.iterdir() if path.is_dir()):
        arms = [arm(path.parent) for path in host.glob(f"*/{LAUNCH}")]
        if arms:
            hosts[host.name] = {"arms": sorted(arms, key=lambda found: (str(found["started"]), str(found["arm"]["name"])))}
    return {"schema": SCHEMA, "run_id": run.name, "hosts": hosts}


def manifest(root: Path, directory: Path, place: str, traces: bool) -> list[dict[str, Any]]:
    """Return the files of an arm with their size and hash, and where each belongs below the controller's results."""
    found = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and (traces or name.parts[0] != TRACES):
            entry = {"path": path.relative_to(root).as_posix(), "place": f"{place}/{name.as_posix()}"}
            found.append({**entry, "bytes": path.stat().st_size, "sha256": files.sha256_file(path)})
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def read_json(path: Path, of: str, *default: Any) -> Any:
    """Return a file's content, or ``default`` where it is missing; raise AerieError that says of what directory it should be part."""
    try:
        return files.read_json(path)
    except FileNotFoundError:
        if default:
            return default[0]
        raise AerieError(f"{path} is missing: the directory is no {of}") from None
    except ValueError as error:
        raise AerieError(f"{path} can't be read: {error}") from error


def _json(path: Path, *default: Any) -> Any:
    return read_json(path, "profile of an arm", *default)
