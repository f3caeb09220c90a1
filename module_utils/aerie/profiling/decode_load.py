"""A steady load on a server, and its log followed meanwhile: what windows of any kind are measured in. Standard library only.

The load is SGLang's own client with more requests than needed, ended when the last window is closed. The server's log says how many
requests ran, and how fast (overhead.py reads it); the moment that a line is seen is at most some milliseconds late.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.measuring.bench_runner import CellError, Server, ServerDiedError
from ansible.module_utils.aerie.profiling import overhead, preloaded_client

POLL_SECONDS = 0.01
FOLLOW_SECONDS = 0.004
READY_SECONDS = 180.0
"""How long a client may take to import and to fill the server; a Python client's first start on a cold disk takes over half a minute."""
WARM_SECONDS = 240.0
LINES_PER_WINDOW = 4
"""A window lasts until so many of the server's lines fit into it, if that is longer than what was asked for."""
LONGEST_WINDOW_SECONDS = 15.0
WARM_TOKENS = (8, 48)
RESERVE = 2.5
"""By how much a load may be faster than the warm-up, whose batches run out together."""
FEW_STEPS, MANY_TOKENS = 10, 3
"""What a line of the server's log is taken to cover before one was seen: steps, and tokens of each request a step."""
AFTERWARDS_SECONDS = 15
MOST_REQUESTS = 20_000


def warm_up(server: Server, workload: Mapping[str, Any], seed: int, level: int) -> float:
    """Meet the batch size unmeasured, and return about how many tokens a second it gives; needs no client, which imports meanwhile."""
    draws = random.Random(seed)

    def generate(tokens: int) -> None:
        ids = [draws.randrange(10, 100) for _ in range(int(workload["input_len"]))]
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        try:
            bench_runner.request(server, "/generate", "POST", WARM_SECONDS, {"input_ids": ids, "sampling_params": sampling})
        except OSError as error:
            if not processes.is_listening(server.port):
                raise ServerDiedError(bench_runner.death(server)) from error
            raise CellError(f"warm-up: /generate: {error}") from error

    speed = 1.0
    with ThreadPoolExecutor(level) as pool:
        for tokens in WARM_TOKENS:
            started = time.monotonic()
            for _ in pool.map(generate, [tokens] * level):
                pass
            speed = level * tokens / (time.monotonic() - started)
    return speed


def requests_to_outlast(workload: Mapping[str, Any], seconds: float, level: int, speed: float) -> int:
    """Return more requests than the windows can use up: the client must outlast them, and is ended then."""
    slowest_window = LINES_PER_WINDOW * FEW_STEPS * level * MANY_TOKENS / speed
    lasting = max(seconds, 2 * overhead.FEWEST_PAIRS * min(slowest_window, LONGEST_WINDOW_SECONDS)) + AFTERWARDS_SECONDS
    wanted = level + math.ceil(RESERVE * speed * lasting / int(workload["output_len"]))
    return min(max(wanted, 4 * level), MOST_REQUESTS)


def window_seconds(shortest: float, follower: Follower) -> float:
    """Return how long windows must be for their lines, at the pace at which these come."""
    return min(max(shortest, LINES_PER_WINDOW * follower.period()), LONGEST_WINDOW_SECONDS)


class Watch:
    """Waits while the client and the server live."""

    def __init__(self, server: Server, client: preloaded_client.Run, log: Path, timeout_seconds: float, variable: str) -> None:
        self._server = server
        self._client = client
        self._log = log
        self._timeout = (timeout_seconds, variable)
        self._deadline = time.monotonic() + timeout_seconds
        self._looked = time.monotonic()

    def until(self, done: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
        """Wait until ``done``; raise CellError with ``why`` after ``seconds``, or when the level's time is up."""
        end = min(time.monotonic() + seconds, self._deadline)
        while not done():
            self.check()
            if time.monotonic() > end:
                raise CellError(why(), bench_runner.TIMEOUT)
            time.sleep(POLL_SECONDS)

    def sleep(self, until: float) -> None:
        """Wait until the Unix time ``until``."""
        while (left := until - time.time()) > 0:
            self.check()
            time.sleep(min(left, 0.05))

    def check(self) -> None:
        if time.monotonic() - self._looked > bench_runner.GONE_SECONDS / 4:
            self._looked = time.monotonic()
            if not processes.is_listening(self._server.port):
                raise ServerDiedError(bench_runner.death(self._server))
        status = self._client.poll()
        if status is not None:
            raise CellError(
                f"the client ended with status {status} before the last window\n{bench_runner.tail(self._log)}", exit_status=status
            )
        if time.monotonic() > self._deadline:
            seconds, variable = self._timeout
            raise CellError(f"not done after {seconds:g} s ({variable})", bench_runner.TIMEOUT)


def not_full(follower: Follower, level: int, seconds: float) -> str:
    """Say why a load never reached ``level`` running requests within ``seconds``."""
    most = max((line["running"] for line in follower.lines if line["kind"] == "decode"), default=0)
    if not most:
        return f"the server's log told of no decode batch within {seconds:g} s: is log-level above info, or is the client too slow?"
    return f"only {most} of {level} requests ran at once: raise max-running-requests of the server, or take fewer clients"


class Follower(threading.Thread):
    """Reads what a server adds to its log, and when: the moment that a line is seen is at most some milliseconds late."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self._stopped = threading.Event()
        self._stream = path.open("rb")
        self._stream.seek(0, os.SEEK_END)
        self.lines: list[dict[str, Any]] = []
        self.traced = 0

    def run(self) -> None:
        rest = b""
        while not self._stopped.is_set():
            data = self._stream.read()
            if not data:
                self._reopen()
                self._stopped.wait(FOLLOW_SECONDS)
                continue
            now = time.time()
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self._take(line.decode(errors="replace"), now)

    def _take(self, text: str, now: float) -> None:
        if found := overhead.read_line(text, now):
            self.lines.append(found)
        elif "Profiling done" in text:
            self.traced += 1

    def _reopen(self) -> None:
        """Follow the log where a service manager began a new one."""
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino != os.fstat(self._stream.fileno()).st_ino:
                self._stream.close()
                self._stream = self._path.open("rb")

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._stream.close()

    def _decodes(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "decode"]

    def is_full(self, level: int) -> bool:
        """Say whether the last two lines told of ``level`` running requests: the load is there."""
        last = self._decodes()[-2:]
        return len(last) == 2 and all(line["running"] == level for line in last)

    def period(self) -> float:
        """Return the seconds between the last two lines of decode steps."""
        last = self._decodes()[-2:]
        return float(last[1]["t"] - last[0]["t"]) if len(last) == 2 else 0.0


@contextlib.contextmanager
def following(path: Path) -> Iterator[Follower]:
    """Follow the log at ``path`` during the block."""
    follower = Follower(path)
    follower.start()
    try:
        yield follower
    finally:
        follower.stop()
