"""A server that stops and resumes speculation answers as one that never speculates, and speculates as well as one that never stopped.

Real SGLang in float32 at temperature 0, with the trained pair of models/tiny. Beside the baseline one other server runs at a time. What it
really did is in a record of its steps (cpu_server/sitecustomize.py).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import inspect
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import dynamic_client as client
from dynamic_client import Answers, Case, Server
from ports import free_port
from runs import HOST_OF_TESTS, Run, playbook, processes_of

CPU_SERVER = Path(__file__).with_name("cpu_server")
CHECKED = {"SGLANG_IS_IN_CI": "true", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
"""SGLang asserts after each step that no KV is lost, and that no value of the step before is read twice."""
EAGLE3 = {"algorithm": "EAGLE3", "draft_model": "draft", "steps": 3, "topk": 1, "draft_tokens": 4}
OVERLAP = {"disable_overlap_schedule": False}
DEPTHS = {1: 3, 3: 2, 5: 1}
"""By the smallest number of requests that they are for."""
SMALL_POOL = {"max_total_tokens": 400, "chunked_prefill_size": 64, "schedule_conservativeness": 0.05}
HOPEFUL = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
"""Requests are let in as if each had no more than so many tokens to come."""


def arms(steps: Path) -> dict[str, Any]:
    spied = {"PYTHONPATH": str(CPU_SERVER), "AERIE_TEST_STEPS": str(steps), "AERIE_TEST_OVERLAP": "1", **CHECKED}
    dynamic: dict[str, Any] = {"speculation": EAGLE3, "flags": OVERLAP, "environment": spied, "dynamic": {"threshold": 4}}
    return {
        "baseline": {"speculation": None, "environment": CHECKED},
        "eagle3": {"speculation": EAGLE3, "flags": OVERLAP, "environment": spied},
        "dynamic": dynamic,
        "dynamic-without-overlap": dynamic | {"flags": {}, "environment": spied | {"AERIE_TEST_OVERLAP": "0"}},
        "dynamic-in-a-small-pool": dynamic | {"flags": OVERLAP | SMALL_POOL, "environment": spied | HOPEFUL},
        "dynamic-without-catch-up": dynamic | {"environment": spied | {"AERIE_DYNAMIC_CATCHUP": "none"}},
        "dynamic-in-depths": dynamic | {"flags": OVERLAP | adaptive(steps.with_name("adaptive.json"))},
    }


def adaptive(path: Path) -> dict[str, Any]:
    """Return the flags with which SGLang drafts fewer tokens the more requests run."""
    path.write_text(json.dumps({str(size): {"candidate_steps": [steps]} for size, steps in DEPTHS.items()}))
    return {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}


class Host:
    """This machine as a host of its own: the baseline serves all the time, the other instance with one arm after the other."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch, self.steps, self.arm = root, scratch, scratch / "steps.jsonl", ""
        self.ports = {"baseline": free_port(), "other": free_port()}
        self.baseline, self.other = (Server(port) for port in self.ports.values())
        self.runs = itertools.count(1)

    def run(self, *arguments: str, arm: str = "dynamic") -> Run:
        instances = {
            name: {"arm": "baseline" if name == "baseline" else arm, "model": "target", "port": port} for name, port in self.ports.items()
        }
        variables = {
            "aerie_root": str(self.root),
            "aerie_results": str(self.scratch / "results"),
            "sglang_patches_sets": ["phase_profiler", "dynamic_speculation", "flashinfer_prefill_plan"],
            "sglang_server_arms": arms(self.steps),
            "sglang_server_instances": instances,
            "sglang_server_flags": {"grammar_backend": "xgrammar"},
        }
        return playbook(*arguments, variables=variables, scratch=self.scratch)

    def serve(self, arm: str) -> Server:
        """Have the other instance serve with an arm, as a new server that never switched."""
        if arm != self.arm:
            self.run("playbooks/start.yml", arm=arm).require_success()
            self.arm = arm
        return self.other

    @property
    def log(self) -> str:
        return (self.root / "instances/other/server.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = HOST_OF_TESTS.with_name("dynamic")
    made = Host(root, tmp_path_factory.mktemp("dynamic"))
    if processes_of(root):  # an earlier run of the tests was cut off
        made.run("playbooks/stop.yml", "-e", "aerie_lease_break=true")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name in ("environments", "packages"):
        (root / name).symlink_to(HOST_OF_TESTS / name)
    made.run("deploy_eagle3.yml", "--skip-tags", "benchmark").require_success()
    made.arm = "dynamic"
    yield made
    if processes_of(root):
        made.run("playbooks/stop.yml", "-e", "aerie_lease_break=true")


def in_release(host: Host, script: str) -> str:
    """Run a script beside this one in the release's Python, and return what it prints."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [host.root / "current/bin/python", Path(__file__).with_name(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_waits_for_the_draft_is_written_as_if_each_position_had_been_at_once(host: Host) -> None:
    printed = in_release(host, "dynamic_backlog.py")
    said = re.fullmatch(r"compared (\d+) positions of plain steps, in (\d+) flushes\s*", printed)
    assert said and int(said[1]) > 10_000 and int(said[2]) > 500, printed


def test_prompts_own_the_slots_of_their_first_steps_and_no_slot_is_lost_or_has_two_owners(host: Host) -> None:
    printed = in_release(host, "dynamic_slots.py")
    said = re.fullmatch(r"(\d+) prompts, (\d+) of (\d+) steps after one and (\d+) of (\d+) in all found their slots\s*", printed)
    assert said and int(said[3]) > 500 and int(said[4]) < int(said[5]), printed


def test_plain_steps_borrow_buffers_have_rank_0s_tokens_and_refuse_other_pools(host: Host) -> None:
    printed = in_release(host, "dynamic_guards.py")
    counts = re.fullmatch(r"(\d+) bytes lent, (\d+) kinds of KV pool refused\s*", printed)
    assert counts and int(counts[1]) > 10_000_000 and int(counts[2]) >= 14, printed


def test_prefills_are_planned_with_lengths_of_the_host_that_are_those_of_the_gpu(host: Host) -> None:
    printed = in_release(host, "prefill_plan.py")
    said = re.fullmatch(r"(\d+) plans with lengths of the host, (\d+) cases left alone\s*", printed)
    assert said and int(said[1]) == 800 and int(said[2]) == 9, printed


# What is asked


@pytest.fixture(scope="module")
def cases(host: Host) -> list[Case]:
    """Requests of all kinds, mixed: each kind is asked beside all others."""
    chance = random.Random(5)
    text = [host.baseline.tokens_of(inspect.getsource(module)) for module in (argparse, csv, textwrap)]

    def stretch(length: int) -> tuple[int, ...]:
        source = chance.choice(text)
        start = chance.randrange(len(source) - length)
        return source[start : start + length]

    free = {"ignore_eos": True}
    shared = stretch(90)
    made = [Case(f"length {n}", stretch(n), chance.choice((1, 2, 9, 33, 64, 100)), sampling=free) for n in (3, 8, 17, 40, 64, 129, 300)]
    made += [Case(f"shared prefix {n}", shared[:n] + stretch(12), 24 + n % 7, sampling=free) for n in (20, 41, 63, 90)]
    made += [Case(f"may end {n}", stretch(n), 80) for n in (12, 50)]
    made += [Case(f"conversation {n}", stretch(30), 25 + n, (stretch(9), stretch(15)), free) for n in range(4)]
    made += [stopped(host.baseline, f"stop {what} {n}", stretch(40), what) for what in ("string", "token") for n in range(2)]
    made += [Case(f"log probabilities {n}", stretch(30), 40, (stretch(8),) * n, free, logprobs=True) for n in range(3)]
    made += [Case(f"streamed {n}", stretch(25), 30 + 10 * n, sampling=free, stream=True) for n in range(3)]
    made += [Case(f"dropped {n}", stretch(30), 120, sampling=free, abort="drop", abort_after=5 + 9 * n) for n in range(3)]
    made += [Case(f"aborted {n}", stretch(30), 120, sampling=free, abort="request", abort_after=3 + 9 * n) for n in range(3)]
    made += [Case(f"regex {n}", stretch(20), 60, sampling={"regex": regex}) for n, regex in enumerate(REGEXES)]
    made += [Case(f"schema {n}", stretch(20), 90, (stretch(8),) * n, {"json_schema": json.dumps(SCHEMA)}) for n in range(2)]
    chance.shuffle(made)
    return made


def stopped(baseline: Server, name: str, prompt: tuple[int, ...], what: str) -> Case:
    """Return a case that stops somewhere in the middle: at what the baseline answers there for the first time."""
    case = Case(name, prompt, 80)
    tokens = client.ask(baseline, f"what/{name}", dataclasses.replace(case, sampling={"ignore_eos": True}), prompt, True).tokens
    at = max(range(60), key=lambda place: tokens.index(tokens[place]))
    text = baseline.json("POST", "/detokenize", {"tokens": list(tokens[at - 2 : at + 2])})["text"]
    return dataclasses.replace(case, sampling={"stop": [text]} if what == "string" else {"stop_token_ids": [tokens[at]]})


REGEXES = (r"(def|class) [a-z_]{3,9}\([a-z]{1,5}(, [a-z]{1,5}){0,3}\):", r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [A-Z]{2,5}){3}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "size"],
}


@pytest.fixture(scope="module")
def many(host: Host, cases: list[Case]) -> list[Case]:
    """The cases among short ones, so that requests begin and end all the time."""
    chance = random.Random(7)
    text = host.baseline.tokens_of(inspect.getsource(csv))
    made = []
    for number in range(120):
        start = chance.randrange(len(text) - 30)
        prompt = text[start : start + chance.randrange(2, 30)]
        made.append(Case(f"short {number}", prompt, chance.randrange(1, 12), sampling={"ignore_eos": True}))
    return chance.sample([*cases, *made], len(cases) + len(made))


@pytest.fixture(scope="module")
def right(host: Host, cases: list[Case]) -> Answers:
    """What the baseline answers."""
    return client.ask_all(host.baseline, "right", cases, [8], whole=True)


@pytest.fixture(scope="module")
def right_of_many(host: Host, right: Answers, many: list[Case]) -> Answers:
    short = [case for case in many if case.name not in right]
    return {**right, **client.ask_all(host.baseline, "right", short, [8], whole=True)}


@dataclasses.dataclass(frozen=True)
class Asked:
    """One run of cases against the other server: what was answered, how often it says that it switched, its steps and its log."""

    answers: Answers
    switches: int
    steps: Sequence[client.Step]
    log: str


def ask(host: Host, cases: Sequence[Case], waves: Sequence[int]) -> Asked:
    """Ask the other server with an empty prefix cache."""
    assert host.other.used_tokens_when_idle() == 0
    run = f"run{next(host.runs)}"
    before, log = host.other.state()["switches"], len(host.log)
    answers = client.ask_all(host.other, run, cases, waves)
    return Asked(answers, host.other.state()["switches"] - before, client.steps_of(host.steps, run), host.log[log:])


def same(host: Host, asked: Asked, right: Answers, cases: Sequence[Case]) -> None:
    """Answers are the baseline's, but for one tie at most; and the server has lost no KV and noticed nothing."""
    found = client.differences(right, asked.answers, cases)
    assert len(found) <= 1, found
    assert not found or client.differences(right, asked.answers, cases, host.baseline) == []
    assert host.other.used_tokens_when_idle() == 0
    assert re.findall(r".*Traceback.*|.*[Ll]eak.*", asked.log) == []


LOAD = {"high": 3, "low": 3, "min_dwell_steps": 0, "force": None, "flip_every": 0}
"""Four clients cross it whenever one of them begins or ends."""
WAVES = (2, 12, 1, 8)
CROSSING = (4, 4, 8, 4)
AT_RANDOM: tuple[Mapping[str, Any], ...] = (
    {"high": 0, "low": 0},
    {"high": 1},
    {"high": 2, "low": 1, "min_dwell_steps": 2},
    {"high": 6, "low": 3},
    {"high": 20, "low": 9, "min_dwell_steps": 0},
    {"force": "plain"},
    {"force": "speculative"},
    {"force": None, "flip_every": 2},
    {"force": None, "flip_every": 0},
)


# Proposals


@pytest.fixture(scope="module")
def repeats(host: Host) -> list[Case]:
    """Text that repeats itself, so that what comes next stands far back: a draft that lost its KV can't know it."""
    chance = random.Random(11)
    text = host.baseline.tokens_of(inspect.getsource(argparse))
    made = []
    for number in range(16):
        start = chance.randrange(len(text) - 100)
        block = text[start : start + chance.randrange(20, 50)]
        made.append(Case(f"repeat {number}", block * 3 + block[:9], 70, (block[9:20],), {"ignore_eos": True}))
    return made


Verifications = Mapping[tuple[str, int], client.Verified]


@pytest.fixture(scope="module")
def never_off(host: Host, repeats: list[Case]) -> Verifications:
    """What the draft proposes, and what of it is accepted, where speculation is never off."""
    host.serve("dynamic").change(**LOAD | {"force": "speculative"})
    asked = ask(host, repeats, [6])
    assert not any(step.plain for step in asked.steps)
    return client.verified(asked.steps)


def after_return(host: Host, arm: str, repeats: Sequence[Case]) -> Verifications:
    host.serve(arm).change(**LOAD | {"flip_every": 3})
    asked = ask(host, repeats, [6])
    assert client.crossings(asked.steps) >= 60
    return client.verified(asked.steps)


def acceptance(never_off: Verifications, after: Verifications) -> tuple[client.Interval, client.Interval]:
    """Return acceptance after a return over never-off: where both verified at the same places, and over all that each was given."""
    returned = {key: one for key, one in after.items() if one.since_return is not None}
    requests = {name for name, _ in never_off} & {name for name, _ in returned}
    shared = never_off.keys() & returned.keys()
    paired = {name: [(never_off[key].given, returned[key].given) for key in shared if key[0] == name] for name in requests}
    means = {
        name: [tuple(client.mean(one.given for key, one in some.items() if key[0] == name) for some in (never_off, returned))]
        for name in requests
    }
    return client.ratio_of_means(paired), client.ratio_of_means(means)


def test_the_draft_proposes_after_a_return_what_it_would_have_proposed_and_as_much_is_accepted(host, repeats, never_off):
    after = after_return(host, "dynamic", repeats)
    shared = never_off.keys() & after.keys()
    other = [key for key in shared if never_off[key].chain != after[key].chain]
    assert sum(after[key].since_return is not None for key in shared) >= 300
    state = host.other.state()
    # Of some 26 prompts that come while others run those that meet a plain stretch of three steps: 7 to 12, by what the client's timing is.
    assert state["fills"] >= 5, "prompts that the draft never ran for"
    assert state["reserved_prompts"] >= 5, "prompts whose first plain steps found their slots"
    assert state["spared_allocations"] >= 100
    assert len(other) <= len(shared) // 500, f"{len(other)} of {len(shared)} proposals differ, such as {other[:3]}"
    at_the_same_places, overall = acceptance(never_off, after)
    assert 0.99 < at_the_same_places.low <= at_the_same_places.high < 1.01
    assert 0.93 < overall.low < 1.02
    assert overall.high > 0.98


# Answers


def test_a_token_or_a_log_probability_that_differs_is_told():
    """What the tests below compare by."""
    case = Case("asked", (1, 2), 3, ((3,),), logprobs=True)
    answer = client.Answer((5, 6, 7), "length", (-1.0, -2.0, -3.0), ({5: -1.0, 8: -1.5},) * 3)

    def told(**changes: Any) -> list[str]:
        return client.differences({"asked": [answer] * 2}, {"asked": [answer, dataclasses.replace(answer, **changes)]}, [case])

    assert told() == []
    for changes in ({"tokens": (5, 6, 8)}, {"tokens": (5, 6)}, {"finish": "stop"}, {"logprobs": (-1.0, -2.0, -3.01)}, {"logprobs": ()}):
        assert "asked, turn 1, prompt of 6" in told(**changes)[0]
    cut = dataclasses.replace(answer, tokens=(5, 9), finish="dropped")
    aborted = dataclasses.replace(case, turns=(), abort="drop")
    assert client.differences({"asked": [answer]}, {"asked": [cut]}, [aborted]) != []
    assert client.differences({"asked": [answer]}, {"asked": [dataclasses.replace(cut, tokens=(5, 6))]}, [aborted]) == []


def test_the_cases_are_what_they_are_called(host, right, cases):
    """Without this, the tests below could compare nothing."""
    finish = {name: [json.loads(answer.finish) for answer in answers] for name, answers in right.items()}
    cases_by_name = {case.name: case for case in cases}
    for n in range(2):
        assert finish[f"stop string {n}"][0]["matched"] in cases_by_name[f"stop string {n}"].sampling["stop"]
        assert [finish[f"stop token {n}"][0]["matched"]] == cases_by_name[f"stop token {n}"].sampling["stop_token_ids"]
        assert min(len(right[f"stop {what} {n}"][0].tokens) for what in ("string", "token")) > 3
    assert all(len(answer.logprobs) == len(answer.top) == 40 for answer in right["log probabilities 2"])
    assert all(right[f"conversation {n}"][turn].cached > 30 for n in range(4) for turn in (1, 2)), "second turns hit the prefix cache"
    assert any(right[f"shared prefix {n}"][0].cached for n in (20, 41, 63, 90))
    texts = {name: host.baseline.json("POST", "/detokenize", {"tokens": list(right[name][0].tokens)})["text"] for name in right}
    for n, regex in enumerate(REGEXES):
        assert re.fullmatch(regex, texts[f"regex {n}"].removesuffix("</s>")), texts[f"regex {n}"]
    assert set(json.loads(texts["schema 0"].removesuffix("</s>"))) == {"name", "size"}


SMALL = pytest.param("dynamic-in-a-small-pool", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=["dynamic", pytest.param("dynamic-without-overlap", marks=pytest.mark.long), SMALL])
def dynamic(request: pytest.FixtureRequest, host: Host) -> Server:
    return host.serve(request.param)


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.long), 6, pytest.param(24, marks=pytest.mark.long)])
def test_answers_are_the_baselines_while_the_mode_flips_every_few_steps(host, dynamic, right, cases, every):
    dynamic.change(**LOAD | {"flip_every": every})
    asked = ask(host, cases, WAVES)
    same(host, asked, right, cases)
    assert asked.switches >= len(asked.steps) // every - 1 > 0
    assert sum(bool(answer.cached) for answers in asked.answers.values() for answer in answers) >= 3, "the prefix cache was hit"
    cut = [answer.finish for name, answers in asked.answers.items() for answer in answers if name.startswith(("dropped", "aborted"))]
    assert cut.count("dropped") == 3
    assert sum('"abort"' in finish for finish in cut) == 3


