"""All cells of one server launch, run one after the other, each leaving its raw files. Standard library only: this runs on hosts.

A cell's directory holds what it was (definition.json, written first), what client and server said, and how it ended
(outcome.json, written last): a directory without an outcome is a cell that was interrupted. Nothing here interprets a figure;
records are made of these files (records.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.aerie import files, locks, processes, words
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients
from ansible.module_utils.aerie.measuring.experiment import PROFILE
from ansible.module_utils.aerie.serving import server_metrics

SCHEMA = "aerie-cell/1"
DEFINITION, OUTCOME = "definition.json", "outcome.json"
CLIENT, CLIENT_LOG = "client.jsonl", "client.log"
INFO_BEFORE, INFO_AFTER = "server_before.json", "server_after.json"
METRICS_BEFORE, METRICS_AFTER = "metrics_before.txt", "metrics_after.txt"
PHASES = "phases.jsonl"
SUPERSEDED = ".superseded"
COMPLETED, FAILED, TIMEOUT = "completed", "failed", "timeout"
PROFILER_SWITCH = "on"

NOT_IDENTITY = ("identity", "intent", "run_id", "launch", "host_info", "plan", "timeout_seconds")
"""Keys of a definition that say when and how it was run, not what was measured."""
NOT_INTENT = (*NOT_IDENTITY, "argv", "environment")
"""And those that are known only once the server runs; they follow from arm, release and settings."""

SECRET = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SECRET_FLAGS = re.compile(r"^--(?:[a-z-]*-)?(?:api-key|password|token|secret)(=.*)?$")
REDACTED = "<redacted>"

FLUSH_SECONDS = 30
SETTLE_SECONDS = 3
HTTP_SECONDS = 30
POLL_SECONDS = 0.05
GONE_SECONDS = 2.0
"""How long nothing listens on the port before the server counts as dead."""


@dataclass(frozen=True)
class Server:
    """The server under test: where it listens, what it writes, where its profiler is switched on."""

    host: str
    port: int
    log: Path
    profile: Path
    api_key: str | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Modes(Protocol):
    """Makes a server decode in one mode, for cells that share a launch (dynamic_control.py)."""

    def enter(self, mode: str) -> None: ...

    def leave(self) -> None: ...

    def require(self, mode: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None: ...


@dataclass(frozen=True)
class Job:
    """One launch's work: the run's directory, the server, the client, the data set, and the cells' definitions in order."""

    run: Path
    server: Server
    client: bench_clients.Client
    client_environment: Mapping[str, str]
    tokenizer: Path | None
    dataset: Path | None
    definitions: tuple[dict[str, Any], ...]
    lock: Path
    timeout_seconds: float
    cells_before: int = 0
    cells_total: int = 0
    before_cell: Callable[[], None] = field(default=lambda: None)
    modes: Modes | None = None


