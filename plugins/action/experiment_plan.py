# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Plans an experiment on the controller; the host is not asked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT

OPTIONS = {
    "experiment": {"type": "raw", "required": True},
    "arms": {"type": "dict", "required": True},
    "instances": {"type": "dict", "default": {}},
    "instance": {"type": "str"},
}


def load(wanted: Any) -> Any:
    """Return the experiment that ``wanted`` names or is; raise AerieError when there is no such file."""
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.words import listing, near

    if isinstance(wanted, Mapping):
        return wanted
    name = str(wanted)
    is_path = "/" in name or name.endswith((".yml", ".yaml"))
    path = PROJECT / name if is_path else PROJECT / "experiments" / f"{name}.yml"
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        known = sorted(found.stem for found in (PROJECT / "experiments").glob("*.yml"))
        raise AerieError(f"experiment {name!r}: {path}: {error.strerror}; there are {listing(known)}{near(name, known)}") from error
    except yaml.YAMLError as error:
        raise AerieError(f"experiment {name!r}: {path} is not YAML: {error}") from error


def choose_instance(asked: str | None, own: str | None, instances: Mapping[str, Any]) -> str:
    """Return the instance to measure: the one asked for, the experiment's own, or the only one."""
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.words import listing, near

    chosen = asked or own or (next(iter(instances)) if len(instances) == 1 else None)
    if chosen is None:
        raise AerieError(f"which instance is to be measured? This host has {listing(sorted(instances))}: set sglang_benchmark_instance")
    if chosen not in instances:
        known = listing(sorted(instances))
        raise AerieError(f"instance {chosen!r} is not one of sglang_server_instances ({known}){near(chosen, instances)}")
    return chosen


class ActionModule(ActionBase):
    """Reads, checks and plans; every fault is told before a server is touched."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import datasets, experiment

        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec(argument_spec=OPTIONS)
        try:
            wanted = experiment.validate(load(arguments["experiment"]), arguments["arms"], arguments["instances"])
            instance = choose_instance(arguments["instance"], wanted.instance, arguments["instances"])
            dataset = datasets.check(PROJECT / wanted.workload.path, wanted.most_requests) if wanted.workload.path else None
            plan = experiment.plan(wanted, arguments["arms"], dataset.sha256 if dataset else None)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        found = None
        if dataset:
            found = {"path": str(dataset.path), "sha256": dataset.sha256, "entries": dataset.entries, "usable": dataset.usable}
        return result | plan.as_dict() | {"changed": False, "instance": instance, "dataset": found}