@pytest.mark.long
def test_answers_are_the_baselines_while_load_crosses_the_threshold(host, dynamic, right_of_many, many):
    dynamic.change(**LOAD)
    until_crossed(200, host, right_of_many, many)


@pytest.mark.long
def test_answers_are_the_baselines_while_an_operator_changes_the_policy_at_random(host, dynamic, right_of_many, many):
    dynamic.change(**LOAD)
    with client.meanwhile(dynamic, 1, AT_RANDOM, (0.02, 0.05, 0.1, 0.3)) as changes:
        until_crossed(200, host, right_of_many, many)
    assert changes[0] >= 50


def until_crossed(times: int, host: Host, right: Answers, cases: Sequence[Case]) -> None:
    """Ask everything again until the mode has switched so many times."""
    crossed = 0
    for _ in range(12):
        asked = ask(host, cases, CROSSING)
        same(host, asked, right, cases)
        crossed += asked.switches
        if crossed >= times:
            return
    pytest.fail(f"the mode switched {crossed} times only")


def test_what_the_server_says_of_its_mode_is_what_it_did(host, dynamic, cases):
    """The counters that the tests above rely on."""
    dynamic.change(**LOAD | {"flip_every": 5})
    before, counted = dynamic.state(), dynamic.metric("sglang:aerie_dynamic_switches_total")
    asked = ask(host, cases[:12], [6])
    after = dynamic.state()
    assert abs(asked.switches - client.crossings(asked.steps)) <= 1
    for kind, plain in (("plain", True), ("speculative", False)):
        assert after["steps"][kind] - before["steps"][kind] == sum(step.plain is plain for step in asked.steps)
    assert 0 < after["resumes"] - before["resumes"] <= asked.switches // 2 + 1, "the draft catches up once for each return"
    dynamic.change(flip_every=0, force="plain")
    ask(host, cases[:2], [1])
    assert dynamic.state()["mode"] == "plain"
    assert dynamic.metric("sglang:aerie_dynamic_plain") == 1
    assert dynamic.metric("sglang:aerie_dynamic_switches_total") - counted == dynamic.state()["switches"] - before["switches"]


