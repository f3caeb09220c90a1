"""What a profile's files say: each level's cycle, shares, speed, overhead and trace, from its raw files alone. Standard library only.

A run's files lie below ``<run id>/<host>/<arm>/``, or without the host where they were made; the same files give the same figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import files, untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.profiling import overhead, phases
from ansible.module_utils.aerie.words import cut

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


LINE = {
    "t": untrusted.NUMBER,
    "kind": untrusted.WORD,
    "running?": untrusted.COUNT,
    "tok_s?": untrusted.NUMBER,
    "accept?": untrusted.Maybe(untrusted.NUMBER),
}
WINDOW = {"pair": untrusted.WHOLE, "state": untrusted.WORD, "start": untrusted.NUMBER, "end": untrusted.NUMBER}
SHAPES: Mapping[str, untrusted.Shape] = {
    LAUNCH: {"arm": {"name": untrusted.WORD}},
    OUTCOME: {"concurrency": untrusted.COUNT, "status": untrusted.WORD, "reason?": untrusted.Maybe(untrusted.TEXT)},
    WINDOWS: {"windows": untrusted.ListOf(WINDOW)},
    TRACE: untrusted.MAPPING,
}


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
    seen = read_lines(directory / LINES)
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
    """Return an arm's definition and levels; raise AerieError where its files are not what a profile leaves."""
    with untrusted.reading(directory):
        launch = _json(directory / LAUNCH)
        levels = [read(path.parent) for path in directory.glob(f"c*/{OUTCOME}")]
    untrusted.check(levels)
    return {
        **{name: launch.get(name) for name in LAUNCH_FACTS},
        "started": launch.get("started"),
        "levels": sorted(levels, key=lambda level: int(level["concurrency"])),
    }


def whole(run: Path) -> dict[str, Any]:
    """Return everything that a run's collected files say, by host, arms in the order in which they were profiled.

    An arm whose files can't be read is one of the ``problems``, a key that is there only where there are some.
    """
    hosts, problems = {}, []
    for host in sorted(path for path in run.iterdir() if path.is_dir()):
        arms = []
        for path in sorted(host.glob(f"*/{LAUNCH}")):
            try:
                arms.append(arm(path.parent))
            except (AerieError, OSError, ValueError) as error:
                problems.append(f"{host.name}/{path.parent.name}: {cut(error, 300)}")
        if arms:
            hosts[host.name] = {"arms": sorted(arms, key=lambda found: (str(found["started"]), str(found["arm"]["name"])))}
    return {"schema": SCHEMA, "run_id": run.name, "hosts": hosts} | ({"problems": problems} if problems else {})


def manifest(root: Path, directory: Path, traces: bool) -> list[dict[str, Any]]:
    """Return the files of an arm below ``root``, with size and hash; the controller decides where they go."""
    found = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not path.is_symlink() and (traces or name.parts[0] != TRACES):
            facts = {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
            found.append({"path": path.relative_to(root).as_posix(), **facts})
    return found


def _text(path: Path) -> str:
    try:
        return untrusted.read_bytes(path, untrusted.RAW).decode(errors="replace")
    except FileNotFoundError:
        return ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return what was seen in the server's log, line by line; raise AerieError for a line that is something else."""
    lines = []
    for number, text in enumerate(_text(path).splitlines(), 1):
        try:
            line = untrusted.parse(text)
            untrusted.require(line, LINE)
        except untrusted.Malformed as error:
            raise untrusted.Malformed(f"{path}, line {number}: {error}") from None
        lines.append(line)
    return lines


def read_json(path: Path, of: str, *default: Any) -> Any:
    """Return a file's content, or ``default`` where it is missing; raise AerieError that says of what directory it should be part."""
    try:
        value = untrusted.read(path)
        if path.name in SHAPES:
            untrusted.require(value, SHAPES[path.name])
    except FileNotFoundError:
        if default:
            return default[0]
        raise AerieError(f"{path} is missing: the directory is no {of}") from None
    except ValueError as error:
        raise AerieError(f"{path} can't be read: {str(error).removeprefix(f'{path}: ')}") from error
    return value


def _json(path: Path, *default: Any) -> Any:
    return read_json(path, "profile of an arm", *default)
