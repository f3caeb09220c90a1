# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judges and reports a preflight on the controller: the work happens here, once for all hosts of a play, and no host is asked."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import report, terminal  # importing the package makes ansible.module_utils.aerie importable
from aerie_controller.preflight import compare, results, rules
from aerie_controller.terminal_reports import preflight

# isort: split
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic
from ansible.module_utils.aerie.host import survey_shape
from ansible.module_utils.aerie.measuring import placing
from ansible.module_utils.aerie.words import cut, listing

ARGUMENTS: dict[str, dict[str, Any]] = {
    "hosts": {"type": "dict", "required": True},
    "output": {"type": "path", "required": True},
    "fail_on": {"type": "str", "choices": list(results.FAIL_ON), "default": rules.ERROR},
    "ignore": {"type": "list", "elements": "raw", "default": []},
    "compare": {"type": "list", "elements": "str", "default": []},
    "rules": {"type": "path"},
}
PAGE, COMPARISON, COMPARISON_PAGE = "preflight.html", "comparison.json", "comparison.html"


class ActionModule(ActionBase):
    BYPASS_HOST_LOOP = True
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        try:
            return result | self._report(Path(self._loader.path_dwim(arguments["output"])), arguments)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        except OSError as error:
            return result | {"failed": True, "msg": f"the preflight can't be reported: {error.filename}: {error.strerror}"}

    def _report(self, output: Path, arguments: dict[str, Any]) -> dict[str, Any]:
        known = rules.load(Path(self._loader.path_dwim(arguments["rules"])) if arguments["rules"] else rules.RULES)
        ignore = results.ignored(arguments["ignore"], known)
        asked = [_examined(known, host, given, ignore) for host, given in arguments["hosts"].items()]
        inventory = inventory_options()
        found = [results.with_inventory(one, inventory) for one in asked if one is not None]
        comparisons = self._compared(arguments["compare"], found, known, ignore, arguments["hosts"])
        written: dict[Path, bytes] = {output / f"{placing.require_host(one.host)}.json": _json(one.as_dict()) for one in found}
        page = output / (COMPARISON_PAGE if comparisons else PAGE)
        written[page] = report.render_preflight(found, comparisons).encode()
        if comparisons:
            written[output / COMPARISON] = _json(comparisons[0].as_dict())
        changed = any(_told(path) != _told(path, content) for path, content in written.items() if path.suffix == ".json")
        check = self._task.check_mode
        said = "would be written" if check else "written"
        if not check:
            for path, content in written.items():
                write_atomic(path, content)
        parts = preflight.parts(found) if found else []
        compared = [part for each in comparisons for part in (terminal.gap(), *preflight.comparison(each))]
        paths = terminal.places({f"page ({said})": page})
        terminal.show([terminal.gap(), *parts, *compared, terminal.gap(), *paths])
        return {
            "changed": changed,
            "table": terminal.render(parts, terminal.DEFAULT_WIDTH) if parts else "",
            "path": str(page),
            "hosts": {one.host: _summary(one) for one in found},
            "comparison": comparisons[0].as_dict() if comparisons else None,
            "failing": {one.host: _why(one, arguments["fail_on"]) for one in found if one.fails(arguments["fail_on"])},
            "run_summary": preflight.run_summary(found, str(page), f"page ({said})" if check else "page") if found else [],
        }

    def _compared(
        self, places: list[str], found: list[results.HostResult], known: Any, ignore: Mapping[str, str], hosts: Mapping[str, Any]
    ) -> list[compare.Comparison]:
        if not places:
            return []
        if len(places) != 2:
            raise AerieError(
                f"preflight_compare: needs two, the good one and the bad one: names of hosts, JSON files or recordings, got {places}"
            )
        want = next((given["want"] for given in hosts.values() if given.get("want")), {"profile": rules.PROFILES[0]})
        by_name = {one.host: one for one in found}
        pair = [by_name.get(place) or results.of_place(self._loader.path_dwim(place), known, want, ignore) for place in places]
        for one in pair:
            if one.unreachable is not None:
                raise AerieError(f"preflight_compare: {one.host} could not be asked: {one.unreachable}")
        return [compare.compare(*pair)]


def inventory_options() -> str:
    """Return the ``-i`` options of this run, for a command that a person pastes."""
    from ansible.context import CLIARGS  # bound anew when the command line was read

    return shlex.join([word for source in CLIARGS.get("inventory") or () for word in ("-i", source)])


def _examined(known: Any, host: str, given: Mapping[str, Any], ignore: Mapping[str, str]) -> results.HostResult | None:
    """Return what is wrong with one host; None where it was not to be asked."""
    survey, want = dict(given.get("info") or {}), dict(given.get("want") or {})
    if survey.get("skipped"):
        return None
    if survey.get("unreachable") or survey.get("failed") or "hostname" not in survey:
        why = (
            str(survey.get("msg") or "it dropped out of the run before it was surveyed")
            .strip()
            .splitlines()[0]
            .removeprefix("Task failed: ")
        )
        return results.HostResult(host, profile=want.get("profile"), unreachable=why)
    for key in ("changed", "failed", "recording", "warnings", "deprecations", "invocation"):
        survey.pop(key, None)
    try:
        survey, _ = survey_shape.checked(survey)
        probed = given.get("probes") or {}
        if isinstance(probed, Mapping) and isinstance(probed.get("probes"), Mapping):
            untrusted.check(probed["probes"])
            survey |= {"probes": probed["probes"], "healthy_after": probed.get("healthy_after")}
        elif isinstance(probed, Mapping) and probed.get("failed"):
            terminal.warn(f"{host}: the active probes did not run: {probed.get('msg')}")
        with untrusted.reading("the survey"):
            found = results.examine(known, host, survey, want, ignore)
            # What can't be shown or kept is found here, where it is one host's.
            preflight.parts([found])
            _json(found.as_dict())
    except ValueError as error:
        return results.HostResult(host, profile=want.get("profile"), unreachable=f"what it says can't be judged: {cut(error, 300)}")
    return found


def _summary(one: results.HostResult) -> dict[str, Any]:
    counts = {severity: one.count(severity) for severity in rules.SEVERITIES}
    ids = {severity: [finding.id for finding in one.findings if finding.severity == severity] for severity in rules.SEVERITIES}
    return {"unreachable": one.unreachable, "counts": counts, "findings": ids, "unjudged": [rule.id for rule in one.unjudged]}


def _why(one: results.HostResult, fail_on: str) -> str:
    """Return in one line what fails a host; the report above says why and what to do."""
    if one.unreachable is not None:
        return f"could not be asked: {one.unreachable}"
    counts = []
    for level in rules.SEVERITIES[: rules.SEVERITIES.index(fail_on) + 1]:
        ids = [finding.id for finding in one.findings if finding.severity == level]
        if ids:
            counts.append(f"{len(ids)} {level}{'' if len(ids) == 1 else 's'}: {listing(ids)}")
    return "; ".join(counts)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n").encode()


def _told(path: Path, content: bytes | None = None) -> Any:
    """Return what a file says besides what moves by itself: the rules that fire, or what differs."""
    try:
        value = json.loads(content if content is not None else path.read_bytes())
        if path.name == COMPARISON:
            return value
        return [
            value["unreachable"] is not None,
            [finding["id"] for finding in value["findings"]],
            [one["id"] for one in value["unjudged"]],
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
