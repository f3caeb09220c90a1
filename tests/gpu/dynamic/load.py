"""A closed-loop load whose number of clients may change at any moment, and which begins where a steady load would be long since.

SGLang's own clients keep one number of clients from the first request to the last, and start all of them at the same token: their answers
then end together, and the first seconds say nothing. Here the first request of each client stands for one that is half-way already: so
much longer is its prompt, and so much shorter its answer. From its first decode step on, the load has the lengths of a steady one.
Answers are not streamed, so that SGLang's tokenizer process, which streams of a hundred clients keep busier than a core can be, does not
decide which server is faster. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DRAIN_SECONDS = 20.0
FEWEST_TOKENS = 8
LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Workload:
    """Prompts of random token ids, and answers of a fixed length."""

    input_len: int
    output_len: int
    low_id: int = 10
    high_id: int = 100


@dataclass
class Request:
    """One request: when it was sent and answered (Unix time), and how many tokens it was given, if it was answered."""

    client: int
    sent: float
    asked: int
    done: float | None = None
    tokens: int = 0
    aborted: bool = False
    error: str | None = None

    def within(self, start: float, end: float) -> float:
        """Return how many of its tokens fall between two times, as if they had come evenly."""
        if self.done is None or self.done <= self.sent:
            return 0.0
        inside = min(self.done, end) - max(self.sent, start)
        return self.tokens * max(0.0, inside) / (self.done - self.sent)


@dataclass
class Load:
    """Clients below ``wanted(seconds since the start)`` send one request after the other, until it is over; then all is aborted."""

    host: str
    port: int
    workload: Workload
    wanted: Callable[[float], int]
    most: int
    seed: int
    per_client: int | None = None
    """So many requests of each client, all clients at once, as SGLang's own client sends them; else until it is over."""
    requests: list[Request] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    broken: threading.Event = field(default_factory=threading.Event)
    """Set where a client failed: whoever watches may stop."""

    def run(self, watch: Callable[[], None]) -> None:
        """Run the load for as long as ``watch``, called in a thread of its own, does not return."""
        asyncio.run(self._run(watch))

    async def _run(self, watch: Callable[[], None]) -> None:
        self._stop = asyncio.Event()
        chance = random.Random(self.seed)
        begun = 0 if self.per_client else self.wanted(0.0)
        # Half-way through by equal parts of an answer, in random order: no two clients of a steady load are at the same token.
        parts = [(place + 0.5) / begun for place in range(begun)]
        chance.shuffle(parts)
        seeds = [chance.random() for _ in range(self.most)]
        self.started = time.time()
        clients = {
            asyncio.create_task(self._client(number, parts[number] if number < begun else 0.0, random.Random(seed)))
            for number, seed in enumerate(seeds)
        }
        watching = asyncio.create_task(asyncio.to_thread(watch))
        if self.per_client:
            await asyncio.wait(clients, return_when=asyncio.FIRST_EXCEPTION)
        done, _ = await asyncio.wait({watching, *clients}, return_when=asyncio.FIRST_COMPLETED)
        if watching not in done:
            self.broken.set()
        self._stop.set()
        self.ended = time.time()
        left = await self._drained(clients)
        for task in left:
            task.cancel()
        ends = await asyncio.gather(*clients, return_exceptions=True)
        await watching
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if left:
            raise OSError(f"{len(left)} requests on port {self.port} were not answered {DRAIN_SECONDS:g} s after they were aborted")

    async def _drained(self, clients: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Abort what runs, and return the clients that have not ended all the same."""
        deadline = time.monotonic() + DRAIN_SECONDS
        left = clients
        while left and time.monotonic() < deadline:
            # Again and again: a request may have been on its way when the others were aborted.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                await asyncio.wait_for(_post(self.host, self.port, "/abort_request", {"rid": "", "abort_all": True}), 5)
            _, left = await asyncio.wait(left, timeout=0.5)
        return left

    async def _client(self, number: int, part: float, chance: random.Random) -> None:
        connection, sent = _Connection(self.host, self.port), 0
        try:
            while not self._stop.is_set() and (self.per_client is None or sent < self.per_client):
                if number >= self.wanted(time.time() - self.started):
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                gone = min(int(part * self.workload.output_len), self.workload.output_len - FEWEST_TOKENS)
                part = 0.0
                await self._ask(connection, number, max(0, gone), chance)
                sent += 1
        finally:
            connection.close()

    async def _ask(self, connection: _Connection, number: int, gone: int, chance: random.Random) -> None:
        ids = [chance.randrange(self.workload.low_id, self.workload.high_id) for _ in range(self.workload.input_len + gone)]
        request = Request(number, time.time(), max(1, self.workload.output_len - gone))
        self.requests.append(request)
        sampling = {"temperature": 0, "max_new_tokens": request.asked, "ignore_eos": True}
        try:
            status, body = await connection.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            request.error = repr(error)
            if not self._stop.is_set():
                raise OSError(f"/generate on port {self.port}: {error!r}") from error
            return
        request.done = time.time()
        said = json.loads(body) if body.strip() else {}
        about = said.get("meta_info") or {} if isinstance(said, dict) else {}
        request.tokens = int(about.get("completion_tokens") or 0)
        request.aborted = (about.get("finish_reason") or {}).get("type") != "length"
        if status != 200 and not self._stop.is_set():
            raise OSError(f"/generate on port {self.port} answered {status}: {body[:300]!r}")

    def tokens_within(self, start: float, end: float) -> float:
        """Return the tokens that the clients were given between two times."""
        return sum(request.within(start, end) for request in self.requests)


class _Connection:
    """One connection that is kept, and opened anew where the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._place = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        reused = self._streams is not None
        try:
            return await self._post(path, body)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            if not reused:
                raise
        return await self._post(path, body)

    async def _post(self, path: str, body: Any) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._place, limit=1 << 22)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode())
        writer.write(f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status = int(head.split(" ", 2)[1])
        fields = dict(line.split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
        if "content-length" in fields:
            return status, await reader.readexactly(int(fields["content-length"]))
        whole = b""
        while size := int((await reader.readuntil(b"\r\n")).strip() or b"0", 16):
            whole += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return status, whole

    def close(self) -> None:
        if self._streams:
            self._streams[1].close()
        self._streams = None


async def _post(host: str, port: int, path: str, body: Any) -> tuple[int, bytes]:
    connection = _Connection(host, port)
    try:
        return await connection.post(path, body)
    finally:
        connection.close()
