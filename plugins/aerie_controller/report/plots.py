"""The report's plots: SVG to be put inside the page, without fonts, fixed colours, ids that clash, or the time of day.

matplotlib draws with placeholder colours that become CSS variables, so that one drawing is right in light, in dark and on paper;
text stays text, in the page's own font.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from ansible.module_utils.aerie.measuring import verdict
from ansible.module_utils.aerie.words import clean, cut
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from ..figures import number

INK, MUTED, GRID, PAPER = "#010001", "#010002", "#010003", "#010004"
_PLAIN = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"}
SERIES = 6
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[object, ...] = ((0, (4, 2)), "-", "-", "-", (0, (6, 2, 1, 2)), (0, (2, 1.5)))
WIDTH, HEIGHT = 420, 300
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.left": False,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def series_colour(index: int) -> str:
    return f"#0200{index % SERIES:02x}"


def part_colour(index: int) -> str:
    return f"#0300{index:02x}"


def throughput(group: verdict.Group, key: str) -> str:
    """Output tokens per second over clients, both logarithmic; bars from the slowest to the fastest launch."""

    def draw(axes: Axes) -> None:
        for index, arm in enumerate(group.arms):
            found = [(point.concurrency, point.throughput) for point in group.points if point.arm == arm.name and point.throughput]
            levels, values = [level for level, _ in found], [spread.value for _, spread in found]
            bars = [[spread.value - spread.low for _, spread in found], [spread.high - spread.value for _, spread in found]]
            _line(axes, index, levels, values, bars)
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(FixedLocator(_round_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"))
        axes.set_ylim(low, high)
        _clients_axis(axes, group)

    said = [f"{arm.name}: {_sequence(group, arm.name)}" for arm in group.arms]
    return _svg(draw, key, "Output tokens per second against clients", "; ".join(said))


def speedup(group: verdict.Group, key: str) -> str:
    """Speed-up over clients, with a line at 1 and 95 % intervals; logarithmic, so that twice and half are equally far."""

    compared = [crossing.arm for crossing in group.crossovers]

    def aside(arm: str) -> float:
        """Return what sets an arm beside the others, so that intervals don't hide each other."""
        return float(1.035 ** (compared.index(arm) - (len(compared) - 1) / 2))

    def draw(axes: Axes) -> None:
        ends = [1.0]
        for index, arm in enumerate(group.arms):
            found = [(point.concurrency, point.ratio) for point in group.points if point.arm == arm.name and point.ratio]
            if not found:
                continue
            values = [ratio.value for _, ratio in found]
            bars = [
                [ratio.value - (ratio.low or ratio.value) for _, ratio in found],
                [(ratio.high or ratio.value) - ratio.value for _, ratio in found],
            ]
            ends += [ratio.low or ratio.value for _, ratio in found] + [ratio.high or ratio.value for _, ratio in found]
            _line(axes, index, [level * aside(arm.name) for level, _ in found], values, bars)
        for crossing in group.crossovers:
            if crossing.at:
                axes.plot(
                    [crossing.at * aside(crossing.arm)],
                    [1],
                    color=INK,
                    linestyle="none",
                    marker="o",
                    markersize=11,
                    markerfacecolor="none",
                    markeredgecolor=INK,
                    markeredgewidth=1.2,
                    zorder=4,
                )
        axes.axhline(1, color=INK, linewidth=1.2, zorder=1.5)
        axes.set_yscale("log")
        low, high = min(ends) / 1.12, max(ends) * 1.12
        axes.yaxis.set_major_locator(FixedLocator(_ratio_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_ylim(low, high)
        _clients_axis(axes, group)

    said = [
        f"{crossing.arm}: "
        + ", ".join(f"{p.ratio.value:.2f} at {p.concurrency}" for p in group.points if p.arm == crossing.arm and p.ratio)
        for crossing in group.crossovers
    ]
    return _svg(draw, key, f"Speed-up against {group.baseline}, with a line at 1", "; ".join(said))


def cycle(group: verdict.Group, key: str) -> str:
    """Share of each part of a decode cycle, one bar per profiled arm and concurrency."""
    rows = [
        (f"{cut(phases.arm, 16)}, {phases.concurrency}", [100 * phases.shares[part] for part, _ in verdict.PARTS])
        for phases in group.phases
    ]
    said = [
        f"{phases.arm} at {phases.concurrency} clients: "
        + ", ".join(f"{label} {100 * phases.shares[part]:.0f} %" for part, label in verdict.PARTS)
        for phases in group.phases
    ]
    return stacked(rows, key, "Shares of a decode cycle", "; ".join(said), end=100, unit="%")


def stacked(
    rows: Sequence[tuple[str, Sequence[float]]],
    key: str,
    title: str,
    description: str,
    *,
    end: float | None = None,
    unit: str,
    width: float = WIDTH,
) -> str:
    """Return bars of parts, one for each of ``rows`` (label, values in the order of the part colours), up to ``end`` or the longest."""
    last = end or max(sum(values) for _, values in rows) or 1.0

    def draw(axes: Axes) -> None:
        for row, (_, values) in enumerate(rows):
            left = 0.0
            for index, value in enumerate(values):
                if not value:
                    continue
                axes.barh(row, value, left=left, height=0.62, color=part_colour(index), edgecolor=PAPER, linewidth=1.2)
                if value >= 0.09 * last * WIDTH / width:
                    said = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
                    axes.text(left + value / 2, row, said, ha="center", va="center_baseline", color=PAPER, fontsize=11.5)
                left += value
        axes.set_yticks(range(len(rows)), labels=[label for label, _ in rows])
        for text in axes.get_yticklabels():
            text.set_parse_math(False)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, last)
        if end is not None:
            axes.xaxis.set_major_locator(FixedLocator([end * quarter / 4 for quarter in range(5)]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {unit}"))
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)

    longest = max(len(label) for label, _ in rows)
    return _svg(draw, key, title, description, height=64 + 46 * len(rows), left=18 + 7.2 * longest, width=width)


def gain(told: Mapping[str, Any], key: str) -> str:
    """Speed-up by speculation over running requests with its intervals, the fitted curve, the crossover and its interval."""
    points, crossing = told["evidence"]["levels"], told["crossover"]
    levels = [point["concurrency"] for point in points]

    def draw(axes: Axes) -> None:
        values = [point["ratio"] for point in points]
        ends = [[point[end] or point["ratio"] for point in points] for end in ("low", "high")]
        bars = [
            [value - low for value, low in zip(values, ends[0], strict=True)],
            [high - value for value, high in zip(values, ends[1], strict=True)],
        ]
        if crossing["at"]:
            left, right = crossing["low"] or levels[0] / 1.25, crossing["high"] or levels[-1] * 1.25
            axes.axvspan(left, right, color=GRID, zorder=0)
            axes.axvline(crossing["at"], color=MUTED, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
        axes.plot(levels, [point["fitted"] for point in points], color=MUTED, linewidth=1.2, zorder=1.5)
        _line(axes, 1, levels, values, bars)
        axes.axhline(1, color=INK, linewidth=1.2, zorder=1.5)
        axes.set_yscale("log")
        low, high = min(1.0, *ends[0]) / 1.05, max(1.0, *ends[1]) * 1.05
        axes.yaxis.set_major_locator(FixedLocator(_ratio_ticks(low, high)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_ylim(low, high)
        _levels_axis(axes, levels, "running requests")

    said = ", ".join(f"{point['ratio']:.3f} at {point['concurrency']}" for point in points)
    return _svg(draw, key, "Speed-up by speculation against running requests, with a line at 1", said)


def kept(found: Mapping[str, Any], key: str) -> str:
    """What thresholds before and after reach of the better mode's speed, over running requests."""
    table = found["table"]
    levels = [row["concurrency"] for row in table]
    ways = (("before", 0), ("after", 1))

    def draw(axes: Axes) -> None:
        for when, index in ways:
            _line(axes, index, levels, [row[when]["of_better"] for row in table], [[0.0] * len(table)] * 2)
        lowest = min(row[when]["of_better"] for row in table for when, _ in ways)
        axes.axhline(1, color=INK, linewidth=1.2, zorder=1.5)
        axes.set_ylim(min(lowest - 0.02, 0.9), 1.02)
        _levels_axis(axes, levels, "running requests")

    said = "; ".join(f"{when}: " + ", ".join(f"{row[when]['of_better']:.3f} at {row['concurrency']}" for row in table) for when, _ in ways)
    return _svg(draw, key, "Speed as a share of the better mode's, by the thresholds before and now", said)


def swatch(index: int) -> str:
    """A legend's mark for the arm at ``index``: its line and marker, as small inline SVG."""
    shapes = {
        "o": '<circle cx="15" cy="7" r="4"/>',
        "s": '<rect x="11.2" y="3.2" width="7.6" height="7.6"/>',
        "^": '<path d="M15 2.4 19.4 10.6H10.6Z"/>',
        "D": '<path d="M15 2 20 7 15 12 10 7Z"/>',
        "v": '<path d="M15 11.6 10.6 3.4H19.4Z"/>',
        "P": '<path d="M13.4 3h3.2v2.4H19v3.2h-2.4V11h-3.2V8.6H11V5.4h2.4Z"/>',
    }
    dash = ' stroke-dasharray="4 2"' if not index % SERIES else ""
    colour = f"var(--series-{index % SERIES})"
    return (
        f'<svg class="swatch" viewBox="0 0 30 14" aria-hidden="true"><path d="M0 7H30" style="stroke:{colour}" stroke-width="2"{dash}/>'
        f'<g style="fill:{colour}">{shapes[MARKERS[index % SERIES]]}</g></svg>'
    )


def _line(axes: Axes, index: int, levels: Sequence[float], values: Sequence[float], bars: Sequence[Sequence[float]]) -> None:
    colour = series_colour(index)
    axes.errorbar(
        levels,
        values,
        yerr=bars,
        color=colour,
        linestyle=DASHES[index % SERIES],
        linewidth=2,
        marker=MARKERS[index % SERIES],
        markersize=8 if MARKERS[index % SERIES] in "^v" else 6.5,
        markeredgecolor=PAPER,
        elinewidth=1.3,
        capsize=3.5,
        capthick=1.3,
        zorder=3 - index / 100,
    )


def _clients_axis(axes: Axes, group: verdict.Group) -> None:
    _levels_axis(axes, group.concurrencies, "clients at once")


def _levels_axis(axes: Axes, levels: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    shown = _apart(levels)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([str(level) for level in shown]))
    axes.set_xlim(levels[0] / 1.25, levels[-1] * 1.25)
    axes.set_xlabel(label, labelpad=6)
    axes.grid(axis="y")


def _apart(levels: Sequence[int]) -> list[int]:
    """Return the levels whose labels have room beside each other on a logarithmic axis, ends first."""
    room = max(math.log(levels[-1] / levels[0]), 1e-9) / 11
    kept = [levels[-1]]
    for level in reversed(levels[:-1]):
        if math.log(kept[-1] / level) >= room:
            kept.append(level)
    return sorted(kept)


def _round_ticks(low: float, high: float) -> list[float]:
    every = [step * 10.0**power for power in range(-3, 8) for step in (1, 2, 5)]
    inside = [tick for tick in every if low <= tick <= high]
    if len(inside) > 7:
        inside = (
            [tick for tick in inside if f"{tick:e}"[0] == "1"] if len(inside) > 12 else [tick for tick in inside if f"{tick:e}"[0] in "15"]
        )
    return inside or [low, high]


def _ratio_ticks(low: float, high: float) -> list[float]:
    """Return round ratios around 1: from the coarsest of these scales that gives three or more."""
    scales = (
        [0.1, 0.2, 0.5, 1, 2, 5, 10],
        [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4],
        [step / 5 for step in range(1, 16)],
        [step / 10 for step in range(1, 21)],
        [step / 20 for step in range(2, 41)],
        [step / 100 for step in range(50, 151)],
    )
    for scale in scales:
        inside = [tick for tick in scale if low <= tick <= high]
        if len(inside) >= 3:
            return inside
    return [1.0]


def _sequence(group: verdict.Group, arm: str) -> str:
    return (
        ", ".join(f"{number(p.throughput.value)} at {p.concurrency}" for p in group.points if p.arm == arm and p.throughput) or "no figure"
    )


def _svg(
    draw: Callable[[Axes], None], key: str, title: str, description: str, height: float = HEIGHT, left: float = 50, width: float = WIDTH
) -> str:
    """Draw and return an ``<svg>`` element for the inside of a page; ``key`` makes its ids unique there."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes((left / width, 46 / height, 1 - (left + 10) / width, 1 - 58 / height))
        draw(axes)
        stream = StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(stream.getvalue(), key, clean(title), clean(description))


def _inline(document: str, key: str, title: str, description: str) -> str:
    body = document[document.index(">", document.index("<svg")) + 1 : document.rindex("</svg>")]
    view = re.search(r'viewBox="([^"]+)"', document)
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{key}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", body)
    body = re.sub(r"font-family: [^;\"]+; ?", "", body)
    body = re.sub(r"#0100[0-9a-f]{2}", lambda found: f"var({_PLAIN[found[0]]})", body)
    body = re.sub(r"#0200([0-9a-f]{2})", lambda found: f"var(--series-{int(found[1], 16)})", body)
    body = re.sub(r"#0300([0-9a-f]{2})", lambda found: f"var(--part-{int(found[1], 16)})", body)
    body = re.sub(r"\s*\n\s*", "\n", body).replace("<defs>\n</defs>\n", "").strip()
    label = f'role="img" aria-labelledby="{key}-title {key}-desc"'
    head = f'<title id="{key}-title">{escape(title)}</title>\n<desc id="{key}-desc">{escape(description)}</desc>'
    return f'<svg class="plot" viewBox="{view[1] if view else ""}" {label}>\n{head}\n{body}\n</svg>'
