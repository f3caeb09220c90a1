"""A calibration: the levels that were measured, and the thresholds that they give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.measuring import calibration, calibration_depths
from ansible.module_utils.aerie.profiling import overhead

from ..figures import NONE, interval, number_or_none
from ..terminal import Part, figures, gap, heading, paragraph, places, table

SHORT_MODES = {calibration.SPECULATIVE: "spec.", calibration.PLAIN: "plain"}


def parts(content: Mapping[str, Any], paths: Mapping[str, str] | None = None) -> list[Part]:
    """Return the report; ``paths`` are lines such as {"page": path} for its end."""
    return [*_report(content), gap(), *places(paths)]


def _report(content: Mapping[str, Any]) -> Iterator[Part]:
    result = content["calibration"]
    arm, release = result["arm"]["name"], result["release"]
    yield heading(f"calibration · {result['host']} · arm {arm} · {release} · run {result['run_id']}")
    yield _levels(content)
    if comparisons := result["evidence"].get("comparisons"):
        yield gap()
        yield paragraph("Each mode against the next one that speculates less, in pairs of windows under one load")
        yield _comparisons(comparisons)
    yield gap()
    yield paragraph(content["sentence"])
    yield paragraph(
        f"Before: {limits(content['before'])}. Now: {limits(result)}; a mode is kept for {result['dwell_steps']} steps at least."
    )
    yield from (paragraph(remark) for remark in remarks(content))
    if content["confirmed"]:
        yield gap()
        yield paragraph("Measured: the thresholds now against those before, in pairs of windows under one load")
        yield _confirmed(content)


def _levels(content: Mapping[str, Any]) -> Part:
    names = ("requests", "plain tok/s", "spec. tok/s", "speed-up", "90 %", "n")
    judged = ("before", "of better", "now", "of better")
    levels = content["calibration"]["evidence"]["levels"]
    rows = [
        (
            str(level["concurrency"]),
            number_or_none(level["plain_tok_s"]),
            number_or_none(level["speculative_tok_s"]),
            f"{level['ratio']:.3f}×",
            interval(level),
            str(level["pairs"]),
            *(text for when in ("before", "after") for text in (short(mode(row, when)), share(row[when]["of_better"]))),
        )
        for level, row in zip(levels, content["table"], strict=True)
    ]
    return table(figures(*names, *judged), rows)


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> Part:
    rows = [_comparison_row(names(comparison), level) for comparison in comparisons for level in comparison["levels"]]
    return table(figures("requests", "mode", "tok/s", "against", "tok/s", "gain", "90 %", "n"), rows)


def _comparison_row(modes: tuple[str, str], level: Mapping[str, Any]) -> tuple[str, ...]:
    deeper, fewer = modes
    return (
        str(level["concurrency"]),
        deeper,
        number_or_none(level["deeper_tok_s"]),
        fewer,
        number_or_none(level["shallower_tok_s"]),
        f"{level['ratio']:.3f}×",
        interval(level),
        str(level["pairs"]),
    )


def names(comparison: Mapping[str, Any]) -> tuple[str, str]:
    """Return the two modes of a comparison in words."""
    deeper, fewer = comparison["deeper"], comparison["shallower"] or None
    return calibration_depths.mode_name(deeper), calibration_depths.mode_name(fewer)


def mode(row: Mapping[str, Any], when: str) -> str:
    """Return the mode of a level before or after; the depth only after, since the one before is not known."""
    chosen: str = row[when]["mode"]
    if when == "after" and chosen == calibration.SPECULATIVE and "steps" in row:
        return calibration_depths.mode_name(row["steps"])
    return chosen


def short(mode: str) -> str:
    """Return a mode in a word that fits a column."""
    return SHORT_MODES.get(mode, mode)


def share(value: float | None) -> str:
    """Return a share of the better mode's speed, or a dash."""
    return NONE if value is None else f"{value:.3f}"


def limits(thresholds: Mapping[str, Any] | None) -> str:
    """Return thresholds in words."""
    if not thresholds:
        return "always speculative"
    if thresholds.get("verdict") == calibration.ALWAYS:
        return f"always speculative (up to {thresholds['high']} requests, the most that run)"
    if thresholds["high"] == 0:
        return "always plain"
    return f"plain above {thresholds['high']} requests, speculative again at {thresholds['low']}"


def _confirmed(content: Mapping[str, Any]) -> Part:
    rows = [
        (
            str(level["concurrency"]),
            number_or_none(level["before_tok_s"]),
            number_or_none(level["after_tok_s"]),
            f"{level['after_over_before']:.3f}" if level["after_over_before"] else NONE,
            interval(level),
        )
        for level in content["confirmed"]
    ]
    return table(figures("requests", "before tok/s", "now tok/s", "now/before", "90 %"), rows)


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Return what a reader should know beside the figures, a sentence each."""
    result = content["calibration"]
    evidence = result["evidence"]
    sentences = []
    if result["acceptance_simulated"]:
        sentences.append("Acceptance is simulated (pinned by the environment): the crossover is the engine's and not a real draft's.")
        if evidence.get("comparisons"):
            # SGLang 0.5.15.post1 spec_utils.py, _sample_simulated_acc_len: min(max_len, length)
            sentences.append(
                "Every depth has the pinned acceptance length, up to its steps + 1: shallower depths look better than with a real draft, "
                "which accepts less of a shorter chain. Don't serve by these depths unless traffic has this length at each of them."
            )
    cost = evidence["switch_ms"]
    # Noise of single changes may be far above what one costs: a mean below zero says that it is too
    # little to see.
    costs = [
        f"{cost[mode]:.1f} ms to {mode}" if cost[mode] > 0 else f"nothing that shows to {mode}"
        for mode in (calibration.PLAIN, calibration.SPECULATIVE)
        if cost[mode] is not None
    ]
    if costs:
        sentences.append(f"A change costs {' and '.join(costs)}.")
    from_records = evidence["source"] == calibration.RECORDS
    if from_records:
        sentences.append("From records of two servers: luck of their launches is in the figures.")
    if not from_records and any(level["basis"] == overhead.TOKENS for level in evidence["levels"]):
        sentences.append(
            "Where no decode steps ran without a prefill between them, tokens are compared with prefills: longer answers help."
        )
    for failure in content["failures"]:
        reason = str(failure["reason"]).splitlines()[0]
        sentences.append(f"{failure['concurrency']} requests: {failure['status']}: {reason}")
    return sentences
