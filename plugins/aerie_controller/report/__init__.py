"""The report: one HTML file that holds everything it shows. For the controller; needs jinja2 (Ansible's own) and matplotlib.

Code, template and plots lie together here, not in a role: nothing of it ever goes to a host, and one action plugin uses it.
The page is a pure function of the records: the same records give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import verdict
from ansible.module_utils.aerie.profiling import trace_summary
from ansible.module_utils.aerie.profiling.phases import PHASES
from ansible.module_utils.aerie.words import clean_lines, cut, listing
from markupsafe import Markup

from ..figures import interval, number, range_text
from ..preflight import wording
from ..preflight.compare import Comparison
from ..preflight.results import HostResult
from ..preflight.rules import SEVERITIES
from ..terminal_reports import calibration as calibration_words
from ..terminal_reports import profile as profile_words

DEFAULT_TITLE = "SGLang with and without EAGLE-3"
TEMPLATE, PROFILE_TEMPLATE, PREFLIGHT_TEMPLATE = "page.html.j2", "profile.html.j2", "preflight.html.j2"
CALIBRATION_TEMPLATE = "calibration.html.j2"
WIDE = 880
"""Width of a plot that has the page to itself."""


def _plots() -> Any:
    try:
        from . import plots
    except ImportError as error:
        raise AerieError(f"the report needs matplotlib on the controller ({error}): install requirements/controller.txt") from error
    return plots


def _shown(value: Any) -> Any:
    """Return what a page shows of a value: text without control characters, and without those that turn others around."""
    return clean_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(number=number, range=range_text, listing=listing, span=span, plain=plain, machine=machine, headline=headline)
    environment.filters.update(shown=wording.shown, reasons=wording.reasons, probed=wording.probed)
    return environment.get_template(name)


def render(groups: Sequence[verdict.Group], title: str = DEFAULT_TITLE, preflight: Sequence[HostResult] = ()) -> str:
    """Return the page, with a section on the hosts where ``preflight`` knows them; refuses where matplotlib is missing."""
    plots, template = _plots(), _template(TEMPLATE)
    sections = [_section(plots, group, f"g{position}") for position, group in enumerate(groups, 1)]
    return (
        template.render(
            title=title,
            sections=sections,
            cells=sum(group.cells for group in groups),
            failures=sum(len(group.failures) for group in groups),
            hosts=sorted({group.host for group in groups}),
            started=min((group.started for group in groups if group.started), default=None),
            ended=max((group.ended for group in groups if group.ended), default=None),
            parts=verdict.PARTS,
            confidence=round(100 * verdict.CONFIDENCE),
            results=list(preflight),
            comparisons=(),
        ).rstrip()
        + "\n"
    )


def render_preflight(results: Sequence[HostResult], comparisons: Sequence[Comparison] = ()) -> str:
    """Return the page of a preflight; it needs no matplotlib."""
    found = {severity: sum(result.count(severity) for result in results) for severity in SEVERITIES}
    said = [f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in found.items() if count]
    unreachable = sum(result.unreachable is not None for result in results)
    said += [f"{unreachable} host{'' if unreachable == 1 else 's'} not asked"] if unreachable else []
    headline = f"Preflight: {listing(said) if said else 'nothing found'}"
    if comparisons:
        headline = f"{comparisons[0].bad} compared with {comparisons[0].good}"
    rules = max((len(result.findings) + len(result.ignored) + len(result.unjudged) + len(result.fine) for result in results), default=0)
    template = _template(PREFLIGHT_TEMPLATE)
    return template.render(results=list(results), comparisons=comparisons, headline=headline, rules=rules).rstrip() + "\n"


def _section(plots: Any, group: verdict.Group, key: str) -> dict[str, Any]:
    return {
        "group": group,
        "key": key,
        "throughput": plots.throughput(group, f"{key}-throughput") if any(point.throughput for point in group.points) else None,
        "speedup": plots.speedup(group, f"{key}-speedup") if any(point.ratio for point in group.points) else None,
        "cycle": plots.cycle(group, f"{key}-cycle") if group.phases else None,
        "swatches": {arm.name: plots.swatch(index) for index, arm in enumerate(group.arms)},
        "pinned": {arm.name for arm in group.arms if arm.pinned},
    }


def render_profile(found: Mapping[str, Any]) -> str:
    """Return the page of a profile (as profile.json holds it); refuses where matplotlib is missing, saying what to install."""
    plots, template = _plots(), _template(PROFILE_TEMPLATE)
    hosts = [_profiled_host(plots, name, content["arms"], f"h{number}") for number, (name, content) in enumerate(found["hosts"].items(), 1)]
    known = {"interval": interval, "heads": profile_words.CATEGORY_HEADS}
    return template.render(run_id=found["run_id"], hosts=hosts, **known).rstrip() + "\n"


def render_calibration(found: Mapping[str, Any]) -> str:
    """Return the page of a calibration (as calibration.json holds it); refuses where matplotlib is missing, saying what to install."""
    plots, template = _plots(), _template(CALIBRATION_TEMPLATE)
    told = found["calibration"]
    return (
        template.render(
            found=found,
            told=told,
            levels=list(zip(told["evidence"]["levels"], found["table"], strict=True)),
            gain=plots.gain(told, "gain"),
            shares=plots.kept(found, "kept"),
            swatches=[plots.swatch(index) for index in range(3)],
            limits=calibration_words.limits,
            mode=calibration_words.mode,
            names=calibration_words.names,
            remarks=calibration_words.remarks(found),
        ).rstrip()
        + "\n"
    )


def _profiled_host(plots: Any, name: str, arms: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    levels = [(arm, level) for arm in arms for level in arm["levels"]]
    phased = [(arm, level) for arm, level in levels if level["phases"]]
    traced = [(arm, level) for arm, level in levels if level["trace"]]
    kinds = [
        (index, kind) for index, kind in enumerate(trace_summary.NAMES) if any(kind in level["trace"]["categories"] for _, level in traced)
    ]
    return {
        "name": name,
        "key": key,
        "arms": arms,
        "levels": levels,
        "phased": phased,
        "traced": traced,
        "parts": [(phase, dict(verdict.PARTS).get(phase, phase), profile_words.PHASE_HEADS[phase]) for phase in PHASES],
        "kinds": kinds,
        "shares": _stacked(
            plots,
            phased,
            [[100 * level["phases"]["phases"][phase]["share"] for phase in PHASES] for _, level in phased],
            f"{key}-shares",
            "Shares of a decode cycle",
            end=100,
            unit="%",
        ),
        "kernels": _stacked(
            plots,
            traced,
            [[level["trace"]["categories"].get(kind, {"ms": 0.0})["ms"] for kind in trace_summary.NAMES] for _, level in traced],
            f"{key}-kernels",
            "Milliseconds of a traced decode step by kind of work",
            unit="ms",
        ),
    }


def _stacked(
    plots: Any, entries: Sequence[tuple[Any, Any]], values: Sequence[Sequence[float]], key: str, title: str, **more: Any
) -> str | None:
    if not entries:
        return None
    rows = [(f"{cut(arm['arm']['name'], 26)}, {level['concurrency']}", row) for (arm, level), row in zip(entries, values, strict=True)]
    said = "; ".join(f"{label}: {', '.join(number(value) for value in row if value)}" for label, row in rows)
    return str(plots.stacked(rows, key, title, said, width=WIDE, **more))


def headline(crossing: verdict.Crossover, group: verdict.Group) -> tuple[str, str]:
    """Return the one figure of a comparison, and what it is."""
    ratios = [point.ratio.value for point in group.points if point.arm == crossing.arm and point.ratio]
    if crossing.kind == "crosses" and crossing.at:
        return f"≈ {crossing.at:.0f}" if crossing.at >= 10 else f"≈ {crossing.at:.1f}", "clients at the crossover"
    if not ratios:
        return "–", "nothing to compare"
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    words = {"faster": "faster throughout", "slower": "slower throughout", "several": "no single crossover", "same": "the same"}
    return f"{low}×" if low == high else f"{low}–{high}×", words.get(crossing.kind, "one concurrency only")


def span(started: str, ended: str | None) -> str:
    """Return from when to when, to the minute and without saying a day twice; the times are ISO 8601 in UTC, as in records."""
    (day, first), (last_day, last) = _moment(started), _moment(ended or started)
    if (day, first) == (last_day, last):
        return f"{day}, {first} UTC"
    return f"{day}, {first} to {last} UTC" if day == last_day else f"{day}, {first} to {last_day}, {last} UTC"


def _moment(value: str) -> tuple[str, str]:
    found = re.match(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)", value)
    return (found[1], found[2]) if found else (value, "an unknown hour")


def machine(fingerprint: Mapping[str, Any]) -> str:
    """Return a host's hardware, system and drivers on one line: equal GPUs counted, no serial numbers; empty where nothing is known."""
    gpus = [gpu for gpu in fingerprint.get("gpus") or [] if isinstance(gpu, Mapping)]
    kinds = [f"{gpu.get('name', 'GPU')} (driver {gpu.get('driver', 'unknown')})" for gpu in gpus]
    cpu, system = fingerprint.get("cpu") or {}, fingerprint.get("os") or {}
    said = [f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)]
    said += [f"CUDA {fingerprint['cuda_driver_version']}"] if fingerprint.get("cuda_driver_version") else []
    said += [f"{cpu['model']}, {cpu.get('logical') or cpu.get('cores') or 'an unknown number of'} CPUs"] if cpu.get("model") else []
    said += [str(system["name"])] if system.get("name") else []
    said += [f"Linux {fingerprint['kernel']}"] if fingerprint.get("kernel") else []
    return "; ".join(said)


def plain(value: Any) -> str:
    """Return a value of a record as words, whatever the order of its keys."""
    if isinstance(value, Mapping):
        said = [(str(key).replace("_", " "), plain(inner)) for key, inner in sorted(value.items()) if inner not in (None, "", [], {})]
        return ", ".join(f"{key} {words}" for key, words in said)
    if isinstance(value, list | tuple):
        return ", ".join(plain(inner) for inner in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
