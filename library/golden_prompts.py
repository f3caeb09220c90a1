#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: golden_prompts
short_description: Ask running SGLang servers a few prompts, and tell whether another release answers the same
description:
  - Each prompt is answered at temperature 0, one at a time and from an empty prefix cache, with the two best logprobs at every position.
  - The answers are kept on the host by instance and release.
  - Two answers must be equal token for token where both servers compute in float32. Elsewhere an answer may part from the earlier one
    where that one's best two logits were closer than O(logit_gap); nothing is compared behind that place.
  - Answers of other models, of another kind of arm, with simulated acceptance or dummy weights say nothing about each other. Then
    nothing is compared, which is warned about.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: Aerie's root directory on the host (C(aerie_root)).
    type: path
    required: true
  state:
    description:
      - V(asked) asks the instances that run, and keeps the answers. One that doesn't run or doesn't answer is told, and is no failure.
      - V(compared) asks the instances of O(against), compares, and fails when one doesn't answer, or answers otherwise. Answers that
        pass are kept.
      - V(looked) only tells what runs, at once, whatever state the servers are in.
    type: str
    choices: [asked, compared, looked]
    default: asked
  instances:
    description: Names of the instances. Where it is left out, all that the host has.
    type: list
    elements: str
  against:
    description: With O(state=compared), the release whose kept answers are the measure, by instance, such as RV(releases).
    type: dict
    default: {}
  prompts:
    description:
      - The prompts, each with C(name) and C(text). Written as a path, in the project or absolute, the action plugin reads that file on the
        controller.
      - Without any, nothing is asked and nothing compared, which is warned about.
    type: list
    elements: dict
    default: []
  logit_gap:
    description: Below which difference of the best two logits an answer may part from the earlier one; float32 allows none.
    type: float
    default: 0.25
  service_manager:
    description: What owns servers that were not started yet. V(auto) is systemd where it runs and we are root, and supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
  api_key:
    description: The key that the servers want.
    type: str
  lease:
    description: The host's lease (from M(host_lease)), renewed before each prompt.
    type: dict
attributes:
  check_mode:
    description: Asks no server, and says which would be asked.
    support: full
  diff_mode:
    description: Has nothing to show; what differs is in RV(compared).
    support: none
"""

EXAMPLES = r"""
- name: Ask what runs
  golden_prompts:
    root: /opt/aerie
    prompts: experiments/prompts/golden.json
  register: before

- name: Ask again, now that another release runs
  golden_prompts:
    root: /opt/aerie
    state: compared
    against: "{{ before.releases }}"
    prompts: experiments/prompts/golden.json
"""

RETURN = r"""
instances:
  description: What was found, by name.
  returned: success
  type: dict
  sample:
    main: {running: true, down: false, state: ready, arm: eagle3, release: 0.5.23-0123456789ab, answered: true}
running:
  description: The instances that run.
  returned: success
  type: list
  elements: str
  sample: [main]
down:
  description: The instances that should run and don't, since their start failed or they ended by themselves.
  returned: success
  type: list
  elements: str
  sample: []
releases:
  description: The release that each instance which answered runs, for O(against).
  returned: success
  type: dict
  sample: {main: 0.5.23-0123456789ab}
compared:
  description: How the answers compare, by instance. The outcome is V(equal), V(allowed), V(different) or V(not compared).
  returned: with O(state=compared), unless in check mode
  type: dict
  sample:
    main:
      outcome: allowed
      rule: may diverge where the best two logits were closer than 0.25
      reason: null
      prompts: [{name: prose, outcome: allowed, at: 17, gap: 0.03, text: "prose: diverged at 17, gap 0.03 (allowed)"}]
summary:
  description: All this in words, one line for each instance.
  returned: success
  type: list
  elements: str
  sample: ["main: 10 of 10 golden prompts answered token for token as before (float32: all must be equal)"]
current:
  description: The C(release.json) of the release that is current; null where there is none.
  returned: success
  type: dict
  sample: {id: 0.5.23-0123456789ab, sglang_version: 0.5.23, patch_sets: [{name: phase_profiler, sha256: 9b1f4a}]}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.lease import renew_if_given
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import golden, release
from ansible.module_utils.aerie.serving import server_plan
from ansible.module_utils.aerie.serving.server_http import Endpoint, ServerError
from ansible.module_utils.basic import AnsibleModule

NO_PROMPTS = "there are no prompts to ask"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["asked", "compared", "looked"], "default": "asked"},
            "instances": {"type": "list", "elements": "str"},
            "against": {"type": "dict", "default": {}},
            "prompts": {"type": "list", "elements": "dict", "default": []},
            "logit_gap": {"type": "float", "default": golden.LOGIT_GAP},
            "service_manager": {"type": "str", "default": "auto", "choices": ["auto", "systemd", "supervisor"]},
            "api_key": {"type": "str", "no_log": True},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**Run(module).result())
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: does this user own {module.params['root']}?")


