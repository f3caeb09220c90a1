#!/usr/bin/env python3
"""Asks a baseline and a dynamic server the same, while the dynamic one's mode changes, and compares token by token. tokens.sh starts them.

    tokens.py --root ROOT --out OUT --dtype float32|bfloat16 --steps FILE [--crossings 300] [--requests 90] [--gap LOGITS] [--also NAME...]

Three kinds of change: by load that crosses the threshold, by the mode flipped every few steps, and by an operator who changes the policy at
random. Then the acceptance after returns, against the same requests never off. --also asks further instances once. The client is
tests/e2e/dynamic_client.py's.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cores

import dynamic_client as client

WAVES = (4, 1, 5, 4, 6, 2, 4, 8, 5, 16)
"""Clients at a time. Most waves are a little above the threshold: each crosses it twice, and small ones are soon over."""
LOAD: dict[str, Any] = {"high": 3, "low": 2, "min_dwell_steps": 0, "force": None, "flip_every": 0}
AT_RANDOM: tuple[Mapping[str, Any], ...] = (
    {"high": 0, "low": 0},
    {"high": 2, "low": 1, "min_dwell_steps": 2},
    {"high": 6, "low": 3},
    {"high": 20, "low": 9, "min_dwell_steps": 0},
    {"force": "plain"},
    {"force": "speculative"},
    {"force": None, "flip_every": 2},
    {"force": None, "flip_every": 0},
)
FLIPS = (1, 3, 6, 24)
RETURNS_EVERY = 7
TIES = {"float32": client.TIE, "bfloat16": 0.25}
"""Logits that lie less than this apart are a tie: a step of bfloat16 is 1/16 to 1/8 at the logits of this pair."""
LOWEST_ACCEPTANCE = 0.97
MOST_OTHER_PROPOSALS = 500
"""One of so many may differ, for a tie of the draft's."""
MOST_ROUNDS = 30


def texts() -> list[str]:
    return [inspect.getsource(module) for module in (argparse, textwrap, random)]


