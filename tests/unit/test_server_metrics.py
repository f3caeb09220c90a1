"""The acceptance length is that of the cell alone, pooled over its steps."""

from __future__ import annotations

import pytest
from ansible.module_utils.aerie.serving import server_metrics

# /metrics of SGLang 0.5.23, EAGLE-3 on the CPU profile: before and after 16 requests of 48 tokens, which took 356 verify steps.
BEFORE = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 480.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 10.0
sglang:spec_verify_calls_total{model_name="m"} 400.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 1000.0
"""
AFTER = """\
sglang:generation_tokens_total{is_streaming="true",model_name="m"} 1248.0
sglang:generation_tokens_histogram_sum{model_name="m"} 9999.0
sglang:num_requests_total{is_streaming="true",model_name="m"} 20.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 6.0
sglang:spec_verify_calls_total{model_name="m"} 756.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 3480.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 32.0
"""


def info(*lengths: float | None) -> dict:
    return {"internal_states": [{"avg_spec_accept_length": length} if length else {} for length in lengths]}


def test_counters_are_summed_over_labels_and_counted_from_the_start_of_the_cell():
    grown = server_metrics.delta(BEFORE, AFTER)
    assert grown["sglang:generation_tokens_total"] == 768
    assert grown["sglang:num_requests_total"] == 16
    assert grown["sglang:cached_tokens_total"] == 32


def test_acceptance_leaves_out_the_prefill_tokens_and_earlier_traffic():
    found = server_metrics.acceptance(server_metrics.delta(BEFORE, AFTER), info(None), info(2.22))
    assert found.source == "metrics"
    assert found.length == pytest.approx((768 - 16) / 356)


def test_without_counters_the_servers_average_is_taken_if_it_began_with_the_cell():
    assert server_metrics.acceptance({}, info(None), info(2.2)) == server_metrics.Acceptance(2.2, "server_info")
    assert server_metrics.acceptance({}, info(1.9), info(2.2)) == server_metrics.Acceptance(None, None)


def test_a_server_without_speculation_has_no_acceptance():
    grown = {"sglang:generation_tokens_total": 768.0, "sglang:num_requests_total": 16.0}
    assert server_metrics.acceptance(grown, info(None), info(None)) == server_metrics.Acceptance(None, None)
    assert server_metrics.acceptance({}, None, None) == server_metrics.Acceptance(None, None)
