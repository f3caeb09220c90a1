"""What every probe program shares: its request, its events, its end with its parent, and how it times. Standard library only.

A program gets one argument, a JSON file: its ``request``. It appends JSON lines to the request's ``events``: ``{"stage": …}`` before each
step, so that a hang tells where it stopped, ``{"figure": …, "value": …}``, ``{"problem": …}``, and last ``{"done": true}``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that we get when our parent ends."""


class Events:
    """The events of one process of a probe, each written at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = time.monotonic()

    def _write(self, **event: Any) -> None:
        self._stream.write(json.dumps({**event, "at": round(time.monotonic() - self._started, 4)}) + "\n")
        self._stream.flush()

    def stage(self, name: str) -> None:
        """Say what comes next; it may not come back."""
        self._write(stage=name)

    def figure(self, name: str, value: Any) -> None:
        """Give one result."""
        self._write(figure=name, value=value)

    def problem(self, message: str, **details: Any) -> None:
        """Say what is wrong; the program may go on."""
        self._write(problem=message, **details)

    def done(self) -> None:
        """Say that nothing is left to do."""
        self._write(done=True)


def run(main: Callable[[dict[str, Any], Events], None]) -> None:
    """Run a program's ``main`` with its request; an exception becomes a problem and exit status 1.

    The process ends with its parent, or when its bound is over, whoever watches it. SIGUSR1 writes where each thread is to stderr.
    """
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(request["seconds"]) + 60)
    if os.getppid() != request["parent"]:
        sys.exit("the process that started this probe has ended")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    with Path(request["events"]).open("a") as stream:
        events = Events(stream)
        try:
            main(request, events)
        except BaseException as error:
            traceback.print_exc()
            events.problem(describe(error), exception=type(error).__name__)
            sys.exit(1)
        events.done()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' clean-up at exit may hang after all has been said.
    os._exit(0)


def describe(error: BaseException) -> str:
    """Return an error with its causes, the outermost first."""
    words: list[str] = []
    current: BaseException | None = error
    while current is not None and len(words) < 4:
        text = f"{type(current).__name__}: {current}".strip()
        if text not in words:
            words.append(text)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " | ".join(words)[:4000]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return what a distribution of repeats looks like: median, 10th and 90th percentile, least, and how many there were."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return {"median": at(0.5), "p10": at(0.1), "p90": at(0.9), "min": ordered[0], "repeats": len(ordered)}


def digits(value: Any, count: int = 4) -> Any:
    """Round every float inside ``value`` to ``count`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{count}g}")
    if isinstance(value, dict):
        return {key: digits(item, count) for key, item in value.items()}
    return value


def seconds_of(torch: Any, device: Any, work: Callable[[], None]) -> float:
    """Return how long ``work`` takes on ``device``: by CUDA's events on a GPU, by the clock elsewhere."""
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def synchronize(torch: Any, device: Any) -> None:
    """Wait until ``device`` has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mapped_libraries(names: Sequence[str] = ("libcudart", "libnvrtc", "libcublas", "libnccl", "libcuda.")) -> list[str]:
    """Return the CUDA libraries that this process has loaded, by path."""
    with Path("/proc/self/maps").open() as stream:
        paths = {line.split(maxsplit=5)[5].strip() for line in stream if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(tuple(names)))
