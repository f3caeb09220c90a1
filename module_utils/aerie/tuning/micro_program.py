"""Times all-reduces between ranks: a program of its own, run by the release's Python (torch), which this module's text is copied to.

It imports torch once and forks the ranks of each order, since NCCL reads its variables once a process. Orders come as lines of JSON on
standard input, answers go as lines of JSON to standard output. When standard input ends, so do the ranks and the program.

An order: number, environment (null takes a variable away), ranks, backend (nccl, gloo), sizes (bytes), inner (all-reduces in a sample, by
size), repeats, warmup, seconds (the most it may take), seed, scratch (a directory). For tests, variables named AERIE_NCCL_TEST_ make every
rank slow (DELAY_US, unless UNDELAYED), or the last one hang (HANG), die (DIE) or all compute wrongly (WRONG).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

DELAY, UNDELAYED, HANG, WRONG, DIE = (f"AERIE_NCCL_TEST_{name}" for name in ("DELAY_US", "UNDELAYED", "HANG", "WRONG", "DIE"))
KILLED_SECONDS = 10.0
"""How long a killed rank may take to be gone: one that hangs in the driver does not end at all."""
DIE_WITH_PARENT = 1
TOLERANCE, ROUGH = 0.02, 0.1
"""How far a sum may be off: with a power of two of ranks every step is exact; else each rounds, in eight bits."""
ASIDE_CYCLES = 200_000
"""GPU clocks for which a sample waits, so that its graph is there before it begins."""


def main() -> None:
    """Answer orders until standard input ends."""
    import torch
    import torch.distributed as dist

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    answers.write(json.dumps({"ready": True, "versions": versions}) + "\n")
    buffer = b""
    while True:
        while b"\n" not in buffer:
            piece = os.read(0, 65536)
            if not piece:
                return
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        order = json.loads(line)
        answers.write(json.dumps({"number": order["number"], **serve(order, torch, dist)}) + "\n")


def _nccl_version(torch: Any) -> str | None:
    with contextlib.suppress(Exception):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def serve(order: dict[str, Any], torch: Any, dist: Any) -> dict[str, Any]:
    """Run one order's ranks, at most as long as it says, and return its answer."""
    started = time.monotonic()
    scratch = Path(order["scratch"])
    parent = os.getpid()
    pids = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(order["ranks"]):
        pid = os.fork()
        if not pid:
            _child(order, rank, scratch, parent, torch, dist)
        pids.append(pid)
    left, codes, timed_out = set(pids), {}, False
    deadline = started + float(order["seconds"])
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
        if left and (time.monotonic() > deadline or any(codes.values())):
            # The others wait for the one that died, and would until NCCL's own time-out.
            timed_out = not any(codes.values())
            break
        if left and not _wait(0.02):
            break
    stuck = _kill(left)
    if timed_out:
        told = f"no answer within {order['seconds']:.0f} s: hung, and killed"
        told += f"; process {', '.join(map(str, stuck))} can't be killed" if stuck else ""
        return {"status": "timeout", "reason": told, "stuck": stuck, "seconds": time.monotonic() - started}
    results = [_read(scratch / f"rank{rank}.json") for rank in range(order["ranks"])]
    failed = [f"rank {rank}: {reason}" for rank, one in enumerate(results) if (reason := _reason(one, codes.get(rank)))]
    if failed or left:
        return {"status": "failed", "reason": "; ".join(failed) or "cut off", "stuck": stuck, "seconds": time.monotonic() - started}
    # A collective is over when its last rank is.
    samples = {
        size: [max(values) for values in zip(*(one["samples_us"][str(size)] for one in results), strict=True)] for size in order["sizes"]
    }
    measured: dict[str, Any] = {"samples_us": samples, "nccl": results[0].get("nccl")}
    return {"status": "completed", "reason": None, "stuck": [], "seconds": time.monotonic() - started, **measured}


def _wait(seconds: float) -> bool:
    """Sleep; return False when nobody is there any more to read an answer."""
    readable, _, _ = select.select([0], [], [], seconds)
    # A caller sends nothing before it has its answer, so something to read is the end of the input.
    return not readable


