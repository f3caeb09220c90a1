"""The ledger: every record below the results directory as one SQLite file, for questions in SQL.

Nothing lives only here. The content is a pure function of the record.json files, so a ledger that is lost, damaged or of an
older schema is made again from them, with the same content. Runs on the controller; standard library only.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import errors, files, untrusted, words
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.untrusted import Maybe

RECORD_FAMILY = "aerie-record/"
RECORD_SCHEMAS = ("aerie-record/1",)
LEDGER_NAME = "ledger.sqlite"
APPLICATION_ID = 0x41455249  # 'AERI': tells our file from any other SQLite file
SCHEMA_VERSION = 1
"""Raise it with every change of SCHEMA: a ledger of an older version is then made again from the records."""

# WITHOUT ROWID: rows lie in the order of their key, so a ledger's dump doesn't depend on the order in which records came.
SCHEMA = """
CREATE TABLE records (
    path TEXT NOT NULL PRIMARY KEY,
    sha256 TEXT NOT NULL,
    record_id TEXT NOT NULL UNIQUE,
    record_schema TEXT NOT NULL,
    experiment TEXT NOT NULL,
    run_id TEXT NOT NULL,
    host TEXT NOT NULL,
    cell TEXT NOT NULL,
    arm TEXT NOT NULL,
    concurrency INTEGER,
    repeat INTEGER,
    launch INTEGER,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    reason TEXT,
    started TEXT,
    release TEXT,
    document TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE metrics (
    path TEXT NOT NULL REFERENCES records (path) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (path, name)
) WITHOUT ROWID;
CREATE INDEX records_by_run ON records (experiment, run_id, host);
CREATE INDEX metrics_by_name ON metrics (name);
CREATE VIEW runs AS
    SELECT experiment, run_id, MIN(started) AS started, COUNT(DISTINCT host) AS hosts, COUNT(*) AS records,
           SUM(status <> 'completed') AS failed
    FROM records GROUP BY experiment, run_id;
"""
FIGURES = (
    "output_throughput_tok_s",
    "input_throughput_tok_s",
    "total_throughput_tok_s",
    "request_throughput_req_s",
    "accept_length",
    "verify_steps",
    "accepted_tokens",
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
RECORD: untrusted.Shape = {
    "record_id": untrusted.WORD,
    "experiment": untrusted.WORD,
    "run_id": untrusted.WORD,
    "host": untrusted.WORD,
    "cell": untrusted.WORD,
    "kind": untrusted.WORD,
    "status": untrusted.WORD,
    "reason?": Maybe(untrusted.TEXT),
    "concurrency?": Maybe(untrusted.COUNT),
    "repeat?": Maybe(untrusted.WHOLE),
    "launch?": Maybe(untrusted.WHOLE),
    "arm": {
        "name": untrusted.WORD,
        "description?": Maybe(untrusted.TEXT),
        "speculation?": Maybe(untrusted.MAPPING),
        "environment?": Maybe(untrusted.MAPPING),
        "share_launch?": Maybe(untrusted.MAPPING),
    },
    "times?": Maybe({"started?": Maybe(untrusted.TEXT), "finished?": Maybe(untrusted.TEXT)}),
    "release?": Maybe(
        {
            "id?": Maybe(untrusted.TEXT),
            "sglang_version?": Maybe(untrusted.TEXT),
            "patch_sets?": Maybe(untrusted.ListOf({"name": untrusted.WORD, "sha256?": Maybe(untrusted.TEXT)})),
        }
    ),
    "workload?": Maybe(untrusted.MAPPING),
    "models?": Maybe(untrusted.MapOf(Maybe(untrusted.MAPPING))),
    "client?": Maybe(untrusted.MAPPING),
    "argv?": Maybe(untrusted.LIST),
    "environment?": Maybe(untrusted.MAPPING),
    "metrics?": Maybe(
        {f"{name}?": Maybe(untrusted.NUMBER) for name in FIGURES}
        | {f"{name}?": Maybe(untrusted.MapOf(Maybe(untrusted.NUMBER))) for name in LATENCIES}
    ),
    "phases?": Maybe(
        {
            "phases?": Maybe(untrusted.MapOf(untrusted.MapOf(Maybe(untrusted.NUMBER)))),
            "phases_ms?": Maybe(untrusted.MapOf(untrusted.NUMBER)),
            "draft_steps_ms?": Maybe(untrusted.ListOf(untrusted.NUMBER)),
            "cycles?": Maybe(untrusted.COUNT),
        }
    ),
}
"""What reports and the ledger read of a record."""
COLUMNS = (
    "path", "sha256", "record_id", "record_schema", "experiment", "run_id", "host", "cell", "arm", "concurrency", "repeat", "launch",
    "kind", "status", "reason", "started", "release", "document",
)  # fmt: skip
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Problem:
    """A record.json that the ledger can't take, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Content:
    """What the ledger of a results directory must hold: rows and metrics, both by path."""

    records: Mapping[str, Row] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Change:
    """The way from the ledger as it is to the ledger as the records want it; each list holds paths below the results directory."""

    added: tuple[str, ...]
    updated: tuple[str, ...]
    removed: tuple[str, ...]
    remake: str | None = None
    """Why the file itself must be made anew (missing, damaged, older), or None."""

    @property
    def any(self) -> bool:
        return bool(self.added or self.updated or self.removed or self.remake)


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (dotted name, number) for every number in nested mappings; lists and words stay in the document."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, int | float):
        yield prefix, float(value)


def row(path: str, data: bytes) -> tuple[Row, dict[str, float]]:
    """Return the ledger's row and metrics of one record.json; raise ValueError saying why it isn't one of ours."""
    record = untrusted.parse(data)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    schema = record.get("schema")
    if not isinstance(schema, str) or schema not in RECORD_SCHEMAS:
        newer = isinstance(schema, str) and schema.startswith(RECORD_FAMILY)
        known = " or ".join(RECORD_SCHEMAS)
        raise ValueError(
            f"schema {untrusted.shown(schema)} is not {known}"
            + (": update Aerie, or collect the cell again" if newer else ": not one of Aerie's records")
        )
    untrusted.require(record, RECORD)
    release, times = record.get("release") or {}, record.get("times") or {}
    _require_place(path, record)
    values = (
        path,
        files.sha256_bytes(data),
        record["record_id"],
        schema,
        record["experiment"],
        record["run_id"],
        record["host"],
        record["cell"],
        record["arm"]["name"],
        record.get("concurrency"),
        record.get("repeat"),
        record.get("launch"),
        record["kind"],
        record["status"],
        record.get("reason") or None,
        times.get("started"),
        release.get("id"),
        json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False),
    )
    return values, dict(flatten(record.get("metrics") or {}))


