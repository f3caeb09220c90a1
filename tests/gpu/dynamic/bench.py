#!/usr/bin/env python3
"""Compares three resident servers, cell by cell: baseline, EAGLE-3, dynamic. bench.sh beside it starts them and calls this.

    bench.py --root ROOT --out OUT --backend NAME [--budget SECONDS] …

Every cell and every load that changes leaves one line in OUT/records.jsonl as soon as it is over; a call that is cut loses one at most,
and the next call does what is left. Within a pass, levels come in random order, and at each level the arms do; only one server has a load
at a time. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import analysis
import cores  # noqa: F401
import host_work
import load
import placement
from ansible.module_utils.aerie.measuring import bench_runner, dynamic_control
from ansible.module_utils.aerie.measuring.bench_runner import CellError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.processes import Process
from ansible.module_utils.aerie.profiling import decode_load
from ansible.module_utils.aerie.serving import server_processes

RECORDS = "records.jsonl"
PLAN, CELL, CHANGE = "plan", "cell", "load"
OK, FAILED = "ok", "failed"
FORCED = ("plain", "speculative")
"""Arms that are the dynamic server, told to keep one mode."""
FULL_SECONDS = 45.0
LATE_SECONDS = 0.02
MOST_FAILURES = 4
BETWEEN_SECONDS = 0.4
PINS = ("SGLANG_SIMULATE_ACC_LEN",)


@dataclass(frozen=True)
class Settings:
    """What is measured; a run that goes on must have the same."""

    backend: str
    levels: tuple[int, ...]
    settle_seconds: float
    window_seconds: float
    input_len: int
    output_len: int
    changing_output_len: int
    ramp_seconds: float
    step_seconds: float
    steps: tuple[int, ...]
    seed: int
    per_client: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @property
    def most(self) -> int:
        return max(self.levels)


@dataclass(frozen=True)
class Instance:
    """One resident server."""

    name: str
    host: str
    port: int
    log: Path
    started: float
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, root: Path, name: str) -> Instance:
        home = root / "instances" / name
        facts = json.loads((home / "instance.json").read_text())
        if facts.get("state") != "ready":
            sys.exit(f"instance {name} is {facts.get('state')}, not ready: {facts.get('reason')}")
        return cls(name, str(facts["host"]), int(facts["port"]), home / "server.log", float(facts["started"]), facts)

    @property
    def server(self) -> bench_runner.Server:
        return bench_runner.Server(self.host, self.port, self.log, self.log.parent / "profile")

    @functools.cached_property
    def processes(self) -> list[Process]:
        return server_processes.of_instance(HostPaths(self.log.parent.parent.parent), self.name)

    @property
    def is_dynamic(self) -> bool:
        return self.name == analysis.DYNAMIC


@dataclass(frozen=True)
class Item:
    """One thing to measure: an arm at a level, or under a load that changes."""

    kind: str
    number: int
    what: str
    arm: str

    @property
    def level(self) -> int:
        return int(self.what)

    @property
    def identity(self) -> tuple[str, int, str, str]:
        return (self.kind, self.number, self.what, self.arm)


def items(settings: Settings, passes: int, changing_passes: int, extra: Sequence[str], extra_from: int = 0) -> list[Item]:
    """Return everything in its order, which a seed draws pass by pass: more passes leave the first ones as they were.

    ``extra`` arms are met at levels from ``extra_from`` on.
    """
    found: list[Item] = []
    for number in range(passes):
        chance = random.Random(f"{settings.seed}/{CELL}/{number}")
        for level in chance.sample(settings.levels, len(settings.levels)):
            arms = (*analysis.FIXED, analysis.DYNAMIC, *(extra if level >= extra_from else ()))
            found += [Item(CELL, number, str(level), arm) for arm in chance.sample(arms, len(arms))]
    for number in range(changing_passes):
        chance = random.Random(f"{settings.seed}/{CHANGE}/{number}")
        for shape in chance.sample(list(shapes(settings)), len(shapes(settings))):
            arms = (*analysis.FIXED, analysis.DYNAMIC)
            found += [Item(CHANGE, number, shape, arm) for arm in chance.sample(arms, len(arms))]
    return found


@dataclass(frozen=True)
class Shape:
    seconds: float
    wanted: Callable[[float], int]


def shapes(settings: Settings) -> dict[str, Shape]:
    """Return the loads that change: up and down again by equal times for each doubling, and steps between levels."""
    half = settings.ramp_seconds / 2

    def ramp(second: float) -> int:
        part = max(0.0, 1 - abs(second - half) / half)
        return max(1, round(settings.most**part))

    def steps(second: float) -> int:
        return settings.steps[min(int(second / settings.step_seconds), len(settings.steps) - 1)]

    found = {"ramp": Shape(settings.ramp_seconds, ramp), "steps": Shape(settings.step_seconds * len(settings.steps), steps)}
    return {name: shape for name, shape in found.items() if shape.seconds > 0}


def seconds_of(item: Item, settings: Settings) -> float:
    """Return about how long an item takes; an H200 prefills 128 half-answered requests in 1.5 s."""
    if item.kind == CHANGE:
        return shapes(settings)[item.what].seconds + BETWEEN_SECONDS + 0.5
    if settings.per_client:
        return 4.0 + item.level / 35
    return settings.settle_seconds + settings.window_seconds + BETWEEN_SECONDS + 0.3 + item.level / 80


# ---- records -----------------------------------------------------------------------------------------------------------------------


class Records:
    """The lines of a run: read once, and added to one by one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: list[dict[str, Any]] = []
        if path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # a call was cut while it wrote
                path.write_text(whole)
            self.all = [json.loads(line) for line in whole.splitlines()]

    def add(self, record: Mapping[str, Any]) -> None:
        self.all.append(dict(record))
        with self._path.open("a") as stream:
            stream.write(json.dumps(record, separators=(",", ":")) + "\n")

    def done(self) -> set[tuple[Any, ...]]:
        return {
            (one["kind"], one["pass"], str(one.get("level", one.get("shape"))), one["arm"])
            for one in self.all
            if one["kind"] in (CELL, CHANGE) and one["status"] == OK
        }

    def require_same(self, settings: Settings) -> bool:
        """Say whether the run goes on; end the program where it was another one."""
        plan = next((one for one in self.all if one["kind"] == PLAN), None)
        if plan is None:
            return False
        before, now = plan["settings"], json.loads(json.dumps(settings.as_dict()))
        if before != now:
            differ = {key: (before.get(key), now[key]) for key in now if before.get(key) != now[key]}
            sys.exit(f"{self._path} is of another run, with other {differ}: name another directory")
        return True


