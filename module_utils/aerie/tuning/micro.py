"""The micro-benchmark on this host: one program, many launches, each bounded in time. Standard library only: this runs on hosts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.tuning import micro_program
from ansible.module_utils.aerie.words import tail

NCCL, GLOO = "nccl", "gloo"
BACKENDS = (NCCL, GLOO)
COMPLETED, FAILED, TIMEOUT = "completed", "failed", "timeout"
START_SECONDS = 180.0
GRACE_SECONDS = 20.0
"""How much longer than a launch's own bound its program may take to say so."""
END_SECONDS = 5.0
SMALL = 1 << 20
INNER = {NCCL: (20, 5), GLOO: (4, 2)}
"""All-reduces in one sample, of sizes up to ``SMALL`` and above."""


def _source() -> str:
    """Return the program's text: from an archive that Ansible ships, where its loader has it, else from its file."""
    loader: Any = getattr(micro_program, "__loader__", None)
    text = loader.get_source(micro_program.__name__) if hasattr(loader, "get_source") else None
    return str(text or Path(micro_program.__file__).read_text())


# Read now: a detached job outlives the archive that Ansible ships modules in.
PROGRAM = _source()


@dataclass(frozen=True)
class Bench:
    """How ranks are measured: which Python, how many ranks on which GPUs, how long."""

    python: Path
    ranks: int
    backend: str
    gpus: tuple[int, ...] | None
    sizes: tuple[int, ...]
    repeats: int = 15
    warmup: int = 5
    seconds: float = 60.0

    def as_dict(self) -> dict[str, Any]:
        """Return what defines a measurement."""
        kept = ("ranks", "backend", "repeats", "warmup", "seconds")
        return {name: getattr(self, name) for name in kept} | {
            "gpus": list(self.gpus) if self.gpus is not None else None,
            "sizes": list(self.sizes),
        }

    def inner(self, size: int) -> int:
        """Return how many all-reduces of ``size`` make one sample."""
        return INNER[self.backend][size > SMALL]


def medians(answer: Mapping[str, Any]) -> dict[int, float]:
    """Return the median of a launch's samples by size, in microseconds."""
    return {int(size): statistics.median(values) for size, values in answer["samples_us"].items()}


class Program:
    """The running program; a hang of it, too, ends in time."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        self._bench, self._directory = bench, directory
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._buffer = b""
        self.versions: dict[str, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, bench: Bench, directory: Path) -> Iterator[Program]:
        """Give the program, and end it and all its ranks afterwards."""
        made = cls(bench, directory)
        try:
            yield made
        finally:
            made.close()

    def measure(self, environment: Mapping[str, str | None], seed: int) -> dict[str, Any]:
        """Return the answer to one launch with ``environment``: status, reason, samples_us, seconds."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._number += 1
        scratch = Path(tempfile.mkdtemp(prefix="aerie-nccl-"))
        bench = self._bench
        order = {
            "number": self._number,
            "environment": dict(environment),
            "ranks": bench.ranks,
            "backend": bench.backend,
            "sizes": list(bench.sizes),
            "inner": {str(size): bench.inner(size) for size in bench.sizes},
            "repeats": bench.repeats,
            "warmup": bench.warmup,
            "seconds": bench.seconds,
            "seed": seed,
            "scratch": str(scratch),
        }
        try:
            answer = self._ask(order)
            if answer["status"] != COMPLETED:
                answer["log"] = self._last_words(scratch)
            return answer
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the program, killed after ``seconds``; its ranks end with it."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            family = [one for one in processes.scan() if one.ppid == self._process.pid]
            self._process.kill()
            processes.end(family, 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        if self._process.stdout:
            self._process.stdout.close()
        self._process = None
        self._buffer = b""

    def _start(self) -> None:
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        program = self._directory / "program.py"
        program.write_text(PROGRAM)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "TORCH_NCCL_", "PYTHON"))}
        environment |= {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if self._bench.backend == GLOO:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        elif self._bench.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._bench.gpus))
        log = self._directory / "program.log"
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [str(self._bench.python), str(program)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=environment,
                    cwd=self._directory,
                    start_new_session=True,
                )
        except OSError as error:
            raise AerieError(f"{self._bench.python}: {error.strerror}: name a Python that has torch in nccl_tune_python") from error
        hello = self._read(START_SECONDS)
        if not hello or not hello.get("ready"):
            words = tail(log.read_text(errors="replace"), 8)
            self.close()
            raise AerieError(
                f"the micro-benchmark does not start with {self._bench.python}:\n{words}\nname a Python with torch in nccl_tune_python"
            )
        self.versions = hello["versions"]

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        started = time.monotonic()
        answer = self._read(self._bench.seconds + micro_program.KILLED_SECONDS + GRACE_SECONDS)
        if answer is None:
            died = self._process.poll() is not None
            self.close(0)
            reason = "the program died" if died else f"the program itself hung for {time.monotonic() - started:.0f} s, and was killed"
            return {"status": FAILED if died else TIMEOUT, "reason": reason, "stuck": [], "seconds": time.monotonic() - started}
        return answer

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next line of the program's, None when it ends or takes longer than ``seconds``."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(descriptor, 65536) if readable else b""
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value

    def _last_words(self, scratch: Path) -> str:
        logs: Sequence[Path] = sorted(scratch.glob("rank*.log"))
        return "\n".join(f"{path.stem}:\n{tail(path.read_text(errors='replace'), 6)}" for path in logs)