def _require_place(path: str, record: Mapping[str, Any]) -> None:
    """Refuse a record that says it is of another host, run or experiment than the directories that it was collected to.

    A record that was copied elsewhere by hand may lie anywhere, with fewer directories above it.
    """
    parts = path.split("/")[-5:-1]
    if len(parts) == 4 and parts != (said := [record[key] for key in ("experiment", "run_id", "host", "cell")]):
        raise ValueError(f"it says that it is of {words.cut('/'.join(said), 200)}, and lies elsewhere: collect it again")


def scan(results: Path) -> Content:
    """Read every record.json below ``results``, in order of path; what isn't a record is a problem, not a failure."""
    records: dict[str, Row] = {}
    metrics: dict[str, dict[str, float]] = {}
    problems: list[Problem] = []
    owners: dict[str, str] = {}
    for file in sorted(results.rglob("record.json")):
        path = file.relative_to(results).as_posix()
        found = read_record(results, file)
        if isinstance(found, Problem):
            problems.append(found)
            continue
        values, figures = found
        first = owners.setdefault(values[2], path)
        if first != path:
            problems.append(Problem(path, f"the same record_id as {first}: a copy? The first is kept; remove one"))
            continue
        records[path], metrics[path] = values, figures
    return Content(records, metrics, tuple(problems))


def read_record(results: Path, file: Path) -> tuple[Row, dict[str, float]] | Problem:
    """Return the ledger's row and metrics of one file below ``results``, or why it is left out."""
    path = file.relative_to(results).as_posix()
    try:
        return row(path, untrusted.read_bytes(file, untrusted.RECORD.size))
    except OSError as error:
        return Problem(path, f"can't be read: {error.strerror}")
    except ValueError as error:
        return Problem(path, str(error).removeprefix(f"{file}: "))


