#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: host_tuning
short_description: Tune a GPU host, and take that back without a trace
description:
  - Converges kernel command line (a drop-in of GRUB), options of kernel modules, access control services of PCIe, CPU governor, GPU power,
    kernel variables and limits, in one call.
  - Everything is planned and every refusal told before anything is touched. What fails on the way is put back.
  - What can be set at once is; what can't is said to come with the next boot. A file on the host keeps how it was, so that
    O(state=absent) leaves no file, unit, link or directory of ours, and every live value as it was.
  - What others set to something else is refused with file and line; what they set to the same is not set again.
  - The action plugin of this module reads the profiles from C(tuning/profiles.yml) of the project.
author: Aerie contributors (!UNKNOWN)
options:
  state:
    description:
      - V(present) sets what is wanted, and takes back what is wanted no more. V(absent) takes everything back.
      - V(verified) changes nothing, and fails with everything that is wanted and not in force.
    type: str
    choices: [present, absent, verified]
    default: present
  profiles:
    description: Names of profiles. Two that conflict, or one that is not for this host, are refused.
    type: list
    elements: str
    default: []
  settings:
    description:
      - Settings over those of the profiles, with any of C(kernel_command_line) (words), C(modprobe) (options by module), C(acs)
        (V(cleared)), C(cpu_governor), C(sysctl), C(limits) (C(memlock), C(nofile)), C(power_limit_w) and C(persistence) (V(true)).
      - Null takes away what a profile sets.
    type: dict
    default: {}
  definitions:
    description: The profiles by name, as in C(tuning/profiles.yml). The action plugin fills it in.
    type: dict
    default: {}
  manage_kernel:
    description:
      - Whether the kernel, its boot and the hardware are this host's to set. V(auto) says no in a container, where all but C(limits) is
        then refused.
    type: str
    choices: [auto, 'true', 'false']
    default: auto
  info:
    description: The survey of this host, as M(gpu_host_info) returns it. Without one the module surveys the host itself.
    type: dict
  driver_pending:
    description:
      - The driver is installed, or in check mode would be, and comes with the next boot. What must be asked of GPUs is then left to the
        verification after it, and set by the units at boot.
    type: bool
    default: false
  aerie_root:
    description: The directory on the host that this project owns; needed with O(lease).
    type: path
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything changes.
    type: dict
attributes:
  check_mode:
    description: Says what would change and whether a reboot would be needed, refuses what would be refused, and changes nothing.
    support: full
  diff_mode:
    description: Shows each file, and each live value under the path or name that it has.
    support: full
"""

EXAMPLES = r"""
- name: Let GPUs of an AMD host talk to each other
  host_tuning:
    profiles: [iommu_passthrough, acs_cleared, uvm_without_hmm]
    settings:
      power_limit_w: 450

- name: See after the reboot that all of it is in force
  host_tuning:
    state: verified
    profiles: [iommu_passthrough, acs_cleared, uvm_without_hmm]
    settings:
      power_limit_w: 450

- name: Take everything back
  host_tuning:
    state: absent
"""

RETURN = r"""
settings:
  description: What is wanted, profiles and settings together; empty where everything is taken back.
  returned: success
  type: dict
  sample: {kernel_command_line: [iommu=pt], acs: cleared, power_limit_w: 450}
reboot_required:
  description: Whether something is in force only after the next boot.
  returned: success
  type: bool
  sample: true
reboot_reason:
  description: What that is, null for nothing.
  returned: success
  type: str
  sample: the running kernel was booted without iommu=pt
files:
  description: Paths of files that were, or in check mode would be, written or removed.
  returned: success
  type: list
  elements: str
  sample: [/etc/default/grub.d/99-aerie-tuning.cfg]
commands:
  description: Commands that were, or in check mode would be, run, in that order.
  returned: success
  type: list
  elements: list
  sample: [[/usr/sbin/update-grub]]
