"""Golden prompts: what passes, what does not, and what is never compared in silence."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_json
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import golden
from ansible.module_utils.aerie.serving.service_supervisor import Supervisor
from ansible.module_utils.testing import patch_module_args

import golden_prompts

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
OLD, NEW = "0.5.15-0123456789ab", "0.5.23-ba9876543210"
MODELS = {"target": "11aa", "draft": "22bb"}


def subject(release: str = NEW, **changes: Any) -> golden.Subject:
    facts: dict[str, Any] = {"sglang_version": "0.5.23", "arm": "eagle3", "kind": "EAGLE3", "models": MODELS}
    return golden.Subject(release=release, **{**facts, **changes})


def answers(
    tokens: list[int],
    gaps: list[float] | None = None,
    dtype: str = "bfloat16",
    prompts: str = "p",
    load_format: str = "auto",
    **changes: Any,
) -> golden.Answers:
    return golden.Answers(
        subject=subject(**changes),
        when="2026-01-01T00:00:00Z",
        prompts=prompts,
        numbers={"dtype": dtype, "quantization": None, "kv_cache_dtype": "auto", "load_format": load_format},
        flushed=True,
        answers={"prose": golden.Answer(tuple(tokens), None if gaps is None else tuple(gaps))},
    )


@pytest.mark.parametrize(
    ("dtype", "gaps", "outcome", "words"),
    [
        ("bfloat16", [3.0, 0.2, 4.0], golden.ALLOWED, "prose: diverged at 1, gap 0.2 (allowed)"),
        ("bfloat16", [3.0, 0.25, 4.0], golden.DIFFERENT, "prose: diverged at 1, gap 0.25 (not allowed)"),
        ("bfloat16", [0.0, 9.0, 0.0], golden.DIFFERENT, "prose: diverged at 1, gap 9 (not allowed)"),
        ("bfloat16", [3.0, math.nan, 4.0], golden.DIFFERENT, "prose: diverged at 1, gap nan (not allowed)"),
        ("bfloat16", None, golden.DIFFERENT, "prose: diverged at 1, gap unknown (not allowed)"),
        ("float32", [3.0, 0.0001, 4.0], golden.DIFFERENT, "prose: diverged at 1, gap 0.0001 (not allowed)"),
    ],
)
def test_an_answer_may_part_only_where_the_choice_was_close_and_never_in_float32(dtype, gaps, outcome, words):
    found = golden.compare(answers([7, 8, 9], gaps, dtype), answers([7, 5, 5], None, dtype), 0.25)
    assert (found.outcome, str(found.prompts[0])) == (outcome, words)
    assert words in str(found)


def test_nothing_is_compared_behind_the_first_place_that_differs():
    before, after = answers([1, 2, 3, 4], [9.0, 0.1, 9.0, 9.0]), answers([1, 7, 3, 8])
    assert golden.compare(before, after).prompts == (golden.PromptResult("prose", golden.ALLOWED, 1, 0.1),)


def test_equal_answers_are_equal_with_and_without_logprobs():
    for gaps in ([1.0, 1.0], None):
        assert golden.compare(answers([1, 2], gaps), answers([1, 2])).outcome == golden.EQUAL


def test_an_answer_that_ends_earlier_differs_where_it_ends():
    found = golden.compare(answers([1, 2, 3], [9.0, 9.0, 9.0]), answers([1, 2]))
    assert (found.outcome, found.prompts[0].at) == (golden.DIFFERENT, 2)


def test_one_bad_prompt_decides_over_all_that_are_equal():
    before, after = answers([1, 2], [9.0, 9.0]), answers([1, 2])
    many = {"a": golden.Answer((1,), (9.0,)), **before.answers}
    other = {"a": golden.Answer((2,), None), **after.answers}
    found = golden.compare(
        golden.Answers(**{**vars(before), "answers": many}),
        golden.Answers(**{**vars(after), "answers": other}),
    )
    assert found.outcome == golden.DIFFERENT
    assert "1 of 2 golden prompts answered token for token" in str(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"simulated": "2.5"}, "SGLANG_SIMULATE_ACC_LEN=2.5"),
        ({"dummy": True}, "dummy weights"),
        ({"load_format": "dummy"}, "dummy weights"),
        ({"prompts": "others"}, "other prompts"),
        ({"kind": "no speculation"}, "arms are of two kinds (EAGLE3 before, no speculation now)"),
        ({"models": {"target": "33cc", "draft": "22bb"}}, "target is another model"),
        ({"models": {"target": None, "draft": None}}, "no identity"),
        ({"models": {}}, "no identity"),
    ],
)
def test_what_says_nothing_is_not_compared_and_says_why_loudly(changes, words):
    before, after = answers([1]), answers([2], **changes)
    found = golden.compare(before, after)
    assert found.outcome == golden.NOT_COMPARED
    assert words in str(found)
    assert str(found).startswith("golden prompts were NOT compared")


def test_another_version_of_sglang_is_compared_by_the_same_rule():
    before, after = answers([1], [9.0], release=OLD, sglang_version="0.5.15"), answers([1])
    assert golden.compare(before, after).outcome == golden.EQUAL


@pytest.mark.parametrize(
    ("record", "simulated", "dummy", "kind"),
    [
        ({"environment": {"SGLANG_SIMULATE_ACC_LEN": "2.4"}, "argv": ["--dtype", "auto"]}, "2.4", False, "no speculation"),
        ({"environment": {"SGLANG_SIMULATE_ACC_LEN": "-1"}, "argv": ["--load-format", "dummy"]}, None, True, "no speculation"),
        ({"arm": {"name": "e", "speculation": {"algorithm": "EAGLE3"}}, "argv": ["--load-format=dummy"]}, None, True, "EAGLE3"),
        ({"argv": ["--served-model-name", "dummy"]}, None, False, "no speculation"),
    ],
)
def test_what_makes_answers_meaningless_is_read_from_the_instance(record, simulated, dummy, kind):
    found = golden.Subject.of(record)
    assert (found.simulated, found.dummy, found.kind) == (simulated, dummy, kind)


def test_answers_are_kept_by_release_and_those_of_releases_that_are_gone_go(tmp_path):
    paths = HostPaths(tmp_path)
    for release in (OLD, NEW):
        paths.release(release).mkdir(parents=True)
    golden.keep(paths, "main", answers([1], [0.5], release=OLD))
    golden.keep(paths, "main", answers([2], release=NEW))
    assert golden.kept(paths, "main") == {OLD: answers([1], [0.5], release=OLD), NEW: answers([2], release=NEW)}
    paths.release(OLD).rmdir()
    golden.keep(paths, "main", answers([3], release=NEW))
    assert list(golden.kept(paths, "main")) == [NEW]
    golden.kept_path(paths, "main").write_text('{"schema": "aerie-golden/1", "answers": {"x": {}}}')
    assert golden.kept(paths, "main") == {}


def test_all_that_is_wrong_with_prompts_is_told_at_once():
    with pytest.raises(AerieError, match="3 problems") as raised:
        golden.read_prompts([{"name": "a", "text": "x"}, {"name": "a", "text": "y"}, {"name": "b", "text": " "}, {"name": "c"}])
    assert "kills SGLang's scheduler" in str(raised.value)


def test_the_prompts_that_come_along_are_few_short_and_of_different_kinds():
    prompts = golden.read_prompts(json.loads((PROJECT / "experiments/prompts/golden.json").read_text()))
    assert 8 <= len(prompts) <= 12
    assert all(prompt.text.isascii() for prompt in prompts), "a tiny tokenizer knows nothing else"
    assert max(len(prompt.text) for prompt in prompts) < 1000, "with their answers they must fit into a small model's 2048 tokens"
    starts = [prompt.text[:4] for prompt in prompts]
    assert len(set(starts)) == len(starts), "equal beginnings would be found in the prefix cache"


# The module, against a real HTTP server


class Host:
    """A root with one instance whose server is fake_golden_server.py."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.paths, self.capsys = root, HostPaths(root), capsys
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    def serve(self, release: str, models: dict[str, str] = MODELS, environment: dict[str, str] | None = None, **steering: Any) -> None:
        """Serve as ``release``; ``steering`` is the fake server's own."""
        self.stop()
        write_json(self.paths.release(release) / "release.json", {"id": release})
        self.paths.current.unlink(missing_ok=True)
        self.paths.current.symlink_to(Path("releases") / release)
        self.process = subprocess.Popen([sys.executable, str(HERE / "fake_golden_server.py"), str(self.port), json.dumps(steering)])
        record = {
            "name": "main",
            "state": "ready",
            "release": release,
            "sglang_version": release.partition("-")[0],
            "arm": {"name": "eagle3", "speculation": {"algorithm": "EAGLE3"}},
            "models": {role: {"identity": identity} for role, identity in models.items()},
            "environment": environment or {},
            "argv": [],
            "host": "127.0.0.1",
            "port": self.port,
            "service_manager": "supervisor",
        }
        write_json(self.paths.instance("main") / "instance.json", record)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the fake server did not listen")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def run(self, state: str = "asked", check: bool = False, **more: Any) -> dict[str, Any]:
        prompts = [{"name": name, "text": f"{name} upon a time"} for name in ("once", "never")]
        arguments = {"root": str(self.root), "state": state, "prompts": prompts, "service_manager": "supervisor", **more}
        with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
            golden_prompts.main()
        answer: dict[str, Any] = json.loads(self.capsys.readouterr().out)
        return answer

    def compare(self, **more: Any) -> dict[str, Any]:
        return self.run("compared", against={"main": OLD}, **more)


