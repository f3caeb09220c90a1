"""A search finds a set that is faster, and says so of none that is not; what it tries and decides follows from data."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import nccl
from ansible.module_utils.aerie.measuring import experiment
from ansible.module_utils.aerie.tuning import decision, messages, search, space

from aerie_controller import terminal
from aerie_controller.terminal_reports import nccl_search

PROJECT = Path(__file__).parents[2]
TABLE = nccl.Table.of(yaml.safe_load((PROJECT / "nccl/profiles.yml").read_text()))
SPACE = space.Space.of(yaml.safe_load((PROJECT / "nccl/space.yml").read_text()))
TIMES = {8192: 10.0, 65536: 20.0, 4 << 20: 200.0}
OBJECTIVES = {"latency": [8192, 65536], "throughput": [4 << 20]}
NAMES = [space.REFERENCE, *(f"set{number}" for number in range(30))]


def machine(seed: int, gains: dict[str, dict[int, float]] | None = None, noise: float = 0.03, drift: float = 0.05) -> search.Measure:
    """A host of known truth: launches differ by ``noise``, samples of a launch share its luck, and the whole host drifts."""
    drawn, count = random.Random(seed), [0]

    def measure(launch: search.Launch) -> search.Outcome:
        count[0] += 1
        common = drift * math.sin(count[0] / 17) + drawn.gauss(0, noise)
        gain = (gains or {}).get(launch.candidate, {})
        return search.Outcome({size: us / gain.get(size, 1) * math.exp(common + drawn.gauss(0, noise / 3)) for size, us in TIMES.items()})

    return measure


def answers(gains: dict[str, dict[int, float]], seeds: int = 100) -> Counter[tuple[str, str | None]]:
    found: Counter[tuple[str, str | None]] = Counter()
    for seed in range(seeds):
        result = search.search(NAMES, space.REFERENCE, OBJECTIVES, machine(seed, gains), search.Settings(seed=seed))
        found.update((objective, finding.candidate) for objective, finding in result.findings.items())
    return found


def test_noise_is_called_noise_in_95_of_100_searches():
    found = answers({})
    assert found["latency", None] >= 95
    assert found["throughput", None] >= 95


def test_a_set_that_is_a_tenth_faster_is_found():
    found = answers({"set5": dict.fromkeys(TIMES, 1.1)}, seeds=40)
    assert found["latency", "set5"] >= 36
    assert found["throughput", "set5"] >= 36


def test_latency_and_throughput_have_answers_of_their_own():
    result = search.search(
        NAMES,
        space.REFERENCE,
        OBJECTIVES,
        machine(3, {"set7": {8192: 1.2, 65536: 1.2}, "set20": {4 << 20: 1.2, 8192: 0.8}}, noise=0.01),
        search.Settings(),
    )
    assert {name: finding.candidate for name, finding in result.findings.items()} == {"latency": "set7", "throughput": "set20"}
    ratio = result.findings["latency"].ratio
    assert ratio is not None
    assert ratio.low < 1.2 < ratio.high
    assert result.findings["latency"].medians["set7"][8192] < result.findings["latency"].medians[space.REFERENCE][8192]


def test_a_gain_below_the_smallest_that_counts_is_no_difference():
    gains = {"set5": dict.fromkeys(TIMES, 1.01)}
    result = search.search(NAMES, space.REFERENCE, OBJECTIVES, machine(1, gains, noise=0.0005, drift=0), search.Settings())
    assert [finding.verdict for finding in result.findings.values()] == [search.SAME] * 2
    assert result.findings["latency"].ratio is not None


def test_the_same_seed_measures_the_same_launches_in_the_same_order():
    def launches(seed: int) -> list[str]:
        seen: list[str] = []
        measure = machine(1)

        def noting(launch: search.Launch) -> search.Outcome:
            seen.append(launch.key)
            return measure(launch)

        search.search(NAMES, space.REFERENCE, OBJECTIVES, noting, search.Settings(seed=seed))
        return seen

    first = launches(1)
    assert first == launches(1)
    assert first != launches(2)
    assert len(set(first)) == len(first)


def test_every_round_has_the_default_set_and_the_verdict_comes_from_the_finals_rounds_alone():
    seen: list[search.Launch] = []
    measure = machine(1)

    def lucky_once(launch: search.Launch) -> search.Outcome:
        seen.append(launch)
        lucky = launch.candidate == "set9" and launch.stage == search.HALVING
        return search.Outcome({size: us * (0.5 if lucky else 1) for size, us in measure(launch).medians.items()})

    result = search.search(NAMES, space.REFERENCE, OBJECTIVES, lucky_once, search.Settings())
    rounds = {(launch.stage, launch.rung, launch.round) for launch in seen}
    assert rounds == {(one.stage, one.rung, one.round) for one in seen if one.candidate == space.REFERENCE}
    assert any(one.candidate == "set9" for one in seen if one.stage == search.FINAL), "it won every rung"
    assert result.findings["latency"].verdict == search.SAME


def test_a_set_that_fails_is_out_with_all_that_hold_it_and_the_default_set_must_not_fail():
    parts = {"a": frozenset("a"), "b": frozenset("b"), "ab": frozenset("ab"), "c": frozenset("c")}
    seen = []

    def hangs(launch: search.Launch) -> search.Outcome:
        seen.append(launch.candidate)
        return search.Outcome(failure="hung") if "a" in launch.candidate.removeprefix(space.REFERENCE) else machine(1)(launch)

    names = [space.REFERENCE, *parts]
    result = search.search(names, space.REFERENCE, OBJECTIVES, hangs, search.Settings(final_rounds=3), parts)
    assert set(result.disqualified) == {"a", "ab"}
    assert seen.count("a") == 1
    assert seen.count("ab") <= 1
    assert set(result.findings["latency"].finalists) <= {"b", "c"}
    with pytest.raises(AerieError, match="the default set could not be measured: wedged"):
        search.search(names, space.REFERENCE, OBJECTIVES, lambda _: search.Outcome(failure="wedged"), search.Settings())


def test_all_sets_failing_leaves_no_difference():
    def only_default(launch: search.Launch) -> search.Outcome:
        return machine(1)(launch) if launch.candidate == space.REFERENCE else search.Outcome(failure="died")

    result = search.search(NAMES, space.REFERENCE, OBJECTIVES, only_default, search.Settings())
    assert {finding.verdict for finding in result.findings.values()} == {search.SAME}
    assert len(result.disqualified) == 30


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 1, 12.7062), (0.975, 7, 2.3646), (0.975, 30, 2.0423), (0.9875, 7, 2.8412), (0.995, 4, 4.6041)],
)
def test_quantiles_are_those_of_the_tables(probability, degrees, expected):
    assert search.t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-4)


# ---- what is tried -------------------------------------------------------------------------------------------------------------------


def tried(**changes: Any) -> space.Choice:
    given: dict[str, Any] = {"base": {}, "pinned": {}, "there": space.Situation(8, "SYS", 8), "most": 30, "seed": 1, **changes}
    return space.candidates(given.pop("space", SPACE), TABLE, **given)


def test_the_default_set_comes_first_then_single_changes_then_combinations():
    choice = tried()
    sizes = [len(candidate.changes) for candidate in choice.candidates]
    assert sizes[0] == 0
    singles = sum(len(values) - 1 for values in SPACE.dimensions.values())
    assert sizes[1 : 1 + singles] == [1] * singles
    assert all(size > 1 for size in sizes[1 + singles :])
    assert len(choice.candidates) == 31
    assert choice.left_out > 0
    assert choice == tried()
    assert choice.candidates != tried(seed=2).candidates


def test_sets_known_to_be_bad_and_those_that_change_nothing_are_refused_with_a_reason():
    small = space.Space.of({"dimensions": {"NCCL_P2P_LEVEL": ["NODE", "SYS"], "NCCL_GRAPH_FILE": ["", None]}})
    choice = tried(space=small)
    assert [candidate.name for candidate in choice.candidates] == [space.REFERENCE, "P2P_LEVEL=SYS"]
    refused = dict(choice.refused)
    assert "nvidia-smi's NODE is one" in refused["P2P_LEVEL=NODE"]
    assert "graph-file-empty" in refused["GRAPH_FILE="]
    nvlink = tried(there=space.Situation(8, "NV", 8))
    assert all("NCCL_P2P_LEVEL" not in candidate.changes for candidate in nvlink.candidates)
    assert any("NVLink is nearer" in why for _, why in nvlink.refused)
    two = tried(there=space.Situation(2, "SYS", 2), most=500)
    assert any("a tree is a chain" in why for _, why in two.refused)


def test_the_users_own_variables_are_part_of_every_set_and_never_varied():
    choice = tried(base={"NCCL_PROTO": "Simple", "NCCL_IB_DISABLE": "1"}, pinned={"NCCL_PROTO": "Simple"}, most=500)
    assert {candidate.environment["NCCL_PROTO"] for candidate in choice.candidates} == {"Simple"}
    assert {candidate.environment["NCCL_IB_DISABLE"] for candidate in choice.candidates} == {"1"}


def test_nccls_own_choices_are_tried_against_a_profile():
    profile = TABLE.profiles["pcie_sockets"].environment
    own = next(candidate for candidate in tried(base=profile).candidates if candidate.name == space.OWN)
    assert own.changes == {"NCCL_MIN_NCHANNELS": None, "NCCL_P2P_LEVEL": None}
    assert own.environment == {name: value for name, value in profile.items() if name not in own.changes}


def test_faults_of_a_space_are_told_at_once():
    with pytest.raises(AerieError) as told:
        space.Space.of({"dimension": {}, "dimensions": {"NCCL_ALGO": "Ring"}, "refused": [{"when": {}}]})
    assert all(words in str(told.value) for words in ("did you mean 'dimensions'", "NCCL_ALGO is 'Ring'", "refused 1: needs when and why"))


# ---- message sizes -------------------------------------------------------------------------------------------------------------------

KIMI = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168}


def test_sizes_are_hidden_size_times_tokens_times_bytes_within_what_decode_uses():
    found = messages.of_model(KIMI, "bfloat16", 4, [1, 4, 64], [1024])
    assert [(one.bytes, one.objective) for one in found] == [
        (7168 * 4 * 2, "latency"),
        (7168 * 16 * 2, "latency"),
        (512 * 1024, "latency"),
        (7168 * 1024 * 2, "throughput"),
    ]
    assert found[0].why == "decode: 1 × 4 tokens × 7168 × 2 B"
    assert "brought into 8 to 512 KiB" in found[2].why
    assert messages.of_model(KIMI, "float32", 1, [1], [1024])[0].bytes == 7168 * 4


def test_a_small_model_is_measured_at_the_smallest_size_and_a_wrapped_one_by_its_text_part():
    assert [one.bytes for one in messages.of_model({"hidden_size": 64}, "bfloat16", 1, [1, 8], [16])] == [8192, 2048]
    wrapped = {"text_config": {"hidden_size": 7168, "num_hidden_layers": 2}}
    assert messages.of_model(wrapped, "bfloat16", 4, [1], [1024])[0].bytes == 57344


def test_many_levels_are_thinned_and_their_ends_kept():
    found = [one.bytes for one in messages.of_model(KIMI, "bfloat16", 1, range(1, 33), [64]) if one.objective == "latency"]
    assert len(found) == messages.MOST_SIZES
    assert (found[0], found[-1]) == (14336, 7168 * 2 * 32)


def test_without_a_model_there_are_general_sizes():
    assert {one.objective for one in messages.generic("none")} == set(messages.OBJECTIVES)
    assert all(messages.DECODE_LEAST <= one.bytes <= messages.DECODE_MOST for one in messages.generic("none") if one.objective == "latency")


# ---- confirmation and decision -------------------------------------------------------------------------------------------------------


def result(latency: str = search.BETTER) -> dict[str, Any]:
    better = {"value": 1.2, "low": 1.1, "high": 1.3, "pairs": 8}
    one = {
        "verdict": latency,
        "candidate": "PROTO=LL128" if latency == search.BETTER else None,
        "changes": {"NCCL_PROTO": "LL128"},
        "environment": {"NCCL_IB_DISABLE": "1", "NCCL_PROTO": "LL128"},
        "ratio": better,
        "finalists": {"PROTO=LL128": better},
        "medians_us": {"default": {"8192": 12.0}, "PROTO=LL128": {"8192": 10.0}},
        "spreads": {},
    }
    same = {**one, "verdict": search.SAME, "candidate": None, "changes": {}, "environment": {"NCCL_IB_DISABLE": "1"}}
    return {
        "run_id": "r1",
        "host": "gpu-01",
        "bench": {"ranks": 8, "backend": "nccl"},
        "profile": "pcie_sockets",
        "base": {"NCCL_IB_DISABLE": "1"},
        "versions": {"torch": "2.11", "nccl": "2.28.9"},
        "candidates": 30,
        "launches": 99,
        "disqualified": [{"candidate": "ALGO=Tree", "why": "timeout: hung, and killed"}],
        "refused": [],
        "left_out": 3,
        "objectives": {"latency": one, "throughput": same},
    }


def records(gain: float, repeats: int = 4, noise: float = 0.005) -> list[dict[str, Any]]:
    drawn = random.Random(1)
    return [
        {
            "experiment": "nccl-latency",
            "arm": {"name": arm},
            "repeat": repeat,
            "concurrency": level,
            "kind": "measure",
            "status": "completed",
            "cell": f"{arm}-c{level}-r{repeat}",
            "metrics": {"output_throughput_tok_s": 100 * level * factor * math.exp(drawn.gauss(0, noise))},
        }
        for arm, factor in ((decision.REFERENCE_ARM, 1.0), ("nccl-latency", gain))
        for repeat in range(1, repeats + 1)
        for level in (1, 16)
    ]


WORKLOADS = {
    "latency": {"dataset": "random-ids", "input_len": 128, "output_len": 256, "concurrency": [1, 16]},
    "throughput": {"dataset": "random-ids", "input_len": 4096, "output_len": 8, "concurrency": [8]},
}


def test_winners_are_confirmed_by_arms_that_differ_in_ncclls_environment_only():
    own = {"speculation": {"algorithm": "EAGLE3"}, "flags": {"x": 1}, "environment": {"A": "1", "NCCL_PROTO": "Simple"}}
    in_force = {"NCCL_BUFFSIZE": "1048576", "NCCL_IB_DISABLE": "1"}
    (one,) = decision.confirmations(result(), own, in_force, ["pcie_ipc_allreduce"], WORKLOADS, 4, 600)
    arms = one.arms
    assert set(arms) == {"nccl-default", "nccl-latency", "nccl-pcie_ipc_allreduce"}
    assert arms["nccl-latency"]["environment"] == {"A": "1", "NCCL_BUFFSIZE": None, "NCCL_IB_DISABLE": "1", "NCCL_PROTO": "LL128"}
    assert arms["nccl-default"]["environment"]["NCCL_BUFFSIZE"] is None
    assert arms["nccl-pcie_ipc_allreduce"]["options"] == ["pcie_ipc_allreduce"]
    for arm in arms.values():
        assert {key: value for key, value in arm.items() if key not in ("environment", "options")} == {
            "speculation": own["speculation"],
            "flags": own["flags"],
        }
    planned = experiment.plan(experiment.validate(dict(one.experiment), arms), arms)
    assert [launch.arm for launch in planned.launches][:6] == [*arms, *reversed(arms)]
    assert decision.confirmations(result(search.SAME), own, in_force, [], WORKLOADS, 4, 600) == []


def test_only_what_serving_confirms_is_adopted():
    latency, throughput = decision.decide(result(), records(1.05))
    assert (latency.verdict, latency.environment) == (decision.CONFIRMED, {"NCCL_PROTO": "LL128"})
    assert (throughput.verdict, throughput.environment) == (decision.SAME, {})
    assert "no difference beyond noise" in throughput.why
    refuted = decision.decide(result(), records(1.0))[0]
    assert (refuted.verdict, refuted.environment) == (decision.REFUTED, {})
    assert "decode does not gain" in refuted.why
    slower = decision.decide(result(), records(0.9))[0]
    assert slower.verdict == decision.REFUTED
    asked_for_none = decision.decide(result(), None)[0]
    assert (asked_for_none.verdict, asked_for_none.environment) == (decision.UNCONFIRMED, {"NCCL_PROTO": "LL128"})


def test_cells_that_failed_are_no_confirmation_and_are_told():
    broken = [{**record, "status": "failed", "reason": "the server died", "metrics": None} for record in records(1.1)]
    found = decision.decide(result(), broken)[0]
    assert found.verdict == decision.REFUTED
    assert "16 cells failed: nccl-default-c1-r1: failed: the server died" in found.why


def test_the_file_holds_the_set_with_its_evidence_and_the_role_takes_it():
    decisions = decision.decide(result(), records(1.05))
    tuned = yaml.safe_load(yaml.safe_dump(decision.tuned(result(), decisions, {})))
    assert nccl.tuned_environment(tuned, "latency", 8) == {"NCCL_PROTO": "LL128"}
    assert nccl.tuned_environment(tuned, "throughput", 8) == {}
    assert tuned["latency"]["end_to_end"]["pairs"] == 4
    assert tuned["latency"]["micro_benchmark"]["medians_us"]["default"] == {"8192": 12.0}


def test_a_person_reads_verdict_figures_and_who_is_out():
    decisions = decision.decide(result(), records(1.05))
    parts = nccl_search.parts(result(), decisions, {}, {"variables": "/srv/nccl.yml"})
    text = terminal.render(parts, 100)
    for words in (
        "latency: faster, confirmed end to end",
        "throughput: no difference beyond noise",
        "set: NCCL_PROTO=LL128",
        "1 disqualified:",
        "ALGO=Tree: timeout: hung",
        "variables: /srv/nccl.yml",
    ):
        assert words in text