# ---- measuring ---------------------------------------------------------------------------------------------------------------------


def speed_between(lines: Sequence[Mapping[str, Any]], start: float, end: float) -> dict[str, Any]:
    """Return what the server's decode lines say of the time between two moments, prefills included: each line tells its own stretch."""
    decodes = [line for line in lines if line["kind"] == "decode"]
    stretches = [
        (before["t"], line)
        for before, line in itertools.pairwise(decodes)
        if before["t"] >= start and line["t"] <= end and line["t"] > before["t"]
    ]
    spent = sum(line["t"] - since for since, line in stretches)
    if spent <= 0:
        return {"server_tok_s": None, "server_tokens": 0.0, "running": None, "accept_length": None, "stretches": 0}
    tokens = sum(line["tok_s"] * (line["t"] - since) for since, line in stretches)
    accepted = [line["accept"] for _, line in stretches if line["accept"] is not None]
    return {
        "server_tok_s": tokens / spent,
        "server_tokens": tokens,
        "running": sum(line["running"] * (line["t"] - since) for since, line in stretches) / spent,
        "accept_length": sum(accepted) / len(accepted) if accepted else None,
        "stretches": len(stretches),
    }


def is_full(lines: Sequence[Mapping[str, Any]], level: int) -> bool:
    """Say whether the load is there by the last two decode lines; of many requests, some are always between two prompts."""
    last = [line["running"] for line in lines if line["kind"] == "decode"][-2:]
    return len(last) == 2 and min(last) >= level - level // 32


def filled(run: load.Load, follower: decode_load.Follower, level: int) -> bool:
    """Wait until the load is there; return False where it broke, and raise TimeoutError where it does not come."""
    deadline = time.monotonic() + FULL_SECONDS
    while not is_full(follower.lines, level):
        if run.broken.is_set():
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(decode_load.not_full(follower, level, FULL_SECONDS))
        time.sleep(0.01)
    return True


