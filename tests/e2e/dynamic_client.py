"""A client that asks one server what another was asked, in waves of so many at once, and says where the answers differ.

Answers are compared token by token: with float32 and at temperature 0 they may differ only where the server that is taken for right has two
tokens of the same logit, as far as float32 can tell.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import queue
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIE = 1e-4
"""Logits of two tokens that lie less than this apart are a tie: sums of float32 in another order move them by about 1e-5."""
LOGPROB = 1e-4
"""How far a log probability may move with the order of sums."""


@dataclass(frozen=True)
class Case:
    """What one client says: a prompt, and after each answer one more turn."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    turns: tuple[tuple[int, ...], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    stream: bool = False
    abort: str | None = None
    """``drop``: the connection is dropped; ``request``: /abort_request names it. After ``abort_after`` tokens."""
    abort_after: int = 0


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    cached: int = 0
    """Tokens of the prompt that were in the prefix cache."""


Answers = Mapping[str, Sequence[Answer]]


class RefusedError(Exception):
    """The server answered with an error."""


class Server:
    def __init__(self, port: int, seconds: float = 300) -> None:
        self.port, self.seconds = port, seconds

    def open(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.seconds)
        connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def text(self, method: str, path: str, body: Any = None) -> str:
        connection, response = self.open(method, path, body)
        try:
            answer = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RefusedError(f"{method} {path}: {response.status}: {answer[:500]}")
        return answer

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.text(method, path, body))

    def tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.json("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    def change(self, **changes: Any) -> None:
        """Change the policy of dynamic speculation, while it runs."""
        answer = self.json("POST", "/set_internal_state", {"server_args": {"speculative_dynamic": changes}})
        if answer != [True]:
            raise RefusedError(f"the server did not take {changes}: {answer}")

    def state(self) -> dict[str, Any]:
        (state,) = self.json("GET", "/server_info")["internal_states"]
        value: dict[str, Any] = state["speculative_dynamic"]
        return value

    def metric(self, name: str) -> float:
        """Return a metric's sum over all its labels; 0 where it is not there (a counter that never counted)."""
        lines = self.text("GET", "/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def used_tokens_when_idle(self, seconds: float = 60) -> int:
        """Return how much of the KV pool is in use, but for the prefix cache, once no request runs; then empty that cache."""
        deadline = time.monotonic() + seconds
        while True:
            requests, used = self._load()
            if not (requests or used) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self.text("POST", "/flush_cache?timeout=10")
        return used

    def _load(self) -> tuple[int, int]:
        """Return the requests that run or wait, and the tokens in use."""
        try:
            (load,) = self.json("GET", "/v1/loads")["loads"]
        except RefusedError:
            # With metrics, 0.5.15 asks each of FastAPI's routes for its path, which those of a router have no more: only this one works.
            (load,) = self.json("GET", "/get_load")
            return load["num_reqs"], load["num_tokens"] - load["num_pending_tokens"]
        return load["num_running_reqs"] + load["num_waiting_reqs"], load["num_used_tokens"]

    def gap(self, prefix: Sequence[int], first: int, second: int) -> float:
        """Return how far apart two next tokens are after ``prefix``."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": list(prefix), "sampling_params": sampling, "return_logprob": True, "token_ids_logprob": [first, second]}
        (row,) = self.json("POST", "/generate", body)["meta_info"]["output_token_ids_logprobs"]
        by_token = {token: logprob for logprob, token, _ in row}
        return float(abs(by_token[first] - by_token[second]))


def ask(server: Server, name: str, case: Case, prompt: Sequence[int], whole: bool) -> Answer:
    body: dict[str, Any] = {
        "rid": name,
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": case.tokens, **case.sampling},
        "stream": case.stream or (case.abort is not None and not whole),
    }
    if case.logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    if not body["stream"]:
        return answer_of(server.json("POST", "/generate", body))
    connection, response = server.open("POST", "/generate", body)
    try:
        if response.status != 200:
            raise RefusedError(f"{name}: {response.status}: {response.read()[:500]!r}")
        return streamed(server, name, None if whole else case.abort, case.abort_after, response)
    finally:
        connection.close()


def streamed(server: Server, name: str, abort: str | None, abort_after: int, response: http.client.HTTPResponse) -> Answer:
    last: dict[str, Any] = {}
    asked = False
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        last = json.loads(line.removeprefix(b"data: "))
        if "error" in last:
            raise RefusedError(f"{name}: {last['error']}")
        if abort and not asked and len(last["output_ids"]) >= abort_after:
            asked = True
            if abort == "drop":
                return Answer(tuple(last["output_ids"]), "dropped")
            server.text("POST", "/abort_request", {"rid": name})
    return answer_of(last)


def answer_of(said: Mapping[str, Any]) -> Answer:
    about = said["meta_info"]
    return Answer(
        tuple(said["output_ids"]),
        json.dumps(about["finish_reason"]),
        tuple(value for value, _, _ in about.get("output_token_logprobs") or ()),
        tuple({token: value for value, token, _ in row} for row in about.get("output_top_logprobs") or ()),
        int(about.get("cached_tokens") or 0),
    )


def talk(server: Server, run: str, case: Case, whole: bool = False) -> list[Answer]:
    """Say all that a case says; each turn goes on from what the server answered."""
    said, answers = list(case.prompt), []
    for turn, more in enumerate([(), *case.turns]):
        said += more
        answers.append(ask(server, f"{run}/{case.name}/{turn}", case, said, whole))
        said += answers[-1].tokens
    return answers


def ask_all(server: Server, run: str, cases: Iterable[Case], waves: Iterable[int], whole: bool = False) -> dict[str, list[Answer]]:
    """Let as many clients as a wave says work at once, each through two cases, until all cases were asked; then the next wave.

    ``whole`` leaves out what would end an answer early: for the answers to compare with.
    """
    answers: dict[str, list[Answer]] = {}
    failed: list[str] = []
    left = list(cases)
    for clients in itertools.cycle(waves):
        wave, left = left[: 2 * clients], left[2 * clients :]
        if not wave:
            break
        waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in wave:
            waiting.put(case)

        def work(waiting: queue.SimpleQueue[Case] = waiting) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    case = waiting.get_nowait()
                    try:
                        answers[case.name] = talk(server, run, case, whole)
                    except (OSError, http.client.HTTPException, RefusedError, ValueError, KeyError) as error:
                        failed.append(f"{case.name}: {error!r}")

        threads = [threading.Thread(target=work) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise RefusedError(f"run {run}: " + "\n".join(failed))
    return answers


@contextlib.contextmanager
def meanwhile(server: Server, seed: int, choices: Sequence[Mapping[str, Any]], pauses: Sequence[float]) -> Iterator[list[int]]:
    """Change the policy at random while the block runs; the list that is given counts the changes."""
    chance, done, count = random.Random(seed), threading.Event(), [0]
    failed: list[Exception] = []

    def work() -> None:
        try:
            while not done.wait(chance.choice(pauses)):
                server.change(**chance.choice(choices))
                count[0] += 1
        except Exception as error:  # told to the test that waits for this
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield count
    finally:
        done.set()
        thread.join()
    if failed:
        raise failed[0]


def differences(right: Answers, got: Answers, cases: Sequence[Case], judge: Server | None = None) -> list[str]:
    """Return where answers differ from the right ones, each in one line; ties that ``judge`` sees are none.

    What was aborted must be how the right answer begins.
    """
    found = []
    for case in cases:
        said = list(case.prompt)
        for turn, (more, wanted, answer) in enumerate(zip([(), *case.turns], right[case.name], got[case.name], strict=True)):
            said += more
            where = f"{case.name}, turn {turn}, prompt of {len(said)}"
            cut = case.abort is not None and (answer.finish == "dropped" or '"abort"' in answer.finish)
            length = min(len(wanted.tokens), len(answer.tokens))
            at = next((i for i in range(length) if wanted.tokens[i] != answer.tokens[i]), length)
            if at == length and cut and len(answer.tokens) <= len(wanted.tokens):
                break
            if wanted.tokens != answer.tokens:
                first, second = wanted.tokens[at : at + 1], answer.tokens[at : at + 1]
                gap = judge.gap([*said, *wanted.tokens[:at]], first[0], second[0]) if judge and first and second else None
                if gap is not None and gap < TIE and not {"regex", "json_schema"} & set(case.sampling):
                    break
                found.append(
                    f"{where}: token {at} of {len(wanted.tokens)}: {list(wanted.tokens[at : at + 4])}, "
                    f"not {list(answer.tokens[at : at + 4])} (of {len(answer.tokens)}); logits {gap} apart"
                )
                break
            if wanted.finish != answer.finish:
                found.append(f"{where}: finished by {wanted.finish}, not {answer.finish}")
            found += [f"{where}: {one}" for one in logprob_differences(wanted, answer)]
            said += wanted.tokens
    return found


def logprob_differences(wanted: Answer, answer: Answer) -> Iterator[str]:
    if len(wanted.logprobs) != len(answer.logprobs) or len(wanted.top) != len(answer.top):
        yield f"{len(wanted.logprobs)} and {len(wanted.top)} log probabilities, not {len(answer.logprobs)} and {len(answer.top)}"
        return
    if answer.logprobs and len(answer.logprobs) != len(answer.tokens):
        yield f"{len(answer.logprobs)} log probabilities of {len(answer.tokens)} tokens"
    for at, (one, other) in enumerate(zip(wanted.logprobs, answer.logprobs, strict=True)):
        if abs(one - other) > LOGPROB:
            yield f"log probability {at}: {one}, not {other}"
    for at, (row, another) in enumerate(zip(wanted.top, answer.top, strict=True)):
        values = zip(sorted(row.values()), sorted(another.values()), strict=True)
        if any(abs(one - other) > LOGPROB for one, other in values):
            yield f"top log probabilities {at}: {row}, not {another}"


# What tests/e2e/cpu_server writes of each decode step


@dataclass(frozen=True)
class Row:
    """What one step gave one request: ``length`` tokens before it, ``given`` new ones; ``chain`` is what the draft had proposed."""

    case: str
    length: int
    given: int
    chain: tuple[int, ...] | None


@dataclass(frozen=True)
class Step:
    plain: bool
    rows: tuple[Row, ...]

    @property
    def width(self) -> int:
        """Tokens of each request that are verified."""
        return len(self.rows[0].chain or (0,))


def steps_of(path: Path, run: str) -> list[Step]:
    """Return the decode steps in which requests of ``run`` were."""
    steps = []
    for line in path.read_text().splitlines():
        ours = tuple(
            Row(name.removeprefix(f"{run}/"), length, given, tuple(chain) if chain else None)
            for name, length, given, chain in json.loads(line)
            if name.startswith(f"{run}/")
        )
        if ours:
            steps.append(Step(ours[0].chain is None, ours))
    return steps


def crossings(steps: Sequence[Step]) -> int:
    return sum(one.plain != other.plain for one, other in itertools.pairwise(steps))


@dataclass(frozen=True)
class Verified:
    """One verification of a request: tokens given, what was proposed, and how many since the request came back (None: it was never off)."""

    given: int
    chain: tuple[int, ...]
    since_return: int | None


def verified(steps: Sequence[Step]) -> dict[tuple[str, int], Verified]:
    """Return all verifications, by request and length."""
    since: dict[str, int | None] = {}
    found = {}
    for step in steps:
        for row in step.rows:
            if row.chain is None:
                since[row.case] = 0
                continue
            count = since.get(row.case)
            found[row.case, row.length] = Verified(row.given, row.chain, count)
            since[row.case] = None if count is None else count + 1
    return found


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def ratio_of_means(pairs: Mapping[str, Sequence[tuple[float, float]]], confidence: float = 0.9, draws: int = 2000) -> Interval:
    """Return the ratio of the means of second over first, with an interval by drawing whole requests: their steps are not independent."""
    groups = [values for values in pairs.values() if values]
    sums = [(sum(first for first, _ in values), sum(second for _, second in values)) for values in groups]

    def ratio(chosen: Sequence[tuple[float, float]]) -> float:
        return sum(second for _, second in chosen) / sum(first for first, _ in chosen)

    chance = random.Random(0)
    drawn = sorted(ratio(chance.choices(sums, k=len(sums))) for _ in range(draws))
    tail = (1 - confidence) / 2
    return Interval(ratio(sums), drawn[int(tail * draws)], drawn[int((1 - tail) * draws) - 1])


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