def warned(result: dict[str, Any]) -> str:
    return json.dumps(result["warnings"])


@pytest.fixture
def host(tmp_path, monkeypatch, capsys):
    made = Host(tmp_path, capsys)
    # The service manager's part is tested with real ones elsewhere; here it knows the process that was started.
    monkeypatch.setattr(Supervisor, "main_pid", lambda _self, _name: made.process.pid if made.process else None)
    yield made
    made.stop()


def test_answers_are_asked_kept_and_compared_with_those_of_another_release(host):
    host.serve(OLD)
    before = host.run()
    assert (before["running"], before["releases"]) == (["main"], {"main": OLD})
    host.serve(NEW)
    after = host.compare()
    assert after["compared"]["main"]["outcome"] == golden.EQUAL
    assert after["summary"] == [
        "main: 2 of 2 golden prompts answered token for token as before (may diverge where the best two logits were closer than 0.25)"
    ]
    assert set(golden.kept(host.paths, "main")) == {OLD, NEW}


def test_another_answer_at_a_clear_choice_fails_and_is_not_kept(host):
    host.serve(OLD)
    host.run()
    host.serve(NEW, other_at=3)
    after = host.compare()
    assert after["failed"]
    assert f"instance main (release {NEW}) does not answer as it did with release {OLD}" in after["msg"]
    assert "once: diverged at 3, gap 5 (not allowed)" in after["msg"]
    assert set(golden.kept(host.paths, "main")) == {OLD}


