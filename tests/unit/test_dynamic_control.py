"""The overlay's control of dynamic speculation: arguments that can't work are refused, run-time changes hold or are told why not, and
what plain steps are is in state, metrics and SGLang's own figures of acceptance.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.serving import launch_checks

OVERLAY = Path(__file__).parents[2] / "patches/dynamic_speculation/overlay/sglang/srt/speculative"
GOOD = {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1, "speculative_dynamic_disable_threshold": "32"}


class Output:
    __annotations__ = {"updated": bool}

    def __init__(self, updated: bool) -> None:
        self.updated = updated


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch):
    """The overlay's module as in a scheduler process that has one rank, with no server around it."""

    def load(name: str):
        spec = importlib.util.spec_from_file_location(f"sglang.srt.speculative.{name}", OVERLAY / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", types.SimpleNamespace(get_tp_group=lambda: group))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", types.SimpleNamespace(SetInternalStateReqOutput=Output))
    policy = load("aerie_dynamic_policy")
    sys.modules["sglang.srt.speculative"].aerie_dynamic_policy = policy
    for name in ("AERIE_DYNAMIC_CALIBRATION", "AERIE_DYNAMIC_SETTINGS"):
        monkeypatch.delenv(name, raising=False)
    return load("aerie_dynamic_control")


def arguments(**changes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{**GOOD, **changes})


def started(control, **changes: Any):
    return control.start(types.SimpleNamespace(server_args=arguments(**changes)))


def ask(control, **server_args: Any):
    return control.set_internal_state(types.SimpleNamespace(server_args=server_args))


# The server argument

REFUSALS = [
    ({"speculative_algorithm": None}, "needs speculation"),
    ({"speculative_algorithm": "STANDALONE"}, "is for EAGLE-3 drafts"),
    ({"speculative_algorithm": "EAGLE"}, "is for EAGLE-3 drafts"),
    ({"speculative_eagle_topk": 4}, "not for trees"),
    ({"enable_multi_layer_eagle": True}, "leave out (--)?enable-multi-layer-eagle"),
    ({"enable_dp_attention": True}, "leave out (--)?enable-dp-attention"),
    ({"pp_size": 2}, "pipeline"),
    ({"enable_lora": True}, "LoRA"),
    ({"lora_paths": ["a=/b"]}, "LoRA"),
    ({"enable_two_batch_overlap": True}, "two batches"),
    ({"disaggregation_mode": "decode"}, "prefill and decode apart"),
    ({"speculative_dynamic_disable_threshold": "-1"}, "a number of requests, 0 or more, or auto"),
    ({"speculative_dynamic_disable_threshold": "many"}, "a number of requests, 0 or more, or auto"),
    ({"speculative_dynamic_disable_threshold": "auto"}, "needs a calibration"),
    ({"speculative_dynamic_disable_threshold": "48"}, "no more than 48 requests run at once: set (--)?max-running-requests above 48"),
    ({"speculative_dynamic_disable_threshold": "200", "max_running_requests": 128}, "no more than 128 requests run at once"),
]


OF_THE_SERVER = [
    ({"dcp_size": 2}, "context parallelism: leave out --dcp-size"),
    ({"attn_cp_size": 8}, "context parallelism: leave out --attn-cp-size"),
    ({"moe_a2a_backend": "deepep"}, "in each step: leave out --moe-a2a-backend"),
    ({"moe_dense_tp_size": 1}, "in each step: leave out --moe-dense-tp-size"),
    ({"enable_deterministic_inference": True}, "not reproducible: leave out --enable-determ"),
    ({"enable_unified_memory": True}, "virtual slots: leave out --enable-unified-memory"),
    ({"enable_hisparse": True}, "sparse attention: leave out --enable-hisparse"),
    ({"speculative_draft_window_size": 512}, "leave out --speculative-draft-window-size"),
    ({"enable_lmcache": True}, "copies K/V elsewhere: leave out --enable-lmcache"),
    ({"enable_flexkv": True}, "copies K/V elsewhere: leave out --enable-flexkv"),
    ({"enable_unified_cache_external_linker": True}, "elsewhere: leave out --enable-unified-cache"),
    ({"radix_cache_backend": "mine"}, "not SGLang's own: leave out --radix-cache-backend"),
]