def _kill(pids: set[int]) -> list[int]:
    """Kill ranks; return those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left, deadline = set(pids), time.monotonic() + KILLED_SECONDS
    while left and time.monotonic() < deadline:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.02)
    return sorted(left)


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
        return value
    except (OSError, ValueError):
        return {}


def _reason(result: dict[str, Any], code: int | None) -> str | None:
    """Return why a rank gave nothing; one that was killed because another died has no reason of its own."""
    if result.get("reason") or "samples_us" in result or code is None:
        return result.get("reason")
    return f"killed by signal {-code}" if code < 0 else f"ended with status {code} and no result"


def _child(order: dict[str, Any], rank: int, scratch: Path, parent: int, torch: Any, dist: Any) -> None:
    status = 1
    try:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(scratch / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name, value in order["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)
        result = measure(order, rank, scratch, torch, dist)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        result = {"reason": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:400]}
    with contextlib.suppress(OSError):
        (scratch / f"rank{rank}.json").write_text(json.dumps(result))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    # Without destroying the group: a communicator that hangs would hang here too.
    os._exit(status)


def measure(order: dict[str, Any], rank: int, scratch: Path, torch: Any, dist: Any) -> dict[str, Any]:
    """Return this rank's microseconds for one all-reduce, every sample by size; raise where a sum is wrong."""
    gpu = order["backend"] == "nccl"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        order["backend"],
        init_method=f"file://{scratch / 'store'}",
        rank=rank,
        world_size=order["ranks"],
        timeout=timedelta(seconds=float(order["seconds"])),
        **({"device_id": device} if gpu else {}),
    )
    if os.environ.get(DIE) and rank == order["ranks"] - 1:
        os._exit(3)
    if os.environ.get(HANG) and rank == order["ranks"] - 1:
        while True:
            time.sleep(60)
    delay = 0.0 if os.environ.get(UNDELAYED) else float(os.environ.get(DELAY) or 0) / 1e6
    dtype = torch.bfloat16 if gpu else torch.float32
    small = torch.zeros(8, dtype=dtype, device=device)

    def align() -> None:
        dist.all_reduce(small)

    align()
    runs: dict[int, Callable[[], float]] = {}
    checks: list[Callable[[], None]] = []
    for size in order["sizes"]:
        count = max(1, size // small.element_size())
        values = torch.zeros(count, dtype=dtype, device=device)
        inner = int(order["inner"][str(size)])
        run, check = (_graphed if gpu else _plain)(torch, dist, values, inner, align, delay, rank, order["ranks"])
        runs[size] = run
        checks.append(check)
    for check in checks:
        check()
    # The same order on all ranks, another one in each repeat: a drift meets all sizes alike.
    shuffled = random.Random(order["seed"])
    samples: dict[str, list[float]] = {str(size): [] for size in order["sizes"]}
    for repeat in range(int(order["warmup"]) + int(order["repeats"])):
        sizes = list(order["sizes"])
        shuffled.shuffle(sizes)
        for size in sizes:
            microseconds = runs[size]()
            if repeat >= int(order["warmup"]):
                samples[str(size)].append(round(microseconds, 3))
    for check in checks:
        check()
    return {"samples_us": samples, "nccl": _nccl_version(torch) if gpu else None}


def _pattern(torch: Any, values: Any, rank: int, ranks: int) -> tuple[Any, Any]:
    """Return what this rank brings and what the sum is: small whole numbers, exact in every type."""
    cycle = torch.arange(values.numel(), device=values.device) % 7
    return (cycle + rank).to(values.dtype), (cycle * ranks + ranks * (ranks - 1) // 2).to(torch.float32)


def _verify(values: Any, wanted: Any, inner: int, ranks: int) -> None:
    if os.environ.get(WRONG):
        values = values + 1
    # Each all-reduce after the first adds up equal values.
    wanted = wanted * float(ranks) ** (inner - 1)
    found = values.float()
    allowed = ROUGH if ranks & (ranks - 1) else TOLERANCE
    off = ((found - wanted).abs() > allowed * wanted.abs()).sum().item()
    if off:
        raise ArithmeticError(f"wrong sums: {int(off)} of {values.numel()} values of {values.numel() * values.element_size()} B")


def _graphed(
    torch: Any, dist: Any, values: Any, inner: int, align: Callable[[], None], delay: float, rank: int, ranks: int
) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a sample and a check of ``inner`` all-reduces in one CUDA graph, as a decode step has them."""
    for _ in range(2):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (the watchdog's) may ask CUDA for things meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(inner):
            dist.all_reduce(values)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample() -> float:
        values.zero_()
        align()
        torch.cuda._sleep(ASIDE_CYCLES)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1000 / inner + delay * 1e6

    def check() -> None:
        mine, wanted = _pattern(torch, values, rank, ranks)
        values.copy_(mine)
        graph.replay()
        torch.cuda.synchronize()
        _verify(values, wanted, inner, ranks)

    return sample, check


def _plain(
    torch: Any, dist: Any, values: Any, inner: int, align: Callable[[], None], delay: float, rank: int, ranks: int
) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a sample and a check of ``inner`` all-reduces, one after the other."""

    def work() -> None:
        for _ in range(inner):
            if delay:
                time.sleep(delay)
            dist.all_reduce(values)

    def sample() -> float:
        values.zero_()
        align()
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e6 / inner

    def check() -> None:
        mine, wanted = _pattern(torch, values, rank, ranks)
        values.copy_(mine)
        work()
        _verify(values, wanted, inner, ranks)

    return sample, check


if __name__ == "__main__":
    main()