class CellError(Exception):
    """Why a measurement did not complete; ``status`` is what its outcome says."""

    def __init__(self, reason: str, status: str = FAILED, exit_status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.exit_status = exit_status


class ServerDiedError(CellError):
    """The server is gone: the cell and all that follow it in this launch can't be measured."""


# ---- definitions -------------------------------------------------------------------------------------------------------------------


def identity(definition: Mapping[str, Any]) -> str:
    """Return the hash of all that defines what a cell measures: equal for the same measurement in another run."""
    return files.canonical_hash({key: value for key, value in definition.items() if key not in NOT_IDENTITY})


def intent(definition: Mapping[str, Any]) -> str:
    """Return the hash of all that defines a cell before its server is started: tells whether a launch has anything left to do."""
    return files.canonical_hash({key: value for key, value in definition.items() if key not in NOT_INTENT})


def redacted_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return ``environment`` as text, without the values of variables that are named like secrets."""
    return {str(name): REDACTED if SECRET.search(str(name)) else str(value) for name, value in environment.items()}


def redacted_argv(argv: list[str]) -> list[str]:
    """Return ``argv`` without the values of flags that take secrets."""
    found: list[str] = []
    hide = False
    for word in map(str, argv):
        match = SECRET_FLAGS.match(word)
        if hide:
            found.append(REDACTED)
        elif match and match[1]:
            found.append(f"{word.partition('=')[0]}={REDACTED}")
        else:
            found.append(word)
        hide = bool(match and not match[1] and not hide)
    return found


def is_done(directory: Path, definition: Mapping[str, Any], by: str = "identity") -> bool:
    """Say whether ``directory`` holds the completed cell of ``definition``: the same measurement, not only the same name."""
    try:
        outcome, found = files.read_json(directory / OUTCOME), files.read_json(directory / DEFINITION)
    except (OSError, ValueError):
        return False
    return bool(outcome.get("status") == COMPLETED and found.get(by) == definition[by])


def pending(run: Path, definitions: tuple[dict[str, Any], ...], by: str = "identity") -> list[str]:
    """Return the ids of the cells that would run."""
    return [definition["cell"] for definition in definitions if not is_done(run / definition["cell"], definition, by)]


# ---- the launch --------------------------------------------------------------------------------------------------------------------


def run(job: Job, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Run every cell of ``job`` that is not done; return what became of each. ``tell`` gets a line, cells done and cells in all."""
    with alone(job.lock, job.run.name):
        switch = job.server.profile / PROFILER_SWITCH
        switch.unlink(missing_ok=True)  # an earlier run that was killed must not slow this one's cells
        return _run_cells(job, tell)


def record_not_started(run: Path, definitions: tuple[dict[str, Any], ...], reason: str) -> list[dict[str, Any]]:
    """Record that the cells could not be measured, since their server did not start; return what became of each."""
    results = []
    for definition in definitions:
        directory = run / definition["cell"]
        if is_done(directory, definition, by="intent"):
            results.append({"id": definition["cell"], "status": COMPLETED, "reason": None, "earlier": True})
            continue
        _set_aside(directory)
        directory.mkdir(parents=True)
        files.write_json(directory / DEFINITION, definition)
        now = _now()
        outcome = {"status": FAILED, "reason": f"the server did not start: {reason}", "exit_status": None}
        files.write_json(directory / OUTCOME, outcome | {"started": now, "finished": now, "seconds": 0.0})
        results.append({"id": definition["cell"], "status": FAILED, "reason": outcome["reason"], "earlier": False})
    return results


def _run_cells(job: Job, tell: Callable[[str, int, int], None]) -> dict[str, Any]:
    started = time.monotonic()
    ran = 0
    total = job.cells_total or len(job.definitions)
    warmed: set[tuple[int, str | None]] = set()
    died: str | None = None
    first = _Listeners.of(job.server.port)
    results: list[dict[str, Any]] = []
    for number, definition in enumerate(job.definitions, start=job.cells_before + 1):
        name, directory = definition["cell"], job.run / definition["cell"]
        label = f"cell {number} of {total}  {definition['arm']['name']} c={definition['concurrency']} r={definition['repeat']}"
        label += "  profile" if definition["kind"] == PROFILE else ""
        if is_done(directory, definition):
            results.append({"id": name, "status": COMPLETED, "reason": None, "earlier": True})
            tell(f"{label}  done before", number, total)
            continue
        job.before_cell()
        outcome, figures, died = _run_cell(job, definition, directory, warmed, first, died)
        ran += 1
        results.append({"id": name, "status": outcome["status"], "reason": outcome["reason"], "earlier": False})
        left = (time.monotonic() - started) / ran * (total - number)
        tell(f"{label}  {figures}" + (f"  left ~{_clock(left)}" if number < total else ""), number, total)
    return {
        "cells": results,
        "cells_completed": sum(result["status"] == COMPLETED for result in results),
        "cells_failed": sum(result["status"] != COMPLETED for result in results),
        "run_directory": str(job.run),
        "changed": ran > 0,
    }


def _run_cell(
    job: Job, definition: dict[str, Any], directory: Path, warmed: set[tuple[int, str | None]], first: _Listeners, died: str | None
) -> tuple[dict[str, Any], str, str | None]:
    """Run one cell; return its outcome, its figures in words, and why the server is dead if it is."""
    _set_aside(directory)
    directory.mkdir(parents=True)
    files.write_json(directory / DEFINITION, definition)
    started, clock = _now(), time.monotonic()
    outcome: dict[str, Any] = {"status": COMPLETED, "reason": None, "exit_status": 0}
    figures = ""
    try:
        if died:
            raise ServerDiedError(died)
        first.require_same(job.server)
        with _mode(job, definition):
            figures = _measure(job, definition, directory, warmed, first)
    except CellError as error:
        reason = str(error)
        if isinstance(error, ServerDiedError):
            died = died or reason
        outcome = {"status": error.status, "reason": reason, "exit_status": error.exit_status}
        figures = f"{error.status.upper()}: {reason.splitlines()[0]}"
    outcome |= {"started": started, "finished": _now(), "seconds": round(time.monotonic() - clock, 3)}
    files.write_json(directory / OUTCOME, outcome)
    return outcome, figures, died


def _measure(job: Job, definition: dict[str, Any], directory: Path, warmed: set[tuple[int, str | None]], first: _Listeners) -> str:
    shape = (definition["concurrency"], mode_of(definition))
    if shape not in warmed:
        _warm(job, definition, directory, first)
        warmed.add(shape)
    flush(job.server)
    before = _snapshot(job.server, directory, INFO_BEFORE, METRICS_BEFORE)
    load = _load(job, definition, directory / CLIENT)
    if definition["kind"] == PROFILE:
        with _profiling(job.server.profile, directory / PHASES):
            _client(job, load, directory, first)
    else:
        _client(job, load, directory, first)
    try:
        result = bench_clients.read_result(directory / CLIENT)
    except AerieError as error:
        raise CellError(f"{error}\n{tail(directory / CLIENT_LOG)}") from error
    found = bench_clients.metrics(result)
    _settle(job.server, before, found["completed"])
    after = _snapshot(job.server, directory, INFO_AFTER, METRICS_AFTER)
    if found["completed"] < definition["requests"]:
        first.require_same(job.server)
        short = f"{found['completed']} of {definition['requests']} requests completed"
        raise CellError(f"{short}\n{tail(directory / CLIENT_LOG)}", exit_status=0)
    if job.modes and shape[1]:
        job.modes.require(shape[1], before.info, after.info)
    grown = server_metrics.delta(before.metrics, after.metrics)
    accepted = server_metrics.acceptance(grown, before.info, after.info)
    speed = found["output_throughput_tok_s"]
    said = f"{speed:.0f} tok/s" if speed is not None else "no throughput told"
    return said + (f"  accept {accepted.length:.2f}" if accepted.length else "")


def mode_of(definition: Mapping[str, Any]) -> str | None:
    """Return the mode of a cell that shares its launch with cells of other modes; None for any other cell."""
    shared = definition["arm"].get("share_launch")
    return str(shared["mode"]) if shared else None


@contextlib.contextmanager
def _mode(job: Job, definition: Mapping[str, Any]) -> Iterator[None]:
    mode = mode_of(definition)
    if mode is None:
        yield
        return
    if job.modes is None:
        raise CellError("the cell shares its launch with others, and nothing here can change how the server decodes")
    job.modes.enter(mode)
    try:
        yield
    finally:
        job.modes.leave()


def _load(job: Job, definition: dict[str, Any], output: Path, requests: int | None = None, seed: int = 0) -> bench_clients.Load:
    return bench_clients.Load(
        host=job.server.host,
        port=job.server.port,
        tokenizer=job.tokenizer,
        workload=definition["workload"],
        dataset=job.dataset,
        concurrency=definition["concurrency"],
        requests=requests or definition["requests"],
        seed=seed or definition["seed"],
        output=output,
    )


# ---- the client --------------------------------------------------------------------------------------------------------------------


def _warm(job: Job, definition: dict[str, Any], directory: Path, first: _Listeners) -> None:
    """Meet the shape once, unmeasured: the first batch of a size compiles kernels and fills allocators."""
    with _scratch(directory / ".warm-up") as scratch:
        requests = min(definition["concurrency"], definition["requests"])
        load = _load(job, definition, scratch / CLIENT, requests, definition["seed"] + 1)
        try:
            _client(job, load, scratch, first)
            bench_clients.read_result(scratch / CLIENT)
        except AerieError as error:
            raise CellError(f"warm-up: {error}") from error
        except CellError as error:
            error.args = (f"warm-up: {error}",)
            raise


def _client(job: Job, load: bench_clients.Load, directory: Path, first: _Listeners) -> None:
    """Run the client to its end; kill it, and all it started, at the time-out or when the server dies under it."""
    argv = bench_clients.argv(job.client, load)
    log = directory / CLIENT_LOG
    with log.open("wb") as output:
        client = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=client_environment(job.client_environment, job.server.api_key),
            cwd=directory,
            start_new_session=True,
        )
        try:
            status = _wait(job, client)
        finally:
            end_group(client)
            _scrub(job.server.api_key, log, load.output)
    if status:
        first.require_same(job.server)
        raise CellError(f"the client ended with status {status}\n{tail(log)}", exit_status=status)


