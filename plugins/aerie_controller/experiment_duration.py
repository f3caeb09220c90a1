"""How long an experiment will take, from the records of its last run on the same host."""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring import experiment, ledger

MOST_RUNS = 5

Record = Mapping[str, Any]


def estimate(plan: experiment.Plan, records: Sequence[Record]) -> float | None:
    """Return the seconds that ``plan`` would take if it went as in ``records``, those of one run.

    None where some of its cells were not measured then, or no server was started between two cells.
    """
    durations: dict[tuple[str, int, str], list[float]] = {}
    for record in records:
        if record["times"]["seconds"] is not None:
            key = (record["arm"]["name"], record["concurrency"], record["kind"])
            durations.setdefault(key, []).append(record["times"]["seconds"])
    starts = _start_seconds(records)
    cells = [cell for launch in plan.launches for cell in launch.cells]
    if not starts or any(_key(cell) not in durations for cell in cells):
        return None
    measuring = sum(statistics.median(durations[_key(cell)]) for cell in cells)
    return measuring + len(plan.launches) * statistics.median(starts)


def limit(plan: experiment.Plan, ready_seconds: int) -> int:
    """Return the seconds after which ``plan`` has ended or failed, whatever happens."""
    cells = sum(len(launch.cells) for launch in plan.launches)
    return len(plan.launches) * ready_seconds + cells * plan.experiment.timeout_seconds


def last_runs(results: Path, name: str, host: str) -> Iterable[list[Record]]:
    """Yield the completed records of each run of an experiment on a host, the newest run first."""
    ledger_file = results / ledger.LEDGER_NAME
    if not ledger_file.is_file():
        return
    query = "SELECT run_id, document FROM records WHERE experiment = ? AND host = ? AND status = 'completed' ORDER BY run_id DESC"
    runs: dict[str, list[Record]] = {}
    try:
        connection = sqlite3.connect(f"{ledger_file.resolve().as_uri()}?mode=ro", uri=True)
        try:
            for run_id, document in connection.execute(query, (name, host)):
                if run_id not in runs and len(runs) == MOST_RUNS:
                    break
                runs.setdefault(run_id, []).append(json.loads(document))
        finally:
            connection.close()
    except (sqlite3.Error, ValueError):  # an estimate is no reason to end a run; the report names a damaged ledger
        return
    yield from runs.values()


def _key(cell: experiment.Cell) -> tuple[str, int, str]:
    return (cell.arm, cell.concurrency, cell.kind)


def _start_seconds(records: Sequence[Record]) -> list[float]:
    """Return the seconds from the last cell of each launch to the first one of the next."""
    begins: dict[int, datetime] = {}
    ends: dict[int, datetime] = {}
    for record in records:
        if record["times"]["started"] and record["times"]["finished"]:
            begin, end = (datetime.fromisoformat(record["times"][key]) for key in ("started", "finished"))
            launch = record["launch"]
            begins[launch] = min(begins.get(launch, begin), begin)
            ends[launch] = max(ends.get(launch, end), end)
    gaps = [(begins[launch] - ends[launch - 1]).total_seconds() for launch in begins if launch - 1 in ends]
    return [gap for gap in gaps if gap >= 0]