class Bench:
    def __init__(self, settings: Settings, instances: Mapping[str, Instance], records: Records, where: placement.Placement) -> None:
        self._settings = settings
        self._instances = instances
        self._records = records
        self._forced: str | None = None
        self._known = False
        self._placement = where
        self.launch = f"{max(one.started for one in instances.values()):.0f}"

    def instance(self, arm: str) -> Instance:
        return self._instances[analysis.DYNAMIC if arm in FORCED else arm]

    def measure(self, item: Item) -> dict[str, Any]:
        """Measure one item; what goes wrong is what the record says."""
        record: dict[str, Any] = {"kind": item.kind, "launch": self.launch, "pass": item.number, "arm": item.arm, "at": time.time()}
        record |= {"level": item.level} if item.kind == CELL else {"shape": item.what}
        try:
            self._force(item.arm)
            before = self._state(item.arm)
            with self._placement.kept() as placed:
                record |= self._cell(item) if item.kind == CELL else self._changing(item)
            record |= {"placement": placed}
            record |= self._modes(before, self._state(item.arm))
            if not record["server_tok_s"]:
                raise OSError("the server's log told no decode speed within the window: is log-level above info?")
            record |= {"status": OK, "reason": None}
        except (CellError, OSError, ValueError, KeyError) as error:
            instance = self.instance(item.arm)
            record |= {"status": FAILED, "reason": f"{error}\n{bench_runner.tail(instance.log)}"[:4000]}
        return record

    def warm(self, arm: str, level: int) -> None:
        """Meet a level once, unmeasured."""
        self._force(arm)
        self._steady(arm, level, 0.2, 0.6)

    def leave(self) -> None:
        """Leave the dynamic server to its own policy."""
        if self._forced:
            self._force(analysis.DYNAMIC)

    def _force(self, arm: str) -> None:
        wanted = arm if arm in FORCED else None
        if self.instance(arm).is_dynamic and (wanted != self._forced or (wanted is None and self._known)):
            dynamic_control.change(self.instance(arm).server, {"force": wanted})
            self._forced, self._known = wanted, False

    def _state(self, arm: str) -> dict[str, Any]:
        if not self.instance(arm).is_dynamic:
            return {}
        return dynamic_control.state_of(dynamic_control.info(self.instance(arm).server)) or {}

    @staticmethod
    def _modes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        if not after:
            return {}
        steps = {kind: after["steps"][kind] - before["steps"][kind] for kind in after["steps"]}
        return {"steps": steps, "switches": after["switches"] - before["switches"], "policy": dict(after)}

    def _cell(self, item: Item) -> dict[str, Any]:
        settings = self._settings
        if settings.per_client:
            return self._whole(item)
        run, lines, window, worked = self._steady(item.arm, item.level, settings.settle_seconds, settings.window_seconds, item.number)
        start, end = window
        return {
            "window": window,
            "host": worked,
            **speed_between(lines, start + LATE_SECONDS, end),
            "client_tok_s": run.tokens_within(start, end) / (end - start),
            "prefills": sum(line["kind"] == "prefill" and start <= line["t"] <= end for line in lines),
            **self._raw(run, lines),
        }

    def _whole(self, item: Item) -> dict[str, Any]:
        """Have each client send so many requests, all at once: filling and draining count for the clients.

        The server's figure is the median of its decode lines while the load is there.
        """
        settings, instance = self._settings, self.instance(item.arm)
        workload = load.Workload(settings.input_len, settings.output_len)
        seed = hash((settings.seed, item.number, item.level)) & 0x7FFFFFFF
        run = load.Load(instance.host, instance.port, workload, lambda _: item.level, item.level, seed, settings.per_client)
        with decode_load.following(instance.log) as follower:
            run.run(lambda: None)
            time.sleep(0.2)  # the last lines
        lines = list(follower.lines)
        full = [line for line in lines if line["kind"] == "decode" and line["running"] >= item.level - item.level // 8]
        accepted = [line["accept"] for line in full if line["accept"] is not None]
        ended = max(request.done or run.started for request in run.requests)
        return {
            "window": (run.started, ended),
            "server_tok_s": statistics.median(line["tok_s"] for line in full[1:] or full) if full else None,
            "running": item.level,
            "accept_length": statistics.fmean(accepted) if accepted else None,
            "client_tok_s": sum(request.tokens for request in run.requests) / (ended - run.started),
            **self._raw(run, lines),
        }

    def _steady(
        self, arm: str, level: int, settle: float, seconds: float, number: int = -1
    ) -> tuple[load.Load, list[dict[str, Any]], tuple[float, float], dict[str, Any]]:
        settings, instance = self._settings, self.instance(arm)
        # All arms of a pass are asked the same.
        seed = hash((settings.seed, number, level)) & 0x7FFFFFFF
        workload = load.Workload(settings.input_len, settings.output_len)
        run = load.Load(instance.host, instance.port, workload, lambda _second: level, level, seed)
        window, worked = (0.0, 0.0), {}
        with decode_load.following(instance.log) as follower:

            def watch() -> None:
                nonlocal window, worked
                if not filled(run, follower, level):
                    return
                _wait(run, settle)
                processes = instance.processes
                before, start = host_work.snapshot(processes), time.time()
                _wait(run, seconds)
                window = (start, time.time())
                worked = host_work.between(before, host_work.snapshot(processes))

            run.run(watch)
        return run, list(follower.lines), window, worked

    def _changing(self, item: Item) -> dict[str, Any]:
        settings, instance = self._settings, self.instance(item.arm)
        shape = shapes(settings)[item.what]
        workload = load.Workload(settings.input_len, settings.changing_output_len)
        seed = hash((settings.seed, item.number, item.what == "ramp")) & 0x7FFFFFFF
        run = load.Load(instance.host, instance.port, workload, shape.wanted, settings.most, seed)
        with decode_load.following(instance.log) as follower:
            run.run(lambda: _wait(run, shape.seconds))
        seconds = run.ended - run.started
        said = speed_between(follower.lines, run.started, run.ended + BETWEEN_SECONDS)
        return {
            **said,
            "window": (run.started, run.ended),
            "server_tok_s": said["server_tokens"] / seconds if said["stretches"] else None,
            "client_tok_s": sum(request.tokens for request in run.requests) / seconds,
            **self._raw(run, follower.lines),
        }

    @staticmethod
    def _raw(run: load.Load, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what everything else can be computed from again: times from the load's start, so that they are short."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - run.started, 4)

        return {
            "started": run.started,
            "ended": run.ended,
            "lines": [[since(one["t"]), one.get("running"), one.get("tok_s"), one.get("accept")] for one in lines],
            "requests": [[one.client, since(one.sent), since(one.done), one.asked, one.tokens] for one in run.requests],
        }


def _wait(run: load.Load, seconds: float) -> None:
    run.broken.wait(seconds)


# ---- the run -----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gpu_watched(path: Path, gpus: Sequence[int]) -> Iterator[None]:
    """Have nvidia-smi write clocks, power and temperature of the servers' GPUs each second, where there is one."""
    program = shutil.which("nvidia-smi")
    if not program or not gpus:
        yield
        return
    asked = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,memory.used,clocks_event_reasons.active"
    argv = [program, f"--id={','.join(map(str, gpus))}", f"--query-gpu={asked}", "--format=csv,noheader", "-lms", "1000"]
    with path.open("a") as output:
        watcher = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            yield
        finally:
            watcher.terminate()
            watcher.wait()


def facts(out: Path, instances: Mapping[str, Instance]) -> None:
    """Keep what was served: argv, environment, release and patch sets of each arm."""
    for one in instances.values():
        (out / f"instance-{one.name}.json").write_text(json.dumps(one.facts, indent=1, sort_keys=True) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="aerie_root of the servers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing new is begun")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--changing-passes", type=int, default=1)
    parser.add_argument("--levels", type=_numbers, default=(1, 8, 32, 64, 128))
    parser.add_argument("--settle", type=float, default=0.7)
    parser.add_argument("--window", type=float, default=4.0)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--changing-output-len", type=int, default=256)
    parser.add_argument("--ramp", type=float, default=30.0, help="seconds of the ramp, 0 for none")
    parser.add_argument("--step", type=float, default=10.0, help="seconds of each step, 0 for none")
    parser.add_argument("--steps", type=_numbers, default=(8, 128, 1, 64, 32))
    parser.add_argument("--seed", type=int, default=1)
    whole = "cells of so many requests a client, filling and draining included, instead of windows of a steady load"
    parser.add_argument("--per-client", type=int, metavar="REQUESTS", help=whole)
    extra = "further arms: the dynamic server in one mode (plain, speculative), or other instances, such as upstream"
    parser.add_argument("--extra", nargs="*", default=[], metavar="ARM", help=extra)
    parser.add_argument("--extra-from", type=int, default=0, metavar="CLIENTS", help="further arms are measured from so many clients on")
    parser.add_argument("--warm-up", type=_numbers, default=None, metavar="LEVELS", help="meet these levels first instead of all")
    parser.add_argument("--no-warm-up", action="store_true", help="the servers met all levels before")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    begun = time.monotonic()
    asked = arguments()
    settings = Settings(
        backend=asked.backend,
        levels=asked.levels,
        settle_seconds=asked.settle,
        window_seconds=asked.window,
        input_len=asked.input_len,
        output_len=asked.output_len,
        changing_output_len=asked.changing_output_len,
        ramp_seconds=asked.ramp,
        step_seconds=asked.step,
        steps=asked.steps,
        seed=asked.seed,
        per_client=asked.per_client,
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    servers = (*analysis.FIXED, analysis.DYNAMIC, *(name for name in asked.extra if name not in FORCED))
    instances = {name: Instance.of(asked.root, name) for name in servers}
    records = Records(asked.out / RECORDS)
    if not records.require_same(settings):
        environment = instances[analysis.EAGLE3].facts.get("environment") or {}
        pinned = next((environment[name] for name in PINS if environment.get(name)), None)
        records.add({"kind": PLAN, "at": time.time(), "backend": settings.backend, "pinned": pinned, "settings": settings.as_dict()})
    facts(asked.out, instances)
    where = placement.Placement([one for instance in instances.values() for one in instance.processes])
    bench = Bench(settings, instances, records, where)
    done = records.done()
    wanted = [
        item for item in items(settings, asked.passes, asked.changing_passes, asked.extra, asked.extra_from) if item.identity not in done
    ]
    print(f"{len(wanted)} to measure, about {sum(seconds_of(item, settings) for item in wanted):.0f} s", flush=True)

    def left() -> float:
        return float(asked.budget) - (time.monotonic() - begun)

    with gpu_watched(asked.out / "gpu.csv", instances[analysis.DYNAMIC].facts.get("gpus") or []):
        if wanted and not asked.no_warm_up:
            warm_up(bench, asked.warm_up or settings.levels, (*analysis.FIXED, analysis.DYNAMIC, *asked.extra), records)
        try:
            ended = measure_all(bench, wanted, settings, records, left)
        finally:
            with contextlib.suppress(CellError, OSError):
                bench.leave()
            where.leave()
    said = analysis.analyse(records.all)
    (asked.out / "analysis.json").write_text(json.dumps(said, indent=1) + "\n")
    (asked.out / "table.md").write_text(analysis.report(said))
    print(f"{ended} not measured yet" if ended else "all measured", flush=True)


def warm_up(bench: Bench, levels: Sequence[int], arms: Sequence[str], records: Records) -> None:
    """Have each server meet each level, the largest first; one that can't is told of when it is measured."""
    started = time.monotonic()
    for level in sorted(levels, reverse=True):
        for arm in arms:
            try:
                bench.warm(arm, level)
            except (CellError, OSError, ValueError) as error:
                print(f"warm-up of {arm} at {level}: {error}", flush=True)
    records.add({"kind": "warm-up", "at": time.time(), "launch": bench.launch, "seconds": round(time.monotonic() - started, 1)})
    print(f"warmed up in {time.monotonic() - started:.0f} s", flush=True)


def measure_all(bench: Bench, wanted: Sequence[Item], settings: Settings, records: Records, left: Callable[[], float]) -> int:
    """Measure one after the other while there is time; return how many are left."""
    failures = 0
    for place, item in enumerate(wanted):
        if left() < seconds_of(item, settings):
            print(f"the budget is spent: {len(wanted) - place} left for another call", flush=True)
            return len(wanted) - place
        started = time.monotonic()
        record = bench.measure(item)
        record["seconds"] = round(time.monotonic() - started, 2)
        records.add(record)
        failures = 0 if record["status"] == OK else failures + 1
        print(f"{place + 1}/{len(wanted)} {in_words(record)}", flush=True)
        if failures >= MOST_FAILURES:
            sys.exit(f"{MOST_FAILURES} in a row failed; the last: {record['reason']}")
    return 0


def in_words(record: Mapping[str, Any]) -> str:
    what = f"pass {record['pass']} {record['arm']} at {record.get('level', record.get('shape'))}"
    if record["status"] != OK:
        return f"{what}: FAILED: {str(record['reason']).splitlines()[0]}"
    said = f"{what}: {record['server_tok_s']:.0f} tok/s ({record['client_tok_s']:.0f} by the clients), {record['running']:.1f} running"
    if record.get("accept_length"):
        said += f", accept {record['accept_length']:.2f}"
    if record.get("steps"):
        said += f", {record['steps'].get('plain', 0):.0f} plain steps of {sum(record['steps'].values()):.0f}, {record['switches']} switches"
    return f"{said}, {record['seconds']} s"


if __name__ == "__main__":
    main()