@pytest.mark.parametrize("dynamic", ["dynamic-in-depths"], indirect=True)
def test_answers_are_the_baselines_while_depth_and_mode_change_with_load_and_by_hand(host, dynamic, right, cases):
    assert dynamic.state()["candidate_steps"] == [1, 2, 3]
    dynamic.change(**LOAD | {"high": 7, "low": 6})
    asked = ask(host, cases, (12, 2, 5, 12, 3))
    same(host, asked, right, cases)
    assert {step.width for step in asked.steps if not step.plain} == {steps + 1 for steps in DEPTHS.values()}
    for step in asked.steps:
        expected = max(size for size in DEPTHS if size <= len(step.rows))
        assert step.plain or step.width == DEPTHS[expected] + 1
    assert client.crossings(asked.steps) >= 1

    dynamic.change(**LOAD | {"flip_every": 4, "num_steps": 1})
    forced = ask(host, cases, WAVES)
    same(host, forced, right, cases)
    assert {step.width for step in forced.steps if not step.plain} == {2}
    with pytest.raises(client.RefusedError):
        dynamic.change(num_steps=5)
    assert dynamic.state()["refused"] == "num_steps must be one of 1, 2, 3 (is 5)"
    dynamic.change(num_steps=None)


@pytest.mark.parametrize("dynamic", [SMALL], indirect=True)
def test_answers_are_the_baselines_while_a_small_pool_takes_requests_back_and_prefills_in_chunks(host, dynamic, right, cases):
    dynamic.change(**LOAD | {"flip_every": 2})
    before = dynamic.metric("sglang:num_retracted_requests_total")
    asked = ask(host, cases, [16])
    same(host, asked, right, cases)
    assert dynamic.metric("sglang:num_retracted_requests_total") - before >= 5
    assert "KV cache pool is full. Retract requests." in asked.log
    assert SMALL_POOL["chunked_prefill_size"] < max(len(case.prompt) for case in cases)


# Servers to compare these with


@pytest.mark.long
def test_a_server_that_does_not_catch_up_shows_that_these_tests_can_fail(host, repeats, never_off):
    after = after_return(host, "dynamic-without-catch-up", repeats)
    shared = never_off.keys() & after.keys()
    assert sum(never_off[key].chain != after[key].chain for key in shared) > len(shared) // 10
    at_the_same_places, overall = acceptance(never_off, after)
    assert at_the_same_places.high < 0.98
    assert overall.high < 0.95


@pytest.mark.long
def test_an_eagle3_server_answers_and_proposes_the_same_as_a_dynamic_one_that_is_never_off(host, right, cases, repeats, never_off):
    server = host.serve("eagle3")
    assert client.differences(right, client.ask_all(server, "eagle3", cases, WAVES), cases, host.baseline) == []
    assert server.used_tokens_when_idle() == 0
    client.ask_all(server, "alone", repeats, [6])
    alone = client.verified(client.steps_of(host.steps, "alone"))
    shared = alone.keys() & never_off.keys()
    assert len(shared) >= 0.95 * len(never_off)
    assert sum(alone[key].chain != never_off[key].chain for key in shared) <= len(shared) // 500