def mixed(server: client.Server, requests: int, logprobs: bool) -> list[client.Case]:
    """Return requests of mixed lengths, some of several turns, so that later ones meet the prefix cache."""
    chance = random.Random(5)
    text = [server.tokens_of(one) for one in texts()]

    def stretch(length: int) -> tuple[int, ...]:
        source = chance.choice(text)
        start = chance.randrange(len(source) - length)
        return source[start : start + length]

    free = {"ignore_eos": True}
    made = []
    for number in range(requests):
        length, tokens = chance.choice((3, 8, 17, 40, 64, 129, 300)), chance.choice((2, 9, 33, 64, 120, 200))
        turns = (stretch(9), stretch(15))[: number % 3] if number % 4 == 0 else ()
        asks_logprobs = logprobs and number % 9 == 0
        made.append(
            client.Case(f"case {number}", stretch(length), tokens, turns, free, asks_logprobs, stream=number % 5 == 0 and not asks_logprobs)
        )
    for number in range(requests // 10):
        abort = ("drop", "request")[number % 2]
        made.append(client.Case(f"aborted {number}", stretch(30), 120, (), free, abort=abort, abort_after=5 + 9 * (number % 4)))
    return made


def repeats(server: client.Server, requests: int) -> list[client.Case]:
    """Return text that repeats itself, so that what comes next stands far back: a draft that lost its KV can't know it."""
    chance = random.Random(11)
    text = server.tokens_of(texts()[0])
    made = []
    for number in range(requests):
        start = chance.randrange(len(text) - 100)
        block = text[start : start + chance.randrange(30, 70)]
        made.append(client.Case(f"repeat {number}", block * 3 + block[:9], 100, (block[9:20],), {"ignore_eos": True}))
    return made


class Check:
    """All comparisons of one pair of servers; every one is told at once and kept."""

    def __init__(self, baseline: client.Server, dynamic: client.Server, cases: Sequence[client.Case], crossings: int) -> None:
        self.baseline, self.dynamic, self.cases, self.crossings = baseline, dynamic, cases, crossings
        self.right = client.ask_all(baseline, "right", cases, (8,), whole=True)
        self.said: list[dict[str, Any]] = []
        self.again = client.ask_all(baseline, "again", cases, WAVES, whole=True)
        self._tell("baseline against itself, at other batch sizes", self.again, 0, 1)

    def until_crossed(self, name: str, times: int, ask: Callable[[str], client.Answers]) -> None:
        before, rounds = self.dynamic.state()["switches"], 0
        wrong: list[str] = []
        other = 0
        while (crossed := self.dynamic.state()["switches"] - before) < times and rounds < MOST_ROUNDS and not wrong:
            rounds += 1
            found = ask(f"{name} {rounds}".replace(" ", "-"))
            wrong += client.differences(self.right, found, self.cases, self.baseline)
            other += self._other(found)
            print(f"{name}: round {rounds}, {crossed} crossings before it", flush=True)
        self.said.append({"name": name, "crossings": crossed, "rounds": rounds, "wrong": wrong, "ties": other - len(wrong)})
        print(
            f"{name}: {crossed} crossings in {rounds} rounds, {len(wrong)} wrong, {other - len(wrong)} ties",
            *wrong[:5],
            sep="\n  ",
            flush=True,
        )

    def _tell(self, name: str, found: client.Answers, crossed: int, rounds: int) -> None:
        wrong = client.differences(self.right, found, self.cases, self.baseline)
        ties = self._other(found) - len(wrong)
        self.said.append({"name": name, "crossings": crossed, "rounds": rounds, "wrong": wrong, "ties": ties})
        print(f"{name}: {len(wrong)} wrong, {ties} ties", *wrong[:5], sep="\n  ", flush=True)

    def _other(self, found: client.Answers) -> int:
        """Return how many requests were answered otherwise in any way, ties too."""
        return sum([one.tokens for one in found[case.name]] != [one.tokens for one in self.right[case.name]] for case in self.cases)

    def run(self) -> None:
        def plainly(name: str) -> client.Answers:
            return client.ask_all(self.dynamic, name, self.cases, WAVES)

        def with_changes(name: str) -> client.Answers:
            with client.meanwhile(self.dynamic, 1, AT_RANDOM, (0.02, 0.05, 0.1, 0.3)):
                return plainly(name)

        self.dynamic.change(**LOAD)
        self.until_crossed("load crosses the threshold", self.crossings, plainly)
        for every in FLIPS:
            self.dynamic.change(**LOAD | {"flip_every": every})
            self.until_crossed(f"flipped every {every} steps", self.crossings if every < 10 else self.crossings // 4, plainly)
        self.dynamic.change(**LOAD)
        self.until_crossed("the policy changes at random", self.crossings, with_changes)
        for force in ("plain", "speculative"):
            self.dynamic.change(**LOAD | {"force": force})
            self._tell(f"forced to be {force}", plainly(force), 0, 1)
        self.dynamic.change(**LOAD)

    def also(self, name: str, server: client.Server) -> None:
        """Ask another server once, at other batch sizes than the baseline was."""
        self._tell(name, client.ask_all(server, name, self.cases, WAVES), 0, 1)


def accepted(dynamic: client.Server, cases: Sequence[client.Case], steps: Path) -> dict[str, Any]:
    """Return acceptance after returns over never off, by the worker's own record of its steps."""
    switch = steps.with_name(f"{steps.name}.on")
    switch.touch()
    found = {}
    # Of another depth, a proposal and what of it is accepted have another length.
    depths = dynamic.state().get("candidate_steps")
    deepest = {"num_steps": max(depths)} if depths else {}
    try:
        for name, changes in (("never", {"force": "speculative"}), ("returned", {"flip_every": RETURNS_EVERY})):
            dynamic.change(**LOAD | changes | deepest)
            client.ask_all(dynamic, name, cases, (6,))
            found[name] = client.steps_of(steps, name)
    finally:
        switch.unlink()
        dynamic.change(**LOAD | dict.fromkeys(deepest))
    return acceptance(found["never"], found["returned"])


def acceptance(never_off: Sequence[client.Step], returned: Sequence[client.Step]) -> dict[str, Any]:
    """Return what was accepted in verifications after a return, over what was at the same places of the same requests when never off.

    The means over all places are told too; the two runs verify at other places, so that they differ by chance.
    """
    never, after = client.verified(never_off), client.verified(returned)
    since = {key: one for key, one in after.items() if one.since_return is not None}
    shared = sorted(never.keys() & since.keys())
    pairs: dict[str, list[tuple[float, float]]] = {}
    for key in shared:
        pairs.setdefault(key[0], []).append((never[key].given, since[key].given))
    ratio = client.ratio_of_means(pairs)
    return {
        "never_off": client.mean(one.given for one in never.values()),
        "after_return": client.mean(one.given for one in since.values()),
        "at_the_same_places": {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "verifications": len(shared)},
        "returns": client.crossings(returned) // 2,
        "proposals_that_differ": sum(never[key].chain != since[key].chain for key in shared),
    }


def graphs(log: Path) -> dict[str, int]:
    """Return how many decode lines of a log were of steps with and without a CUDA graph."""
    found = re.findall(r"Decode batch.*(?:cuda|cpu) graph: (True|False)", log.read_text(errors="replace"))
    return {"with": found.count("True"), "without": found.count("False")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(TIES), required=True)
    parser.add_argument("--steps", type=Path, required=True)
    parser.add_argument("--crossings", type=int, default=300)
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument(
        "--gap", type=float, default=float(cores.environment("AERIE_TOKENS_GAP") or 0), help="logits below which all is a tie"
    )
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME", help="other instances that are asked once")
    asked = parser.parse_args()
    begun = time.monotonic()
    homes = {name: asked.root / "instances" / f"tokens-{name}" for name in ("baseline", "dynamic")}
    baseline, dynamic = (client.Server(json.loads((home / "instance.json").read_text())["port"]) for home in homes.values())
    client.TIE = asked.gap if asked.gap and asked.dtype != "float32" else TIES[asked.dtype]
    check = Check(baseline, dynamic, mixed(baseline, asked.requests, asked.dtype == "float32"), asked.crossings)
    check.run()
    for name in asked.also:
        facts = json.loads((asked.root / "instances" / name / "instance.json").read_text())
        check.also(name, client.Server(facts["port"]))
    after_return = accepted(dynamic, repeats(baseline, max(8, asked.requests // 4)), asked.steps)
    said: dict[str, Any] = {
        "dtype": asked.dtype,
        "tie_below": client.TIE,
        "tokens_compared": sum(len(one.tokens) for answers in check.right.values() for one in answers),
        "checks": check.said,
        "acceptance": after_return,
        "used_tokens_when_idle": {"baseline": baseline.used_tokens_when_idle(), "dynamic": dynamic.used_tokens_when_idle()},
        "graphs": {name: graphs(home / "server.log") for name, home in homes.items()},
        "state": dynamic.state(),
        "seconds": round(time.monotonic() - begun, 1),
    }
    problems = [f"{one['name']}: {len(one['wrong'])} answers differ" for one in check.said if one["wrong"]]
    problems += [f"{one['name']}: crossed {one['crossings']} times only" for one in check.said if one["rounds"] == MOST_ROUNDS]
    problems += [f"{name} still uses {used} tokens" for name, used in said["used_tokens_when_idle"].items() if used]
    places = after_return["at_the_same_places"]
    if places["low"] < LOWEST_ACCEPTANCE:
        problems.append(f"acceptance after a return is {places['ratio']:.3f} of never off ({places['low']:.3f}–{places['high']:.3f})")
    if asked.dtype == "float32" and after_return["proposals_that_differ"] > places["verifications"] // MOST_OTHER_PROPOSALS:
        problems.append(f"{after_return['proposals_that_differ']} of {places['verifications']} proposals after a return differ")
    said["problems"] = problems
    (asked.out / f"tokens-{asked.dtype}.json").write_text(json.dumps(said, indent=1) + "\n")
    print(json.dumps({key: said[key] for key in ("acceptance", "used_tokens_when_idle", "graphs", "seconds")}, indent=1))
    crossings = sum(one["crossings"] for one in check.said)
    print(
        f"{asked.dtype}: {crossings} crossings, {said['tokens_compared']} tokens a round; " + ("; ".join(problems) or "nothing differs"),
        flush=True,
    )
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
