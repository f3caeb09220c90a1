# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reports all hosts' settings once, on the controller."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import settings_overview, terminal

INSTANCE_COLUMNS = {
    "hosts": terminal.LEFT,
    "instance": terminal.LEFT,
    "arm": terminal.LEFT,
    "speculation": terminal.LEFT,
    "model": terminal.LEFT,
    "GPUs": terminal.LEFT,
    "port": terminal.RIGHT,
    "SGLang": terminal.LEFT,
}
EXPERIMENT_COLUMNS = {
    "hosts": terminal.LEFT,
    "experiment": terminal.LEFT,
    "instance": terminal.LEFT,
    "arms": terminal.LEFT,
    "starts": terminal.RIGHT,
    "cells": terminal.RIGHT,
    "duration": terminal.LEFT,
}
MOST_HOSTS = 4


class ActionModule(ActionBase):
    """Fails for all problems of all hosts, or shows what their settings amount to."""

    BYPASS_HOST_LOOP = True
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        options = {"hosts": {"type": "dict", "required": True}, "show": {"type": "bool"}}
        _, arguments = self.validate_argument_spec(argument_spec=options)
        # A host whose check itself failed has neither; its own failure says why.
        hosts = {host: checked for host, checked in arguments["hosts"].items() if "problems" in checked}
        problems = {host: checked["problems"] for host, checked in hosts.items()}
        if any(problems.values()):
            message = settings_overview.problem_report(problems)
            count = settings_overview.count_problems(problems)
            summary = [{"text": f"{count}; they are listed above.", "style": "error"}]
            return result | {"failed": True, "msg": message, "run_summary": summary}
        if not arguments["show"]:
            return result | {"changed": False, "table": ""}
        parts = tables({host: checked["overview"] for host, checked in hosts.items()})
        terminal.show([terminal.gap(), *parts])
        return result | {
            "changed": False,
            "table": terminal.render(parts, terminal.DEFAULT_WIDTH),
            "run_summary": self._summary(hosts, task_vars or {}),
        }

    def _summary(self, hosts: Mapping[str, Any], variables: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return that the settings can be used, and the next command; nothing where more is run."""
        from ansible.context import CLIARGS  # bound anew when the command line was read

        if not variables.get("__aerie_suggest_next"):
            return []
        count = f"{len(hosts)} host{'s' * (len(hosts) != 1)}"
        summary = [{"text": f"The settings of {count} can be used.", "style": "good"}]
        profiles = {str(variables["hostvars"][host].get("aerie_profile", "")) for host in hosts}
        playbook = "deploy_eagle3.yml" if profiles == {"cpu"} else "playbooks/preflight.yml"
        options = [word for source in CLIARGS.get("inventory") or () for word in ("-i", source)]
        if CLIARGS.get("subset"):
            options += ["--limit", CLIARGS["subset"]]
        command = shlex.join(["ansible-playbook", *options, playbook])
        return [*summary, {"text": "Next:"}, {"command": command}]


def tables(overviews: Mapping[str, Mapping[str, Any]]) -> list[terminal.Part]:
    """Return the tables of instances and experiments (overviews by host); hosts with equal rows share one."""
    instances: dict[tuple[str, ...], list[str]] = {}
    experiments: dict[tuple[str, ...], list[str]] = {}
    recommendations: dict[str, list[str]] = {}
    for host, overview in overviews.items():
        for instance in overview["instances"]:
            keys = ("instance", "arm", "speculation", "model", "gpus", "port", "version")
            instances.setdefault(tuple(instance[key] for key in keys), []).append(host)
        for text in overview["recommendations"]:
            recommendations.setdefault(text, []).append(host)
        if plan := overview["experiment"]:
            subject = (plan["name"], plan["instance"], ", ".join(plan["arms"]))
            size = (str(plan["starts"]), str(plan["cells"]), settings_overview.duration(plan))
            experiments.setdefault((*subject, *size), []).append(host)
    parts: list[terminal.Part] = []
    for columns, rows in ((INSTANCE_COLUMNS, instances), (EXPERIMENT_COLUMNS, experiments)):
        if rows:
            named = [terminal.Column(name, justify) for name, justify in columns.items()]
            cells_of_rows = [(_some(hosts), *cells) for cells, hosts in rows.items()]
            parts += [*([terminal.gap()] if parts else []), terminal.table(named, cells_of_rows)]
    for text, hosts in recommendations.items():
        parts += [terminal.gap(), terminal.paragraph(f"{_some(hosts)}: {text}")]
    return parts or [terminal.paragraph("no host has an instance")]


def _some(hosts: Sequence[str]) -> str:
    if len(hosts) <= MOST_HOSTS:
        return ", ".join(hosts)
    return f"{hosts[0]}, {hosts[1]} and {len(hosts) - 2} more"
