"""Copies between each two GPUs: may they reach each other, how fast, how soon, and does the right data arrive."""

from __future__ import annotations

import functools
from typing import Any

from .common import Events, describe, digits, run, seconds_of, spread, synchronize

LARGE = 256 << 20
COPIES, REPEATS = 4, 7
SMALL_COPIES, SMALL_REPEATS = 200, 9
CHAIN_LENGTH, CHAIN_LOADS = 1 << 20, 4096


class Pairs:
    """All pairs of the devices that are visible."""

    def __init__(self, request: dict[str, Any], events: Events) -> None:
        events.stage("import torch")
        import torch

        self.torch: Any = torch
        self.events = events
        self.size = int(request.get("bytes") or LARGE)
        self.cuda = request.get("device", "cuda") == "cuda"
        self.count = len(request["gpus"])
        self.names = [str(gpu) for gpu in request["gpus"]]
        self.devices = [torch.device("cuda", number) if self.cuda else torch.device("cpu") for number in range(self.count)]

    def main(self) -> None:
        pairs = [(one, two) for one in range(self.count) for two in range(one + 1, self.count)]
        for number in range(self.count):
            self.events.stage(f"take GPU {self.names[number]}")
            self.torch.zeros(1, device=self.devices[number])
            synchronize(self.torch, self.devices[number])
        for one, two in pairs:
            self._pair(one, two)
        if self.cuda:  # last, since a load that may not be made spoils the whole process
            for one, two in pairs:
                self._load_latency(one, two)

    def _pair(self, one: int, two: int) -> None:
        where = f"{self.names[one]}-{self.names[two]}"
        found: dict[str, Any] = {"access": self._access(one, two) and self._access(two, one)}
        self.events.stage(f"copy GPU {self.names[one]} to GPU {self.names[two]}")
        found["forth_gb_s"], forth = self._bandwidth(one, two)
        self.events.stage(f"copy GPU {self.names[two]} to GPU {self.names[one]}")
        found["back_gb_s"], back = self._bandwidth(two, one)
        self.events.stage(f"copy both ways between GPU {self.names[one]} and GPU {self.names[two]}")
        found["both_gb_s"], both = self._both(one, two)
        self.events.stage(f"small copies GPU {self.names[one]} to GPU {self.names[two]}")
        found["copy_latency_us"] = self._copy_latency(one, two)
        found["wrong"] = forth + back + both
        if found["wrong"]:
            self.events.problem(f"wrong data: {found['wrong']} values differ after copies between GPU {where}", pair=where)
        self.events.figure("pair", {"pair": where, **digits(found)})

    def _access(self, one: int, two: int) -> bool:
        return bool(self.torch.cuda.can_device_access_peer(one, two)) if self.cuda else True

    def _pattern(self, device: Any, seed: int) -> Any:
        """Return data that no other pair and direction has, made on ``device`` itself."""
        places = self.torch.arange(self.size // 4, device=device, dtype=self.torch.int32)
        return places * 2654435 + seed

    def _wrong(self, target: Any, device: Any, seed: int) -> int:
        synchronize(self.torch, device)
        return int((target != self._pattern(device, seed)).sum())

    def _bandwidth(self, source: int, target: int) -> tuple[dict[str, float], int]:
        """Return gigabytes per second one way, and how many values arrived wrong."""
        seed = 1 + source * 64 + target
        data = self._pattern(self.devices[source], seed)
        room = self.torch.zeros_like(data, device=self.devices[target])

        def work() -> None:
            for _ in range(COPIES):
                room.copy_(data, non_blocking=True)

        seconds = self._timed(source, work)
        return spread([COPIES * self.size / second / 1e9 for second in seconds]), self._wrong(room, self.devices[target], seed)

    def _timed(self, source: int, work: Any, repeats: int = REPEATS) -> list[float]:
        if self.cuda:
            self.torch.cuda.set_device(source)
        work()
        for device in self.devices:
            synchronize(self.torch, device)
        return [seconds_of(self.torch, self.devices[source], work) for _ in range(repeats)]

    def _both(self, one: int, two: int) -> tuple[dict[str, float], int]:
        """Return gigabytes per second of both directions together, and how many values arrived wrong."""
        seeds = (9001 + one, 9501 + two)
        data = [self._pattern(self.devices[place], seed) for place, seed in zip((one, two), seeds, strict=True)]
        room = [self.torch.zeros_like(data[1], device=self.devices[one]), self.torch.zeros_like(data[0], device=self.devices[two])]
        if not self.cuda:
            room[0].copy_(data[1])
            room[1].copy_(data[0])
            return {}, self._wrong(room[0], self.devices[one], seeds[1]) + self._wrong(room[1], self.devices[two], seeds[0])
        # A copy between devices is made on the current stream of its source.
        torch = self.torch
        streams = [torch.cuda.Stream(device=place) for place in (one, two)]
        rates = []
        for repeat in range(REPEATS + 1):
            for place in (one, two):
                torch.cuda.synchronize(place)
            marks = []
            for number, place in enumerate((one, two)):
                with torch.cuda.device(place), torch.cuda.stream(streams[number]):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    for _ in range(COPIES * 2):
                        room[1 - number].copy_(data[number], non_blocking=True)
                    end.record()
                    marks.append((begin, end))
            for place in (one, two):
                torch.cuda.synchronize(place)
            slowest = max(begin.elapsed_time(end) for begin, end in marks) / 1000
            if repeat:
                rates.append(2 * COPIES * 2 * self.size / slowest / 1e9)
        return spread(rates), self._wrong(room[0], self.devices[one], seeds[1]) + self._wrong(room[1], self.devices[two], seeds[0])

    def _copy_latency(self, source: int, target: int) -> dict[str, float]:
        """Return microseconds for one 4-byte copy among many in a row: launching it included."""
        data = self.torch.ones(1, device=self.devices[source])
        room = self.torch.zeros(1, device=self.devices[target])

        def work() -> None:
            for _ in range(SMALL_COPIES):
                room.copy_(data, non_blocking=True)

        return spread([second / SMALL_COPIES * 1e6 for second in self._timed(source, work, SMALL_REPEATS)])

    def _load_latency(self, one: int, two: int) -> None:
        """Time one load after the other, each from where the last one said, out of the other GPU's memory."""
        torch, where = self.torch, f"{self.names[one]}-{self.names[two]}"
        self.events.stage(f"loads by GPU {self.names[one]} from GPU {self.names[two]}")
        if not self._access(one, two):
            self.events.figure("load_latency", {"pair": where, "reason": "no peer access"})
            return
        try:
            import triton

            from .chase import chase
        except Exception as error:
            self.events.figure("load_latency", {"pair": where, "reason": describe(error)})
            return
        try:
            # Places far apart, so that no cache holds the next one.
            chain = (torch.arange(CHAIN_LENGTH, dtype=torch.int64) * 40503 + 12345) % CHAIN_LENGTH
            known = 0
            for _ in range(CHAIN_LOADS):
                known = int(chain[known])
            torch.cuda.set_device(one)
            found = {}
            for name, place in (("own_us", one), ("us", two)):
                data = chain.to(self.devices[place])
                end = torch.zeros(1, dtype=torch.int64, device=self.devices[one])
                times = []
                for loads in (CHAIN_LOADS, CHAIN_LOADS // 2):
                    follow = functools.partial(chase[(1,)], data, end, loads)
                    follow()  # compiles it
                    torch.cuda.synchronize(one)
                    times.append(min(seconds_of(torch, self.devices[one], follow) for _ in range(5)))
                    if loads == CHAIN_LOADS and int(end[0]) != known:
                        self.events.problem(f"wrong data: loads between GPU {where} gave another value", pair=where)
                # What launching costs is in both, and falls out.
                found[name] = (times[0] - times[1]) / (CHAIN_LOADS // 2) * 1e6
            self.events.figure("load_latency", {"pair": where, **digits(found), "triton": triton.__version__})
        except Exception as error:
            self.events.figure("load_latency", {"pair": where, "reason": describe(error)})


def main(request: dict[str, Any], events: Events) -> None:
    """Try every pair."""
    Pairs(request, events).main()


if __name__ == "__main__":
    run(main)
