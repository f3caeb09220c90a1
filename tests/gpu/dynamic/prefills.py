#!/usr/bin/env python3
"""Tells what steps take with and without prefills between them, from records that bench.py left: whence arms differ.

    prefills.py OUT [--least N] [--cells]
    prefills.py --logs BASELINE DYNAMIC [--least N]

The server says after every few steps how fast they were. What they took follows from that, more exactly than from when the line came.
With --cells each cell is told, with what its host did (host_work.py): how long its scheduler ran, and waited for a core,
by what part that core (placement.py) was slower than the fastest, before and after, and how many of the looks at it found it slow.
With --logs two servers' own logs are compared, plain steps alone, where as many requests ran with as many tokens: attention takes longer
over longer requests, which the lines of a record don't tell.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import cores  # noqa: F401
from ansible.module_utils.aerie.profiling import overhead

STEPS = 10
"""Decode steps between two of the server's lines: decode_log_interval in servers.yml."""
LEAST = 4
TOKENS = 2500
"""Tokens in the KV pool that are taken for as many."""
IN_USE = re.compile(r"#token: (\d+)")

Key = tuple[int, int, str]
"""Clients, prefills in between, arm."""


def stretches(record: Mapping[str, Any]) -> Iterator[tuple[int, float]]:
    """Yield, for each stretch within a cell's window, the prefills in it and its milliseconds.

    A line is [seconds since the cell began, running requests, tokens per second, acceptance length]; a prefill's has the first alone.
    """
    begins, ends = (at - record["started"] for at in record["window"])
    prefills, is_first = 0, True
    for at, running, tok_s, accepted in record["lines"]:
        if running is None:
            prefills += 1
            continue
        if not is_first and begins <= at <= ends and tok_s:
            yield prefills, 1e3 * STEPS * record["level"] * (accepted or 1.0) / tok_s
        prefills, is_first = 0, False


def by_prefills(records: Iterable[Mapping[str, Any]]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = defaultdict(list)
    for record in records:
        if record["kind"] == "cell" and "lines" in record:
            for prefills, milliseconds in stretches(record):
                found[record["level"], prefills, record["arm"]].append(milliseconds)
    return dict(found)


def by_cell(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield pass, clients, arm, tokens per second; by the window's length, what the scheduler ran and waited, and other machines took."""
    for record in records:
        if record["kind"] != "cell" or not record.get("host"):
            continue
        seconds = record["window"][1] - record["window"][0]
        scheduler = [used for name, used in record["host"]["processes"].items() if "sched" in name] or [[math.nan, math.nan]]
        ran, waited = max(scheduler)
        stolen = record["host"]["cores"].get("steal", 0.0)
        cell = record["pass"], record["level"], record["arm"], record["server_tok_s"]
        yield *cell, ran / seconds, waited / seconds, stolen / seconds, *core(record.get("placement") or {})


def by_tokens(lines: Iterable[str]) -> dict[tuple[int, int, int], list[float]]:
    """Return milliseconds of a log's plain stretches of one load, by requests, prefills in between and tokens."""
    found: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    prefills, before = 0, None
    for line in lines:
        told, tokens = overhead.read_line(line, 0.0), IN_USE.search(line)
        if told is None:
            continue
        if told["kind"] == "prefill":
            prefills += 1
            continue
        requests = told["running"]
        if requests == before and tokens and told["tok_s"] and (told["accept"] or 1) == 1:
            found[requests, prefills, int(tokens[1]) // TOKENS].append(1e3 * STEPS * requests / told["tok_s"])
        prefills, before = 0, requests
    return dict(found)


def compared(first: Iterable[str], second: Iterable[str], least: int) -> Iterator[tuple[int, int, int, float, float]]:
    """Yield requests, prefills, stretches, the first log's milliseconds and how many more the second's are: medians by stretches."""
    one, other = by_tokens(first), by_tokens(second)
    shared: dict[tuple[int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for key in sorted(one.keys() & other.keys()):
        if (count := min(len(one[key]), len(other[key]))) >= least:
            milliseconds = statistics.median(one[key])
            shared[key[:2]].append((count, milliseconds, statistics.median(other[key]) - milliseconds))
    for (requests, prefills), parts in shared.items():
        count = sum(weight for weight, *_ in parts)
        mean, more = (sum(weight * part[place] for weight, *part in parts) / count for place in (0, 1))
        yield requests, prefills, count, mean, more


def opened(log: Path) -> TextIO:
    return lzma.open(log, "rt", encoding="utf-8") if log.suffix == ".xz" else log.open(encoding="utf-8")


def core(placed: Mapping[str, float]) -> tuple[str, str, str]:
    """Return the scheduler's core, by what part it was slower than the fastest before and after, and how many looks found it slow."""
    if not placed:
        return "–", "–", "–"
    fastest, looks = placed["fastest_ms"], placed.get("looks", 0)
    slower = f"{placed['ms'] / fastest - 1:.2f}, {placed['after_ms'] / fastest - 1:.2f}"
    return str(placed["core"]), slower, f"{placed['slow']} of {looks}" if looks else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="directory with records.jsonl")
    parser.add_argument("--logs", type=Path, nargs=2, metavar="LOG", help="two servers' logs, as they are or packed (.xz)")
    parser.add_argument("--least", type=int, default=LEAST, help="stretches without which nothing is said")
    parser.add_argument("--cells", action="store_true", help="each cell, with what its host did")
    asked = parser.parse_args()
    if (asked.out is None) == (asked.logs is None):
        parser.error("name a directory with records.jsonl, or two logs")
    if asked.logs:
        print(f"| requests | prefills | stretches | ms of {STEPS} steps | more | |")
        print("| --- | --- | --- | --- | --- | --- |")
        with opened(asked.logs[0]) as first, opened(asked.logs[1]) as second:
            for requests, prefills, count, mean, more in compared(first, second, asked.least):
                print(f"| {requests} | {prefills} | {count} | {mean:.2f} | {more:+.2f} | {100 * more / mean:+.1f} % |")
        return
    lines = (asked.out / "records.jsonl").read_text(encoding="utf-8").splitlines()
    if asked.cells:
        print("| pass | clients | arm | tok/s | scheduler ran | waited for a core | cores lost to others | core | slower by | found slow |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for number, level, arm, speed, ran, waited, stolen, place, slower, slow in by_cell(map(json.loads, lines)):
            print(f"| {number} | {level} | {arm} | {speed:,.0f} | {ran:.2f} | {waited:.3f} | {stolen:.2f} | {place} | {slower} | {slow} |")
        return
    print(f"| clients | prefills | arm | median ms of {STEPS} steps | tenth to ninth tenth | stretches |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (level, prefills, arm), values in sorted(by_prefills(map(json.loads, lines)).items()):
        if len(values) >= max(asked.least, 2):
            tenths = statistics.quantiles(values, n=10, method="inclusive")
            print(f"| {level} | {prefills} | {arm} | {statistics.median(values):.2f} | {tenths[0]:.2f}–{tenths[-1]:.2f} | {len(values)} |")


if __name__ == "__main__":
    main()