@contextmanager
def _open(path: Path, query_only: bool = True) -> Iterator[sqlite3.Connection]:
    """Open an existing ledger; never makes one. Not in mode ro, which would leave the WAL's side files behind."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, timeout=30)) as connection:
        connection.execute(f"PRAGMA query_only = {int(query_only)}")
        connection.execute("PRAGMA foreign_keys = ON")
        yield connection


def _expected_objects() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()


def read(ledger: Path) -> tuple[Content, str | None]:
    """Return what the file holds, and why it must be made anew (None: it is whole and of this schema).

    Refuses a ledger that a newer Aerie made and an SQLite file that isn't a ledger: neither is ours to replace.
    """
    if not ledger.exists():
        return Content(), "there is none yet"
    try:
        with _open(ledger) as connection:
            application, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if application != APPLICATION_ID:
                raise AerieError(f"{ledger} is an SQLite file, but not Aerie's ledger: move it away, or name another ledger")
            if version > SCHEMA_VERSION:
                raise AerieError(f"{ledger} has schema {version}, made by a newer Aerie (this one knows {SCHEMA_VERSION}): update Aerie")
            if version < SCHEMA_VERSION:
                return Content(), f"it has schema {version}, this Aerie writes {SCHEMA_VERSION}"
            if connection.execute("PRAGMA quick_check").fetchone()[0] != "ok":
                return Content(), "it is damaged"
            if (
                connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
                != _expected_objects()
            ):
                return Content(), "its tables aren't those of its schema"
            records = {values[0]: values for values in connection.execute(f"SELECT {', '.join(COLUMNS)} FROM records")}
            metrics: dict[str, dict[str, float]] = {path: {} for path in records}
            for path, name, value in connection.execute("SELECT path, name, value FROM metrics"):
                metrics.setdefault(path, {})[name] = value
            return Content(records, metrics), None
    except sqlite3.DatabaseError as error:
        return Content(), f"it is damaged ({error})"


def plan(ledger: Path, wanted: Content) -> Change:
    """Return what must change for ``ledger`` to hold ``wanted``; nothing is written."""
    present, remake = read(ledger)

    def differs(path: str) -> bool:
        return present.records[path] != wanted.records[path] or present.metrics[path] != wanted.metrics[path]

    both = present.records.keys() & wanted.records.keys()
    return Change(
        added=tuple(sorted(wanted.records.keys() - present.records.keys())),
        updated=tuple(sorted(path for path in both if differs(path))),
        removed=tuple(sorted(present.records.keys() - wanted.records.keys())),
        remake=remake,
    )


def _insert(connection: sqlite3.Connection, wanted: Content, paths: tuple[str, ...]) -> None:
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(f"INSERT INTO records VALUES ({marks})", (wanted.records[path] for path in paths))
    connection.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?)", ((path, name, value) for path in paths for name, value in wanted.metrics[path].items())
    )


def _make(ledger: Path, wanted: Content) -> None:
    """Write a new ledger beside the old one and put it in its place."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{ledger.name}.", dir=ledger.parent) as directory:
        fresh = Path(directory) / ledger.name
        with closing(sqlite3.connect(fresh)) as connection:
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            with connection:
                _insert(connection, wanted, tuple(wanted.records))
            connection.execute("PRAGMA journal_mode = WAL")
        for suffix in ("-wal", "-shm"):
            ledger.with_name(ledger.name + suffix).unlink(missing_ok=True)
        with fresh.open("rb") as stream:
            os.fsync(stream.fileno())
        fresh.replace(ledger)
    files.fsync_dir(ledger.parent)


def apply(ledger: Path, wanted: Content, change: Change) -> None:
    """Bring ``ledger`` to ``wanted``: in one transaction, or as a new file where the old one can't be used."""
    if change.remake:
        _make(ledger, wanted)
    elif change.any:
        with _open(ledger, query_only=False) as connection, connection:
            gone = [(path,) for path in (*change.removed, *change.updated)]
            connection.executemany("DELETE FROM metrics WHERE path = ?", gone)
            connection.executemany("DELETE FROM records WHERE path = ?", gone)
            _insert(connection, wanted, (*change.added, *change.updated))


def rebuild(ledger: Path, wanted: Content) -> None:
    """Make ``ledger`` anew from ``wanted``, whatever is there; refuses what :func:`read` refuses."""
    read(ledger)
    _make(ledger, wanted)


def dump(ledger: Path) -> str:
    """Return the ledger's whole content as SQL text: equal content, equal text."""
    with _open(ledger) as connection:
        return "\n".join(connection.iterdump())


def runs(content: Content, experiments: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return (experiment, run_id) of every run, the newest first: by start of its first cell, then by id."""
    started: dict[tuple[str, str], str] = {}
    for values in content.records.values():
        found = dict(zip(COLUMNS, values, strict=True))
        if not experiments or found["experiment"] in experiments:
            run = (found["experiment"], found["run_id"])
            started[run] = min(started.get(run) or "~", found["started"] or "~")
    return sorted(started, key=lambda run: (started[run] if started[run] != "~" else "", run[1], run[0]), reverse=True)


def choose(content: Content, run_ids: Sequence[str] = (), experiments: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the records of the named runs, or of each experiment's newest run where none is named; refuse names that aren't there."""
    known_runs, known_experiments = {run for _, run in runs(content)}, {experiment for experiment, _ in runs(content)}
    errors.raise_all(
        [f"run {run!r} has no record{words.near(run, known_runs)}" for run in run_ids if run not in known_runs]
        + [
            f"experiment {name!r} has no record{words.near(name, known_experiments)}"
            for name in experiments
            if name not in known_experiments
        ],
        "the results can't be reported",
    )
    newest: dict[str, str] = {}
    for experiment, run in runs(content, experiments):
        newest.setdefault(experiment, run)
    wanted = {(experiment, run) for experiment, run in runs(content, experiments) if run in run_ids} if run_ids else set(newest.items())
    documents = [json.loads(values[-1]) for _, values in sorted(content.records.items())]
    return [document for document in documents if (document["experiment"], document["run_id"]) in wanted]
