#!/usr/bin/env python3
"""Draws what bench.py measured, and says it again from the raw records alone.

plot.py OUT [OUT...]     several launches of one backend are one comparison; plot.svg, plot.png and table.md go to the first
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import analysis
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

STYLE: dict[str, dict[str, Any]] = {
    analysis.BASELINE: {"color": "#6b6b6b", "linestyle": "--", "marker": "s"},
    analysis.EAGLE3: {"color": "#c8781e", "linestyle": "-", "marker": "^"},
    analysis.DYNAMIC: {"color": "#1f5fa8", "linestyle": "-", "marker": "o"},
}
NAMES = {analysis.BASELINE: "baseline", analysis.EAGLE3: "EAGLE-3", analysis.DYNAMIC: "dynamic"}
RC = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "svg.hashsalt": "aerie"}
BIN_SECONDS = 1.0


def records_of(outs: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for out in outs for line in (out / "records.jsonl").read_text().splitlines() if line.endswith("}")]


def speeds(axes: Axes, said: Mapping[str, Any]) -> None:
    levels = said["figures"][analysis.SERVER]["levels"]
    for arm, style in STYLE.items():
        points = [(int(level), one["tok_s"][arm]) for level, one in levels.items() if one["tok_s"][arm]]
        axes.plot(*zip(*points, strict=True), label=NAMES[arm], **style) if points else None
    axes.set_yscale("log")
    axes.set_ylabel("output tokens per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        FixedLocator([part * 10**power for power in range(7) for part in (1, 2, 5) if low <= part * 10**power <= high])
    )
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False)
    _levels(axes, levels)


def ratios(axes: Axes, said: Mapping[str, Any]) -> None:
    levels = {level: one for level, one in said["figures"][analysis.SERVER]["levels"].items() if one["over_better"]}
    places = [int(level) for level in levels]
    found = [one["over_better"] for one in levels.values()]
    bars = [[one["value"] - (one["low"] or one["value"]) for one in found], [(one["high"] or one["value"]) - one["value"] for one in found]]
    if found:
        axes.errorbar(places, [one["value"] for one in found], yerr=bars, capsize=4, color="#1f5fa8", marker="o", linestyle="none")
    axes.axhline(1, color="black", linewidth=1)
    axes.axhline(analysis.POINT, color="#2f8f4e", linewidth=1, linestyle="--", label=f"goal of the point, {analysis.POINT}")
    axes.axhline(analysis.LOW, color="#b03a3a", linewidth=1, linestyle=":", label=f"goal of the lower end, {analysis.LOW}")
    axes.set_ylabel("dynamic over the better one, 90 % interval")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.06))
    axes.legend(frameon=False, loc="upper right")
    _levels(axes, levels)


def changing(axes: Axes, records: Sequence[Mapping[str, Any]], shape: str) -> None:
    """Draw tokens per second over time, a second at a time, of the first pass; where dynamic decoded plainly is shaded."""
    clients: list[tuple[float, float]] = []
    for arm, style in STYLE.items():
        record = next((one for one in records if one.get("shape") == shape and one["arm"] == arm and one["status"] == "ok"), None)
        if record is None:
            continue
        times, values = binned(record)
        axes.plot(times, values, color=style["color"], linestyle=style["linestyle"], label=NAMES[arm])
        if arm == analysis.DYNAMIC:
            clients = [(line[0], line[1]) for line in record["lines"] if line[1]]
            for line, after in itertools.pairwise(record["lines"]):
                if after[3] is not None and after[3] < 1.005 and after[0] > line[0]:
                    axes.axvspan(line[0], after[0], color="#1f5fa8", alpha=0.08, linewidth=0)
    axes.set_ylabel("output tokens per second")
    axes.set_xlabel("seconds")
    axes.set_ylim(bottom=0)
    if clients:
        beside = axes.twinx()
        beside.plot(*zip(*clients, strict=True), color="#9a9a9a", linewidth=0.8)
        beside.set_ylabel("running requests (thin)")
        beside.spines[["top"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(f"{shape}: plain decoding shaded")


def binned(record: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return tokens per second of each second, from the stretches that the server's lines tell."""
    decodes = [line for line in record["lines"] if line[2] is not None]
    seconds = record["ended"] - record["started"]
    sums = [0.0] * max(1, int(seconds / BIN_SECONDS))
    for before, line in itertools.pairwise(decodes):
        start, end = max(before[0], 0.0), min(line[0], len(sums) * BIN_SECONDS - 1e-6)
        place = int(start / BIN_SECONDS)
        while start < end:
            until = min(end, (place + 1) * BIN_SECONDS)
            sums[place] += line[2] * (until - start)
            start, place = until, place + 1
    return [(place + 0.5) * BIN_SECONDS for place in range(len(sums))], [one / BIN_SECONDS for one in sums]


def _levels(axes: Axes, levels: Mapping[str, Any]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([int(level) for level in levels]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("clients")


def draw(said: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Figure:
    shapes = sorted({one["shape"] for one in records if one.get("kind") == "load" and one["status"] == "ok"})
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11, 4.2 * (1 + bool(shapes))), layout="constrained")
        grid = figure.subplots(1 + bool(shapes), 2, squeeze=False)
        speeds(grid[0][0], said)
        ratios(grid[0][1], said)
        for axes, shape in zip(grid[1] if shapes else [], shapes, strict=False):
            changing(axes, records, shape)
        if len(shapes) == 1:
            grid[1][1].set_visible(False)
        for axes in grid.flat:
            axes.grid(color="#e4e4e4", linewidth=0.8)
        pinned = said["simulated_acceptance"]
        figure.suptitle(f"{said['backend']}" + (f": acceptance simulated, pinned at {pinned}" if pinned else ""))
    return figure


def main() -> None:
    outs = [Path(word) for word in sys.argv[1:]]
    if not outs:
        sys.exit(__doc__)
    records = records_of(outs)
    said = analysis.analyse(records)
    (outs[0] / "analysis.json").write_text(json.dumps(said, indent=1) + "\n")
    (outs[0] / "table.md").write_text(analysis.report(said))
    figure = draw(said, records)
    figure.savefig(outs[0] / "plot.svg", metadata={"Date": None})
    figure.savefig(outs[0] / "plot.png", dpi=110)
    print(analysis.report(said))


if __name__ == "__main__":
    main()
