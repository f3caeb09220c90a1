"""A load client that is imported once and then runs many times: Python's clients need half a minute to import. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import bench_clients

# Each run is a fork of the process that has imported the client's module, with its own argv, directory and output.
PRELOADER = """
import importlib, json, os, runpy, sys
module = sys.argv[1]
importlib.import_module(module)
answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(order["cwd"])
        sys.argv = [module, *order["arguments"]]
        status = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    answers.write(f"{child}\\n")
    answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
"""
END_SECONDS = 10.0


class Run:
    """One run of the client; it has ended when :meth:`poll` returns its exit status."""

    def poll(self) -> int | None:
        raise NotImplementedError

    def end(self) -> None:
        """Kill the run and all that it started, unless it has ended."""
        raise NotImplementedError


class _Process(Run):
    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        if self._process.poll() is None:  # else its number may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Fork(Run):
    def __init__(self, clients: Clients, pid: int) -> None:
        self._clients = clients
        self._process = processes.read(pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and (line := self._clients.line(0)) is not None:
            self._status = int(line)
        return self._status

    def end(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            # Again and again: it leads its group only once it runs.
            if self._process is not None and processes.is_same(self._process):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                processes.kill(self._process)
            time.sleep(0.02)


class Clients:
    """Runs of one client, one after the other; a Python client is imported in the background from :meth:`open` on."""

    def __init__(self, client: bench_clients.Client, environment: Mapping[str, str], log: Path) -> None:
        self._client = client
        self._environment = environment
        self._log = log
        self._loader: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    @classmethod
    @contextlib.contextmanager
    def open(cls, client: bench_clients.Client, environment: Mapping[str, str], log: Path) -> Iterator[Clients]:
        """Start to import the client, if it is Python; end the importing process at the end of the block. ``log`` takes its errors."""
        clients = cls(client, environment, log)
        clients._preload()
        try:
            yield clients
        finally:
            clients._close()

    def start(self, load: bench_clients.Load, log: Path, ready_seconds: float) -> Run:
        """Start one run, whose directory is that of ``log``; the one before must have ended."""
        argv = bench_clients.argv(self._client, load)
        if self._loader is None or self._loader.stdin is None:
            return _Process(argv, log, self._environment)
        order: dict[str, Any] = {"arguments": argv[len(self._client.command) :], "log": str(log), "cwd": str(log.parent)}
        try:
            self._loader.stdin.write(json.dumps(order).encode() + b"\n")
            self._loader.stdin.flush()
        except OSError:
            raise AerieError(self._failed("ended")) from None
        line = self.line(ready_seconds)
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._loader.wait(1)  # its output may have closed just before it is gone
            raise AerieError(self._failed("ended" if self._loader.poll() is not None else f"was not ready after {ready_seconds:g} s"))
        return _Fork(self, int(line))

    def line(self, seconds: float) -> str | None:
        """Return the next line of the importing process; None where none comes within ``seconds``."""
        assert self._loader is not None
        assert self._loader.stdout is not None
        descriptor = self._loader.stdout.fileno()
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return None
            data = os.read(descriptor, 65536)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _preload(self) -> None:
        command = self._client.command
        if len(command) == 3 and command[1] == "-m":
            with self._log.open("wb") as errors:
                self._loader = subprocess.Popen(
                    [command[0], "-c", PRELOADER, command[2]],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment,
                    start_new_session=True,
                )

    def _failed(self, how: str) -> str:
        return f"the load client {self._client.name} {how}; the end of {self._log}:\n{self._log.read_text(errors='replace')[-1500:]}"

    def _close(self) -> None:
        if self._loader is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._loader.pid, signal.SIGKILL)
            self._loader.wait()
            for stream in (self._loader.stdin, self._loader.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