live:
  description: Live values that were, or in check mode would be, set, with what they were.
  returned: success
  type: list
  elements: dict
  sample: [{what: /proc/sys/vm/swappiness, before: "60", after: "0"}]
notes:
  description: What a person should know, such as a value that comes only with the next boot, or a profile to be measured both ways.
  returned: success
  type: list
  elements: str
  sample: ["profile p2p_registry helped some hosts and harmed others: measure with it and without it, and keep what wins"]
mismatches:
  description: With O(state=verified), everything that is wanted and not in force.
  returned: when state is verified
  type: list
  elements: str
  sample: ["kernel_command_line: iommu=pt is not in /proc/cmdline"]
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.host import host_info, tuning, tuning_apply, tuning_found
from ansible.module_utils.aerie.host.tuning_settings import Settings, resolve
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule

ROOT = Path("/")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent", "verified"], "default": "present"},
            "profiles": {"type": "list", "elements": "str", "default": []},
            "settings": {"type": "dict", "default": {}},
            "definitions": {"type": "dict", "default": {}},
            "manage_kernel": {"type": "str", "choices": ["auto", "true", "false"], "default": "auto"},
            "info": {"type": "dict"},
            "driver_pending": {"type": "bool", "default": False},
            "aerie_root": {"type": "path"},
            "lease": {"type": "dict"},
        },
        required_by={"lease": ["aerie_root"]},
        supports_check_mode=True,
    )
    try:
        module.exit_json(**tuned(module.params, check=module.check_mode, root=ROOT))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}: tuning a host needs root: set ansible_become")


def tuned(asked: dict[str, Any], *, check: bool, root: Path, run: tuning_found.Run = tuning_found.run_command) -> dict[str, Any]:
    """Plan, and carry that out unless only asked to look."""
    nothing_asked = asked["state"] == "absent" or not (asked["profiles"] or asked["settings"])
    if nothing_asked and (asked["state"] == "verified" or tuning_found.nothing_to_do(root, Settings())):
        return result(tuning.Plan(), Settings(), [])
    info = asked["info"] or host_info.survey(host_info.open_host(root), host_info.Question(pythons=()))
    if asked.get("driver_pending") and not info.get("gpus"):
        info = info | {"driver_pending": True}
    wanted, notes = (Settings(), []) if nothing_asked else resolve(asked["profiles"], asked["definitions"], asked["settings"], info)
    found = tuning_found.read(root, info, wanted, run)
    if asked["state"] == "verified":
        mismatches = tuning.mismatches(wanted, found)
        raise_all(mismatches, "the host's tuning is not in force")
        return result(tuning.Plan(), wanted, notes) | {"mismatches": mismatches}
    owns = {"true": True, "false": False}.get(asked["manage_kernel"], (info.get("container") or {}).get("kind") is None)
    planned = tuning.plan(wanted, found, owns_kernel=owns)
    if not check and (planned.changed or planned.state != found.state or planned.undone != found.undone):
        if planned.changed and asked["lease"]:
            lease.renew_if_given(HostPaths(Path(asked["aerie_root"])).lease, asked["lease"])
        notes = [*notes, *tuning_apply.apply(planned, root, found.state, run)]
    return result(planned, wanted, notes)


def result(planned: tuning.Plan, wanted: Settings, notes: list[str]) -> dict[str, Any]:
    return {
        "changed": planned.changed,
        "settings": wanted.as_dict(),
        "reboot_required": bool(planned.reboot_reasons),
        "reboot_reason": "; ".join(planned.reboot_reasons) or None,
        "files": [file.path for file in planned.files],
        "commands": [list(argv) for argv in (*planned.before, *planned.commands)],
        "live": [{"what": live.what, "before": live.before, "after": live.after} for live in planned.live],
        "notes": [*notes, *planned.notes],
        "diff": planned.diff(),
    }


if __name__ == "__main__":
    main()
