"""phases says truly which part of a decode cycle costs how much."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.profiling import phases


def line(*, t=1.0, batch=2, graph=False, gap=None, draft=2.0, verify=6.0, steps=(1.5, 0.5)) -> str:
    parts = dict.fromkeys(phases.PHASES, 0.5) | {"draft": draft, "target_verify": verify}
    return json.dumps(
        {
            "t": t,
            "batch": batch,
            "steps": len(steps),
            "graph": graph,
            "clock": "cuda",
            "cycle_ms": sum(parts.values()),
            "gap_ms": gap,
            "phases": parts,
            "draft_steps_ms": list(steps),
        }
    )


def summary(*lines: str) -> phases.Summary:
    return phases.summarise(phases.read("\n".join(lines) + "\n", "profile"))


def test_shares_are_of_the_pooled_time_and_sum_to_one():
    found = summary(line(verify=6.0), line(verify=26.0))
    shares = {phase.name: phase.share for phase in found.phases}
    assert shares["target_verify"] == pytest.approx(32 / 40)  # not the mean of 6/10 and 26/30
    assert sum(shares.values()) == pytest.approx(1)
    assert (found.cycles, found.mean_cycle_ms, found.median_cycle_ms) == (2, 20, 20)


def test_a_torn_last_line_is_left_out():
    assert len(phases.read(line() + "\n" + line()[:-20], "profile")) == 1


def test_a_last_line_without_its_newline_counts():
    assert len(phases.read(line() + "\n" + line(), "profile")) == 2


@pytest.mark.parametrize(
    "bad", [line()[:-20], "{}", line().replace('"kv"', '"cache"'), line().replace('"cycle_ms": 10.0', '"cycle_ms": 9.0')]
)
def test_a_bad_line_in_the_middle_is_named(bad):
    with pytest.raises(AerieError, match="profile, line 2"):
        phases.read(f"{line()}\n{bad}\n{line()}\n", "profile")


def test_measured_steps_are_medians_by_step():
    found = summary(line(steps=(1.0, 0.1)), line(steps=(3.0, 0.2)), line(steps=(2.0, 0.3)))
    assert (found.draft_steps, found.draft_steps_ms) == (phases.MEASURED, (2.0, 0.2))


def test_steps_under_a_graph_are_labelled_and_never_mixed_with_measured_ones():
    graph, eager = line(graph=True, steps=(1.0, 1.0)), line(steps=(1.5, 0.5))
    assert summary(graph).draft_steps == phases.DIVIDED
    found = summary(graph, eager)
    assert (found.draft_steps, found.draft_steps_ms) == (phases.MIXED, (1.5, 0.5))


def test_cycles_without_a_gap_do_not_count_as_gaps_of_zero():
    assert summary(line(gap=None), line(gap=3.0)).median_gap_ms == 3.0
    assert summary(line(gap=None)).median_gap_ms is None


def test_only_the_cycles_of_a_span_are_taken():
    cycles = phases.read("\n".join(line(t=float(t)) for t in range(5)) + "\n", "profile")
    assert [cycle.time for cycle in phases.between(cycles, 1, 3)] == [1, 2]


def test_an_empty_profile_is_refused_with_advice():
    with pytest.raises(AerieError, match="was it switched on"):
        phases.summarise([])