@pytest.mark.parametrize(("changes", "message"), OF_THE_SERVER)
def test_what_plain_steps_were_not_made_for_is_refused_by_the_server(control, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        control.check_server_args(arguments(**changes))
    assert len(str(raised.value).splitlines()) == 1


def test_all_that_the_server_refuses_has_a_test_and_a_default_that_is_not_refused(control):
    tested = [name for changes, _ in OF_THE_SERVER for name in changes]
    assert [name for name, _, _ in control.REFUSED] == tested
    defaults = {name: default for name, default, _ in control.REFUSED}
    control.check_server_args(arguments(**defaults))


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_it_can_not_be_had_with_is_refused_at_start_by_server_and_launch_checks_alike(control, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        control.check_server_args(arguments(**changes))
    assert len(str(raised.value).splitlines()) == 1
    (found,) = launch_checks.dynamic_problems({**GOOD, **changes}, None, {})
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_all_reasons_are_told_at_once(control):
    with pytest.raises(ValueError, match="trees") as raised:
        control.check_server_args(arguments(speculative_eagle_topk=8, pp_size=2, max_running_requests=16))
    assert len(str(raised.value).splitlines()) == 3


@pytest.mark.parametrize("changes", [{"speculative_dynamic_disable_threshold": None}, {}, {"max_running_requests": 33}])
def test_what_works_is_let_through_and_nothing_is_said_where_it_is_off(control, changes):
    control.check_server_args(arguments(**changes))
    off = {"speculative_dynamic_disable_threshold": None, "speculative_eagle_topk": 8, "pp_size": 4}
    control.check_server_args(arguments(**off))
    control.check_server_args(types.SimpleNamespace())  # a server whose arguments don't even have it
    assert list(launch_checks.dynamic_problems(off, None, {})) == []


def test_without_the_argument_nothing_starts_and_hooks_do_nothing(control):
    assert started(control, speculative_dynamic_disable_threshold=None) is None
    state: dict[str, Any] = {}
    control.add_state(state)
    control.result_begins(None)
    assert control.plain_tokens(None, None, None) is None
    control.result_read(None, None)
    control.interrupted()
    control.report_begins(None)
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_accept_length": 3.0}
    control.correct_request(meta)
    assert (state, control.is_plain_result(), meta["spec_accept_length"]) == ({}, False, 3.0)


def test_auto_takes_the_calibration_and_more_settings_come_on_top(control, monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("AERIE_DYNAMIC_CALIBRATION", str(path))
    auto = {"speculative_dynamic_disable_threshold": "auto"}
    with pytest.raises(ValueError, match="No such file"):
        control.check_server_args(arguments(**auto))
    path.write_text("{")
    with pytest.raises(ValueError, match=r"calibration\.json.*calibrate again"):
        control.check_server_args(arguments(**auto))
    path.write_text(json.dumps({"schema": "aerie-calibration/1", "high": 48, "low": 40, "dwell_steps": 9}))
    control.check_server_args(arguments(**auto))  # a calibration may find that speculation always pays
    made = started(control, **auto).policy.settings
    assert (made.high, made.low, made.min_dwell_steps, made.adapt) == (48, 40, 9, False)
    monkeypatch.setenv("AERIE_DYNAMIC_SETTINGS", '{"low": 30, "adapt": true}')
    made = started(control, **auto).policy.settings
    assert (made.high, made.low, made.adapt) == (48, 30, True)
    monkeypatch.setenv("AERIE_DYNAMIC_SETTINGS", '{"lo": 30}')
    with pytest.raises(ValueError, match="AERIE_DYNAMIC_SETTINGS: unknown: lo"):
        control.check_server_args(arguments(**auto))


# Run-time control


def test_a_change_holds_from_the_next_step_on_and_is_in_the_state(control):
    made = started(control)
    assert made.decide(8) is False
    assert ask(control, speculative_dynamic={"high": 4, "low": 2}).updated is True
    assert made.decide(8) is True
    state: dict[str, Any] = {}
    control.add_state(state)
    found = state["speculative_dynamic"]
    assert (found["mode"], found["high"], found["low"], found["reason"], found["refused"]) == ("plain", 4, 2, "above_high", None)


@pytest.mark.parametrize(
    ("server_args", "message"),
    [
        ({"speculative_dynamic": {"high": -1}}, "high must be a whole number"),
        ({"speculative_dynamic": {"hihg": 1}}, "unknown: hihg"),
        ({"speculative_dynamic": 8}, "must be a table of settings"),
        ({"speculative_dynamic": {"high": 8}, "pp_max_micro_batch_size": 4}, "is to be set alone"),
        ({"pp_max_micro_batch_size": {"high": 8}}, "takes a number"),
    ],
)
def test_a_wrong_change_is_answered_and_logged_and_changes_nothing(control, caplog, server_args, message):
    made = started(control)
    before = made.policy.settings
    assert ask(control, **server_args).updated is False
    assert message in caplog.text
    assert made.policy.settings == before


# Depths of adaptive speculation


@pytest.fixture
def adaptive(control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """SGLang's reader of the file of depths, and a function that writes one and returns its arguments."""

    def resolve_candidate_steps_from_config(cfg_path: str) -> list[int]:
        slots = json.loads(Path(cfg_path).read_text())
        return sorted({steps for slot in slots.values() for steps in slot["candidate_steps"]})

    name = "sglang.srt.speculative.adaptive_spec_params"
    stub = types.SimpleNamespace(resolve_candidate_steps_from_config=resolve_candidate_steps_from_config)
    monkeypatch.setitem(sys.modules, name, stub)

    def flags(*candidates: int) -> dict[str, Any]:
        path = tmp_path / "adaptive.json"
        path.write_text(json.dumps({"1": {"candidate_steps": list(candidates)}}))
        return {"speculative_adaptive": True, "speculative_adaptive_config": str(path)}

    return flags


def test_depths_without_step_0_may_change_beside_it(control, adaptive):
    control.check_server_args(arguments(**adaptive(1, 3)))


def test_a_table_with_step_0_is_refused_since_the_threshold_is_for_that(control, adaptive):
    with pytest.raises(ValueError, match=r"adaptive\.json has step 0, .* \(there are 0, 3\)"):
        control.check_server_args(arguments(**adaptive(0, 3)))
    with pytest.raises(ValueError, match="own table of --speculative-adaptive has step 0: name a file without it"):
        control.check_server_args(arguments(speculative_adaptive=True))


@pytest.mark.parametrize("content", [None, "{", '{"1": 3}'])
def test_a_file_of_depths_that_can_not_be_read_is_refused_by_its_name(control, adaptive, tmp_path, content):
    flags = adaptive(3)
    if content is None:
        (tmp_path / "adaptive.json").unlink()
    else:
        (tmp_path / "adaptive.json").write_text(content)
    with pytest.raises(ValueError, match=r"--speculative-adaptive-config .*adaptive\.json: .*: correct the file"):
        control.check_server_args(arguments(**flags))


def test_a_depth_is_forced_until_it_is_released_and_only_one_that_the_server_has(control):
    made = started(control)
    assert control.forced_steps() is None
    made.has_depths([3, 1])
    assert ask(control, speculative_dynamic={"num_steps": 1}).updated is True
    assert control.forced_steps() == 1
    assert (made.state()["num_steps"], made.state()["candidate_steps"]) == (1, [1, 3])
    assert ask(control, speculative_dynamic={"num_steps": 2}).updated is False
    assert made.state()["refused"] == "num_steps must be one of 1, 3 (is 2)"
    assert control.forced_steps() == 1
    assert ask(control, speculative_dynamic={"num_steps": None}).updated is True
    assert control.forced_steps() is None


def test_a_server_of_one_depth_has_none_to_force(control, monkeypatch):
    made = started(control)
    made.has_depths([])
    assert made.state()["candidate_steps"] is None
    assert ask(control, speculative_dynamic={"num_steps": 3}).updated is False
    assert "must be null where --speculative-adaptive is not set" in made.state()["refused"]
    monkeypatch.setenv("AERIE_DYNAMIC_SETTINGS", '{"num_steps": 3}')
    with pytest.raises(ValueError, match=r"AERIE_DYNAMIC_SETTINGS: num_steps must be null .* correct it, or leave it out"):
        started(control).has_depths([])


def test_the_last_refusal_stays_in_the_state_until_a_change_is_taken(control):
    made = started(control)
    ask(control, speculative_dynamic={"low": 99})
    assert "low must not exceed high" in made.state()["refused"]
    ask(control, speculative_dynamic={"low": 9})
    assert made.state()["refused"] is None


def test_other_requests_are_the_schedulers_and_ours_are_refused_where_it_is_off(control, caplog):
    assert ask(control, pp_max_micro_batch_size=8) is None
    assert ask(control, speculative_dynamic={"high": 4}).updated is False
    assert "was started without --speculative-dynamic-disable-threshold" in caplog.text


def two_ranks(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Return the group of two ranks that a process, rank 0, is in: it keeps what is sent."""
    group = types.SimpleNamespace(world_size=2, rank_in_group=0, sent=[])
    group.broadcast_object = lambda value, _source: group.sent.append(value) or value
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", types.SimpleNamespace(get_tp_group=lambda: group))
    return group


def test_ranks_apply_the_plan_of_rank_0(control, monkeypatch):
    group = two_ranks(monkeypatch)
    first = started(control)
    group.sent.clear()
    first.update({"adapt": True})
    for _ in range(130):
        first.decide(8)
    assert group.sent == [{"high": 32, "low": 28, "probe": 0}] * 3
    second = started(control)
    group.rank_in_group = second.rank = 1
    of_rank_0 = {"high": 5, "low": 4, "probe": 0}
    group.broadcast_object = lambda plan, _source: of_rank_0 if plan is None else None
    second.update({"adapt": True})
    assert second.decide(8) is True
    assert second.policy.settings.high == 5


def test_ranks_start_with_the_settings_of_rank_0(control, monkeypatch):
    group = two_ranks(monkeypatch)
    first = started(control, speculative_dynamic_disable_threshold="8").policy.settings
    assert group.sent == [first]
    group.rank_in_group = 1
    group.broadcast_object = lambda _own, source: [first][source]
    monkeypatch.setenv("AERIE_DYNAMIC_SETTINGS", '{"low": 1, "min_dwell_steps": 3}')
    assert started(control, speculative_dynamic_disable_threshold="20").policy.settings == first


# Log and metrics


def test_switches_are_logged_once_a_second_at_most_and_none_is_lost(control, caplog, monkeypatch):
    caplog.set_level("INFO")
    now = [0.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    made = started(control)
    made.update({"flip_every": 1})
    caplog.clear()
    now[0] = 10.0
    for _ in range(50):
        made.decide(4)
        now[0] += 0.1
    lines = [record.getMessage() for record in caplog.records]
    assert 4 <= len(lines) <= 6
    told = sum(int(line.rsplit("(", 1)[1].split()[0]) for line in lines)
    assert 49 - 10 <= told <= 49


class Collector:
    """Counts like prometheus_client's objects do."""

    labels = {"model_name": "m", "tp_rank": 0}  # noqa: RUF012

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._gauge_cls = self._counter_cls = self.make

    def make(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str | None = None):
        assert documentation
        assert multiprocess_mode in (None, "mostrecent")

        def labelled(**labels: Any):
            assert list(labels) == list(labelnames)
            key = name + "".join(f":{value}" for label, value in labels.items() if label in ("kind", "reason"))
            self.values[key] = 0.0
            return types.SimpleNamespace(
                set=lambda value: self.values.update({key: value}), inc=lambda: self.values.update({key: self.values[key] + 1})
            )

        return types.SimpleNamespace(labels=labelled)


@pytest.mark.parametrize("collector_first", [True, False])
def test_metrics_tell_mode_thresholds_steps_and_switches(control, monkeypatch, collector_first):
    monkeypatch.setitem(sys.modules, "prometheus_client", types.SimpleNamespace(Counter=None, Gauge=None))
    collector = Collector()
    if collector_first:
        control.add_metrics(collector)
    made = started(control, speculative_dynamic_disable_threshold="8")
    if not collector_first:
        control.add_metrics(collector)
    assert collector.values["sglang:aerie_dynamic_plain"] == 0
    for size in (4, 9, 9):
        made.decide(size)
    made.update({"high": 64})
    found = collector.values
    assert (found["sglang:aerie_dynamic_plain"], found["sglang:aerie_dynamic_high"], found["sglang:aerie_dynamic_low"]) == (1, 64, 56)
    assert (found["sglang:aerie_dynamic_steps_total:speculative"], found["sglang:aerie_dynamic_steps_total:plain"]) == (1, 2)
    assert found["sglang:aerie_dynamic_switches_total:above_high"] == 1
    assert found["sglang:aerie_dynamic_switches_total:at_low"] == 0


# Finished steps


class Processor:
    """What of SGLang's processor a plain step's tokens need, where grammars are advanced with the result (up to 0.5.16)."""

    def _accept_grammar_tokens(self, req: Any, tokens: list[int]) -> list[int]:
        req.grammar.append(tokens)
        return tokens if len(req.grammar) < 2 else []


class LaterProcessor:
    """The same from 0.5.17: the retained tokens are kept with the result."""

    def advance_grammar_fsm(self, result: Any, batch: Any) -> None:
        result.grammar_retained_tokens = [
            None if req.grammar is None else [token + 1000] for req, token in zip(batch.reqs, TOKENS, strict=True)
        ]


TOKENS = [11, 12, 13, 14]


HERE, ALLOCATED_BESIDE, BESIDE = "0.5.15", "0.5.16", "0.5.19"
"""Releases from which on a request's counts are with it, half beside it, and beside it."""


def request(since: str = HERE, finished: bool = False, **changes: Any) -> types.SimpleNamespace:
    allocated, committed = {"kv_allocated_len": 30}, {"kv_committed_len": 20}
    where: dict[str, Any] = {
        HERE: {**allocated, **committed},
        ALLOCATED_BESIDE: {"kv": types.SimpleNamespace(**allocated), **committed},
        BESIDE: {"kv": types.SimpleNamespace(**allocated, **committed)},
    }[since]
    values = {"spec_verify_ct": 5, "is_retracted": False, "grammar": None, "finished": lambda: finished}
    return types.SimpleNamespace(**{**values, **where, **changes})


def plain_result(count: int = 4) -> types.SimpleNamespace:
    tokens = types.SimpleNamespace(tolist=lambda: TOKENS[:count])
    return types.SimpleNamespace(speculative_num_draft_tokens=1, next_token_ids=tokens, accept_lens=None, num_cap_tokens=None)


def read(control, reqs, accepted: list[int] | None) -> Any:
    """Read a result as SGLang's processor does: ``accepted`` drafts of each request, None for a plain step."""
    result = plain_result(len(reqs)) if accepted is None else types.SimpleNamespace(speculative_num_draft_tokens=4)
    batch = types.SimpleNamespace(reqs=reqs)
    control.result_begins(result)
    if control.plain_tokens(Processor(), result, batch) is None:
        result.num_correct_drafts = sum(accepted or ())
    control.result_read(batch, result)
    return result


@pytest.mark.parametrize("since", [HERE, ALLOCATED_BESIDE, BESIDE])
@pytest.mark.parametrize("claimed", [0, 1])
def test_plain_steps_commit_a_token_each_and_do_not_count_as_verifications_that_accepted_nothing(control, since: str, claimed: int):
    started(control)
    reqs = [request(since), request(since, finished=True), request(since, is_retracted=True), request(since)]
    result, batch = plain_result(), types.SimpleNamespace(reqs=reqs)
    control.result_begins(result)
    assert control.plain_tokens(Processor(), result, batch, claimed) == [[11], [12], [13], [14]]
    assert [(req.kv if since == BESIDE else req).kv_committed_len for req in reqs] == [21 - claimed, 20 - claimed, 20, 21 - claimed]
    assert [req.spec_verify_ct for req in reqs] == [5] * 4
    assert (result.num_correct_drafts, result.num_correct_drafts_per_req_cpu, result.num_cap_tokens) == (0, [0] * 4, 0)
    assert control.is_plain_result()


def test_a_verifications_tokens_are_left_to_sglang(control):
    started(control)
    read(control, [request()], [3])
    assert not control.is_plain_result()
    assert control.plain_tokens(Processor(), types.SimpleNamespace(speculative_num_draft_tokens=4), None) is None


def test_a_grammar_is_advanced_by_the_token_once_and_says_what_of_it_is_kept(control):
    started(control)
    one, other = request(grammar=[]), request(grammar=[[1]])
    read(control, [one, other], None)
    assert (one.grammar, other.grammar) == ([[11]], [[1], [12]])
    assert (one.kv_committed_len, other.kv_committed_len) == (21, 20)
    result, reqs = plain_result(), [request(BESIDE), request(BESIDE, grammar=[]), request(BESIDE), request(BESIDE)]
    control.result_begins(result)
    assert control.plain_tokens(LaterProcessor(), result, types.SimpleNamespace(reqs=reqs)) == [[11], [1012], [13], [14]]


def test_a_requests_acceptance_length_is_that_of_its_verifications(control):
    control.check_server_args(arguments())
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 15, "spec_accept_length": 12.5}
    control.correct_request(meta)
    assert meta["spec_accept_length"] == 2.5
    control.correct_request({})


def test_a_report_without_a_verification_has_a_length_of_1_and_leaves_the_average(control):
    started(control)
    reporter = types.SimpleNamespace(spec_num_forward_ct=0, spec_num_accept_tokens=0)
    control.report_begins(reporter)
    assert reporter.spec_num_accept_tokens / reporter.spec_num_forward_ct == 1
    assert (1000 + reporter.spec_num_accept_tokens) / (400 + reporter.spec_num_forward_ct) == pytest.approx(2.5, abs=1e-6)
    reporter = types.SimpleNamespace(spec_num_forward_ct=40, spec_num_accept_tokens=100)
    control.report_begins(reporter)
    assert reporter.spec_num_forward_ct == 40


def test_a_step_is_what_lies_between_two_results_of_its_kind_with_nothing_between_them(control, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(control.time, "perf_counter", lambda: now[0])
    made = started(control)
    reqs = [request(), request()]
    for seconds, accepted in ((5.0, [1, 1]), (0.010, [1, 2]), (0.008, None), (0.006, None), (0.020, [3, 0])):
        now[0] += seconds
        read(control, reqs, accepted)
    control.interrupted()
    now[0] += 3.0
    read(control, reqs, [1, 1])
    found = made.state()["measured"]
    assert found["speculative"] == {"2": {"step_ms": 10.0, "accept_length": 2.5}}
    assert found["plain"] == {"2": {"step_ms": 6.0, "accept_length": 1.0}}