def test_another_answer_at_a_close_choice_passes_and_is_told(host):
    host.serve(OLD, gap=0.125)
    host.run()
    host.serve(NEW, other_at=3)
    after = host.compare()
    assert not after.get("failed")
    assert after["compared"]["main"]["outcome"] == golden.ALLOWED
    assert "once: diverged at 3, gap 0.125 (allowed)" in after["summary"][0]
    host.serve(OLD, gap=0.125)
    host.run()
    host.serve(NEW, other_at=3)
    assert host.compare(logit_gap=0.1)["failed"]


def test_float32_must_answer_token_for_token_however_close_the_choice(host):
    host.serve(OLD, gap=0.0001, dtype="float32")
    host.run()
    host.serve(NEW, other_at=47, dtype="float32")
    assert "float32: all must be equal" in host.compare()["msg"]


@pytest.mark.parametrize("logprobs", ["first", "refused"])
def test_a_server_that_tells_no_logprobs_is_compared_by_tokens_only_and_says_so(host, logprobs):
    host.serve(OLD, logprobs=logprobs)
    assert "without logprobs, so that only tokens can be compared" in host.run()["summary"][0]
    host.serve(NEW, logprobs=logprobs)
    after = host.compare()
    assert after["compared"]["main"]["outcome"] == golden.EQUAL
    assert "as the release before told no logprobs" in after["summary"][0]
    host.serve(NEW, other_at=3)
    assert "gap unknown (not allowed)" in host.compare()["msg"]


def test_traffic_that_keeps_the_prefix_cache_from_being_emptied_is_told(host, monkeypatch):
    monkeypatch.setattr(golden, "FLUSH_SECONDS", 0.3)
    host.serve(OLD, busy=True)
    assert "beside other traffic" in host.run()["summary"][0]


def test_what_was_not_compared_is_warned_about_and_never_passes_in_silence(host):
    host.serve(OLD)
    host.run()
    host.serve(NEW, environment={"SGLANG_SIMULATE_ACC_LEN": "2.5"}, other_at=0)
    after = host.compare()
    assert after["compared"]["main"]["outcome"] == golden.NOT_COMPARED
    assert "NOT compared: release 0.5.23-ba9876543210 ran with SGLANG_SIMULATE_ACC_LEN=2.5" in warned(after)
    for without in (host.compare(prompts=[]), host.run("compared", against={"main": "0.5.9-000000000000"})):
        assert "NOT compared" in warned(without)
    assert "NOT asked" in warned(host.run(prompts=[]))


def test_a_server_that_is_gone_is_told_before_and_a_failure_after(host):
    host.serve(OLD)
    host.run()
    host.stop()
    before = host.run()
    assert (before["running"], before["down"], before["releases"]) == ([], ["main"], {})
    assert not before.get("failed")
    assert "main: does not run" in before["summary"][0]
    assert "instance main does not answer any more: it does not run" in host.compare()["msg"]


def test_a_server_that_runs_and_does_not_answer_is_no_failure_before(host):
    host.serve(OLD)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        record = host.paths.instance("main") / "instance.json"
        write_json(record, json.loads(record.read_text()) | {"port": silent.getsockname()[1]})
        before = host.run()
    assert (before["running"], before["releases"]) == (["main"], {})
    assert "NOT answered" in warned(before)


def test_check_mode_and_looking_ask_nobody_and_write_nothing(host):
    host.serve(OLD)
    checked = host.run(check=True)
    assert (checked["changed"], checked["running"]) == (True, ["main"])
    assert checked["summary"] == ["main: would be asked 2 golden prompts"]
    looked = host.run("looked")
    assert (looked["changed"], looked["running"], looked["current"]["id"]) == (False, ["main"], OLD)
    assert not golden.kept_path(host.paths, "main").exists()
    assert host.compare(check=True)["changed"] is False
