"""Compares the draft's backlog with writing each position at once, over random steps and prompts. Runs in a release's Python.

It prints how many positions were compared, and fails where a slot, or what a row goes on from, is not that of the last position written.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.aerie_dynamic_draft import Backlog, Prompts, Step

ROWS, SLOTS, WIDTH = 40, 300, 3
FLUSH_AT = 60


class Writer:
    """A draft whose K is the tuple of all that it was made of; the padding slot is written as often as one likes."""

    width, dtype = WIDTH, torch.float32

    def __init__(self) -> None:
        self.pool = SimpleNamespace(size=SLOTS, page_size=1)
        self.cache = torch.zeros((SLOTS + 1, 2 + WIDTH))

    def write(self, ids: torch.Tensor, aux: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        assert ids.dtype == positions.dtype == slots.dtype == torch.int64
        owned = slots[slots != 0]
        assert len(owned) == len(owned.unique()), "the order among writes to one slot is nobody's"
        self.cache[slots] = torch.cat([ids.unsqueeze(1), positions.unsqueeze(1), aux], 1).to(torch.float32)


class Truth:
    """Writes each position when it is computed."""

    def __init__(self) -> None:
        self.cache = torch.zeros((SLOTS + 1, 2 + WIDTH))
        self.last: dict[int, tuple[int, Any]] = {}

    def write(self, token: int, position: int, hidden: torch.Tensor, slot: int, row: int) -> None:
        self.cache[slot] = torch.cat([torch.tensor([float(token), float(position)]), hidden])
        self.last[row] = slot, hidden


def main() -> None:
    compared = flushes = 0
    for seed in range(20):
        chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
        writer, truth = Writer(), Truth()
        backlog = Backlog(writer, ROWS, torch.device("cpu"), flush_at=FLUSH_AT)
        backlog.history = backlog.history[:200]  # so that prompts come that don't fit
        lengths: dict[int, int] = {}
        graph = torch.zeros((400, WIDTH))  # each launch overwrites it, as a graph's memory
        for _ in range(300):
            # rows and slots are given anew all the time: a slot that waits belongs to another row by the next step
            if chance.random() < 0.3 or not lengths:
                rows = chance.sample(range(1, ROWS), chance.randrange(1, 4))
                counts = [chance.choice((1, 2, 9, 40, 75)) for _ in rows]
                starts = [chance.choice((0, 0, 7)) for _ in rows]
                count = sum(counts)
                slots = chance.sample(range(1, SLOTS + 1), count)
                ids, tails = torch.randint(0, 999, (count,), generator=made), torch.randint(0, 999, (len(rows),), generator=made)
                graph[:count] = torch.randn((count, WIDTH), generator=made)
                prompts = Prompts(ids, tails.to(torch.int32), torch.tensor(slots, dtype=torch.int32), torch.tensor(rows), starts, counts)
                at = 0
                for number, (row, begin, size) in enumerate(zip(rows, starts, counts, strict=True)):
                    for place in range(size):
                        token = tails[number] if place == size - 1 else ids[at + 1]
                        truth.write(int(token), begin + place, graph[at].clone(), slots[at], row)
                        at += 1
                    lengths[row] = begin + size
                backlog.add(prompts, graph)
            else:
                rows = chance.sample(sorted(lengths), chance.randrange(1, len(lengths) + 1))
                slots = chance.sample(range(1, SLOTS + 1), len(rows))
                ids = torch.randint(0, 999, (len(rows),), generator=made)
                graph[: len(rows)] = torch.randn((len(rows), WIDTH), generator=made)
                for number, row in enumerate(rows):
                    truth.write(int(ids[number]), lengths[row], graph[number].clone(), slots[number], row)
                    lengths[row] += 1
                after = torch.tensor([lengths[row] for row in rows])
                backlog.add(Step(ids, after, torch.tensor(slots), torch.tensor(rows)), graph)
                compared += len(rows)
                backlog.flush_if_due()
                for row in [row for row in lengths if chance.random() < 0.05]:
                    del lengths[row]
        backlog.flush()
        assert torch.equal(writer.cache[1:], truth.cache[1:]), "slots"
        for row, (slot, hidden) in truth.last.items():
            assert int(backlog.slots[row]) == slot, "the slot that a row goes on from"
            assert torch.equal(backlog.aux[row], hidden), "what a row goes on from"
        flushes += backlog.flushes
    print(f"compared {compared} positions of plain steps, in {flushes} flushes")


main()