def client_environment(variables: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """Return the client's environment: ours and ``variables`` without proxies, which must not stand between it and the loopback."""
    merged = {**os.environ, **variables}
    kept = {name: value for name, value in merged.items() if not name.lower().endswith("_proxy") and not name.startswith("AERIE_")}
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | ({"OPENAI_API_KEY": api_key} if api_key else {})


def _wait(job: Job, client: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + job.timeout_seconds
    seen = looked = time.monotonic()
    while (status := client.poll()) is None:
        now = time.monotonic()
        if now > deadline:
            raise CellError(f"no result after {job.timeout_seconds:g} s: the client was ended\n{tail(job.server.log)}", TIMEOUT)
        if now - looked > GONE_SECONDS / 4:
            looked = now
            if processes.is_listening(job.server.port):
                seen = now
            elif now - seen > GONE_SECONDS:
                raise ServerDiedError(death(job.server))
        time.sleep(POLL_SECONDS)
    return status


def end_group(client: subprocess.Popen[bytes]) -> None:
    if client.returncode is None:  # once it was waited for, its number may be another group's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(client.pid, signal.SIGKILL)
    client.wait()


def _scrub(secret: str | None, *paths: Path) -> None:
    """Take the API key out of what the client wrote: it repeats the server's arguments. The only change ever made to raw files."""
    for path in paths if secret else ():
        if path.exists() and (secret or "").encode() in (data := path.read_bytes()):
            files.write_atomic(path, data.replace((secret or "").encode(), REDACTED.encode()))


# ---- the server --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Snapshot:
    info: dict[str, Any] | None
    metrics: str


@dataclass(frozen=True)
class _Listeners:
    """The processes that listened on the port when the launch began; empty where our rights don't let us see them."""

    pids: tuple[int, ...]

    @classmethod
    def of(cls, port: int) -> _Listeners:
        return cls(tuple(process.pid for process in processes.listeners(port)))

    def require_same(self, server: Server) -> None:
        """Raise when the server is gone, or another has taken its place: a service manager restarts what died."""
        deadline = time.monotonic() + GONE_SECONDS
        while not processes.is_listening(server.port):
            if time.monotonic() > deadline:
                raise ServerDiedError(death(server))
            time.sleep(POLL_SECONDS)
        now = _Listeners.of(server.port).pids
        if self.pids and not set(self.pids) & set(now):
            raise ServerDiedError(death(server, f" and was started again (process {words.listing(now)}), which would be another launch"))


def death(server: Server, more: str = "") -> str:
    return f"the server on port {server.port} died{more}; the end of {server.log}:\n{tail(server.log)}"


def request(server: Server, path: str, method: str = "GET", seconds: float = HTTP_SECONDS, body: Any = None) -> str:
    """Return the server's answer as text, without the API key; ``body`` is sent as JSON."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    data = None if body is None else json.dumps(body).encode()
    headers |= {"Content-Type": "application/json"} if body is not None else {}
    asked = urllib.request.Request(server.url + path, data=data, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=seconds) as answer:
        text: str = answer.read().decode(errors="replace")
    return text.replace(server.api_key, REDACTED) if server.api_key else text


def _get(server: Server, *paths: str) -> str | None:
    """Return the first answer among ``paths``; None when the server has none of them."""
    for path in paths:
        try:
            return request(server, path)
        except urllib.error.HTTPError as error:
            if error.code not in (404, 405):
                raise CellError(f"{path} answered {error.code}: {error.reason}") from error
        except OSError as error:
            if not processes.is_listening(server.port):
                raise ServerDiedError(death(server)) from error
            raise CellError(f"{path} did not answer: {error}") from error
    return None


def _snapshot(server: Server, directory: Path, info_name: str, metrics_name: str) -> _Snapshot:
    """Read what the server has counted, and keep it; a server without ``--enable-metrics`` has no /metrics."""
    info = _get(server, "/server_info", "/get_server_info")
    metrics = _get(server, "/metrics") or ""
    files.write_atomic(directory / metrics_name, metrics)
    files.write_atomic(directory / info_name, info or "{}\n")
    try:
        found = json.loads(info or "{}")
    except ValueError:
        found = None
    return _Snapshot(found if isinstance(found, dict) else None, metrics)


def flush(server: Server) -> None:
    """Empty the prefix cache, so that no arm finds what another left; refused while a request is still ending, so ask again."""
    deadline = time.monotonic() + FLUSH_SECONDS
    while True:
        try:
            request(server, "/flush_cache", "POST")
            return
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read().decode(errors='replace').strip()[:200]}"
        except OSError as error:
            if not processes.is_listening(server.port):
                raise ServerDiedError(death(server)) from error
            reason = str(error)
        if time.monotonic() > deadline:
            raise CellError(f"/flush_cache did not empty the prefix cache in {FLUSH_SECONDS} s ({reason}): has this server other traffic?")
        time.sleep(0.2)


def _settle(server: Server, before: _Snapshot, completed: int) -> None:
    """Wait until the server has counted every request: it does so just after the client has its last token."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while before.metrics and time.monotonic() < deadline:
        grown = server_metrics.delta(before.metrics, _get(server, "/metrics") or "")
        if grown.get(server_metrics.REQUESTS, completed) >= completed:
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _profiling(profile: Path, target: Path) -> Iterator[None]:
    """Switch the phase profiler on for the block, and keep the lines that it wrote in that time."""
    if not profile.is_dir():
        raise CellError(f"{profile} does not exist: the server has no AERIE_PROFILE_DIR; is patch set phase_profiler in the release?")
    sizes = {path.name: path.stat().st_size for path in profile.glob("phases-*.jsonl")}
    switch = profile / PROFILER_SWITCH
    switch.write_text("1\n")  # every cycle: a profile cell's speed is not reported
    try:
        yield
    finally:
        switch.unlink(missing_ok=True)
        kept = b"".join(new_lines(path, sizes.get(path.name, 0)) for path in sorted(profile.glob("phases-*.jsonl")))
        files.write_atomic(target, kept)
    if not kept:
        cause = "the arm has no speculation, or patch set phase_profiler is not in the release"
        raise CellError(f"the profiler wrote nothing\n    below {profile}: {cause}", exit_status=0)


def new_lines(path: Path, offset: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read()
    return data[: data.rfind(b"\n") + 1]


# ---- small things ------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(path: Path, run_id: str) -> Iterator[None]:
    """Hold ``path``: two loads on one server would measure each other."""
    try:
        holder = path.read_text(errors="replace").strip()[:200]
    except OSError:
        holder = ""
    with locks.held(path, 0, f"{holder or 'another benchmark'} is still measuring on this instance") as lock:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"run {run_id}\n".encode(), 0)
        yield


def _set_aside(directory: Path) -> None:
    """Move an earlier, failed or different attempt at a cell out of the way: raw files are never overwritten."""
    if directory.exists():
        shelf = directory.parent / SUPERSEDED
        shelf.mkdir(exist_ok=True)
        number = 1 + sum(1 for _ in shelf.glob(f"{directory.name}.*"))
        directory.rename(shelf / f"{directory.name}.{number}")


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def tail(path: Path, lines: int = 15) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 20000))
            return words.tail(stream.read().decode(errors="replace"), lines)
    except OSError as error:
        return f"    ({path}: {error.strerror})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:02d}:{rest:02d}"
