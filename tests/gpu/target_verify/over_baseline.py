#!/usr/bin/env python3
"""What the records of ../dynamic/bench.py come to: each arm over baseline, and dynamic over the best fixed arm.

    over_baseline.py RECORDS.jsonl...

Ratios are of one pass and launch, so that what drifts divides out; brackets are 90 % intervals
(Student's t of logarithms over passes). The best fixed arm of a pass is the best in all others.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dynamic"))
from analysis import BASELINE, CLIENT, DYNAMIC, SERVER, Ratio

Passes = Mapping[Any, Mapping[str, float]]
"""By launch and pass: each arm's tokens per second."""


def passes(records: Iterable[Mapping[str, Any]], level: int, figure: str) -> dict[Any, dict[str, float]]:
    cells: dict[Any, dict[str, float]] = {}
    for record in records:
        if record["kind"] == "cell" and record["status"] == "ok" and record["level"] == level and record[figure]:
            cells.setdefault((record["launch"], record["pass"]), {})[record["arm"]] = record[figure]
    return cells


def over(speeds: Passes, arm: str, reference: str = BASELINE) -> Ratio | None:
    pairs = [cell for cell in speeds.values() if arm in cell and reference in cell]
    return Ratio.of([cell[arm] / cell[reference] for cell in pairs])


def over_best(speeds: Passes, arm: str = DYNAMIC) -> Ratio | None:
    """Return ``arm`` over the best other arm, which the other passes choose, so that luck does not."""
    fixed = {name for cell in speeds.values() for name in cell} - {arm}
    whole = {key: cell for key, cell in speeds.items() if fixed | {arm} <= cell.keys()}
    ratios = []
    for key, cell in whole.items():
        others = [speed for other, speed in whole.items() if other != key] or [cell]
        means = {name: statistics.fmean(math.log(speed[name]) for speed in others) for name in fixed}
        ratios.append(cell[arm] / cell[max(means, key=lambda name: means[name])])
    return Ratio.of(ratios)


def text(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    reach = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    return f"{ratio.value:.2f}{reach}"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    records = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    levels = sorted({record["level"] for record in records if record["kind"] == "cell"})
    arms = sorted({record["arm"] for record in records if record["kind"] == "cell"} - {BASELINE})
    print("| clients | " + " | ".join(map(str, levels)) + " |\n|---" * 1 + "|---" * len(levels) + "|")
    for figure, name in ((CLIENT, "clients"), (SERVER, "decode lines")):
        cells = [passes(records, level, figure) for level in levels]
        medians = [statistics.median(cell[BASELINE] for cell in speeds.values() if BASELINE in cell) for speeds in cells]
        print(f"| baseline, tok/s, {name} | " + " | ".join(f"{median:,.0f}" for median in medians) + " |")
        for arm in arms:
            print(f"| {arm} over baseline, {name} | " + " | ".join(text(over(speeds, arm)) for speeds in cells) + " |")
        if DYNAMIC in arms:
            print(f"| dynamic over the best, {name} | " + " | ".join(text(over_best(speeds)) for speeds in cells) + " |")
    for record in records:
        if record["kind"] == "load" and record["status"] == "ok":
            print(f"{record['shape']}: {record['arm']} {record[SERVER]:.0f} tok/s")


if __name__ == "__main__":
    main()