class Run:
    """One call of the module: what is asked, of whom, and what came of it."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.asked = module, module.params
        self.host = server_plan.Host(HostPaths(Path(self.asked["root"])), self.asked["service_manager"])
        self.paths = self.host.paths
        self.prompts = golden.read_prompts(self.asked["prompts"]) if self.asked["prompts"] else ()
        self.against: dict[str, str] = self.asked["against"] if self.asked["state"] == "compared" else {}
        self.found: dict[str, dict[str, Any]] = {}
        self.compared: dict[str, Any] = {}
        self.summary: list[str] = []
        self.problems: list[str] = []
        self.changed = False

    def result(self) -> dict[str, Any]:
        for name in self._names():
            self.found[name] = self._look(name)
            if self.asked["state"] == "asked":
                self._ask(name)
            elif name in self.against:
                self._compare(name)
        current = release.linked(self.paths.current)
        facts: dict[str, Any] = {
            "changed": self.changed,
            "instances": self.found,
            "running": [name for name, one in self.found.items() if one["running"]],
            "down": [name for name, one in self.found.items() if one["down"]],
            "releases": {name: one["release"] for name, one in self.found.items() if one["answered"]},
            "summary": self.summary,
            "current": release.read(self.paths, current) if current else None,
            **({"compared": self.compared} if self.against else {}),
        }
        if self.problems:
            try:
                raise_all(self.problems, "golden prompts")
            except AerieError as error:
                return facts | {"failed": True, "msg": str(error)}
        return facts

    def _names(self) -> list[str]:
        if self.asked["instances"] is not None:
            return list(self.asked["instances"])
        return sorted(path.parent.name for path in self.paths.instances.glob("*/instance.json"))

    def _look(self, name: str) -> dict[str, Any]:
        record = server_plan.recorded(self.paths, name)
        running = bool(record) and self.host.service(record.get("service_manager")).main_pid(name) is not None
        return {
            "running": running,
            "down": bool(record) and not running and record.get("state") in ("ready", "starting", "failed"),
            "state": record.get("state", "absent"),
            "arm": (record.get("arm") or {}).get("name"),
            "release": record.get("release"),
            "answered": False,
        }

    def _ask(self, name: str) -> None:
        if not self.found[name]["running"]:
            self._tell(name, "does not run, so that it was not asked golden prompts")
        elif not self.prompts:
            self._loudly(name, f"golden prompts were NOT asked: {NO_PROMPTS}")
        elif self.module.check_mode:
            self.changed = True
            self._tell(name, f"would be asked {len(self.prompts)} golden prompts")
        else:
            try:
                answers = self._answers(name)
            except ServerError as error:
                self._loudly(name, f"golden prompts were NOT answered: {error}")
                return
            golden.keep(self.paths, name, answers)
            self.changed = self.found[name]["answered"] = True
            self._tell(name, f"answered {len(self.prompts)} golden prompts{_conditions(answers)}")

    def _compare(self, name: str) -> None:
        wanted = self.against[name]
        before = golden.kept(self.paths, name).get(wanted)
        if not self.prompts or before is None:
            why = f"no answers of release {wanted} are kept" if self.prompts else NO_PROMPTS
            self._judge(name, golden.Comparison(golden.NOT_COMPARED, "", reason=why))
        elif self.module.check_mode:
            self._tell(name, f"would be asked {len(self.prompts)} golden prompts, and compared with release {wanted}")
        else:
            try:
                if not self.found[name]["running"]:
                    raise ServerError("it does not run")
                answers = self._answers(name)
            except ServerError as error:
                self.problems.append(f"instance {name} does not answer any more: {error}")
                return
            self.found[name]["answered"] = True
            comparison = golden.compare(before, answers, self.asked["logit_gap"])
            if comparison.outcome != golden.DIFFERENT:
                golden.keep(self.paths, name, answers)
                self.changed = True
            self._judge(name, comparison)

    def _judge(self, name: str, comparison: golden.Comparison) -> None:
        self.compared[name] = comparison.as_dict()
        if comparison.outcome == golden.NOT_COMPARED:
            self._loudly(name, str(comparison))
            return
        self._tell(name, str(comparison))
        if comparison.outcome == golden.DIFFERENT:
            self.problems.append(
                f"instance {name} (release {self.found[name]['release']}) does not answer as it did with release {self.against[name]}: "
                f"{comparison}"
            )

    def _answers(self, name: str) -> golden.Answers:
        record = server_plan.recorded(self.paths, name)
        endpoint = Endpoint(record["host"], record["port"], self.asked["api_key"])
        return golden.ask(
            endpoint, golden.Subject.of(record), self.prompts, tell=lambda: renew_if_given(self.paths.lease, self.asked["lease"])
        )

    def _tell(self, name: str, what: str) -> None:
        self.summary.append(f"{name}: {what}")

    def _loudly(self, name: str, what: str) -> None:
        self._tell(name, what)
        self.module.warn(f"instance {name}: {what}")


def _conditions(answers: golden.Answers) -> str:
    """Say what makes answers less comparable than they could be."""
    notes = []
    if not answers.logprobs:
        notes.append("without logprobs, so that only tokens can be compared")
    if not answers.flushed:
        notes.append("beside other traffic, so that the prefix cache could not be emptied")
    return f" ({'; '.join(notes)})" if notes else ""


if __name__ == "__main__":
    main()
