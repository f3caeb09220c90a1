#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_release
short_description: Make, verify, switch to or remove a release of SGLang
description:
  - A release is SGLang's own sources on top of a shared environment, named after all that it is made from; it never changes.
  - V(present) makes its tree, which M(source_patch) then patches. V(current) verifies it and makes it the one that servers start from.
  - To verify is to compile the speculative workers, to import them with the release's own Python, from its own tree, and to keep
    what SGLang's own parser takes in C(server_arguments.json) of the release. When that fails, the current release stays.
  - What was verified is not verified again, so going back is a matter of milliseconds.
  - The work runs detached on the host, survives a cut connection, and shows its progress.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  state:
    description:
      - V(present) makes the release that the ingredients name, not yet verified.
      - V(current) verifies the release O(id) and points C(current) to it; C(previous) remembers the one before.
      - V(absent) removes the release O(id), unless it is current, previous or in use.
    type: str
    choices: [present, current, absent]
    default: present
  id:
    description: The release, as RV(id) of V(present) names it. V(previous) means the release before the current one.
    type: str
  version:
    description: The SGLang version, as M(sglang_environment) returned it.
    type: str
  profile:
    description: The profile, as M(sglang_environment) returned it.
    type: str
    choices: [cpu, cuda]
  environment:
    description: The environment, as M(sglang_environment) returned it.
    type: dict
  package:
    description: SGLang's pristine copy, as M(sglang_environment) returned it.
    type: dict
  patch_sets:
    description: Names of the patch sets that the release will get, in order.
    type: list
    elements: str
    default: []
  patch_set_hashes:
    description: The content hash of each of O(patch_sets); the action plugin of this module fills it in.
    type: dict
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything is changed.
    type: dict
attributes:
  check_mode:
    description: Says what would change. A release that is not made yet can't be verified then.
    support: full
  diff_mode:
    description: Shows which release is current before and after, or which is made or removed.
    support: full
"""

EXAMPLES = r"""
- name: Make the release
  sglang_release:
    root: /opt/aerie
    version: "{{ result.version }}"
    profile: "{{ result.profile }}"
    environment: "{{ result.environment }}"
    package: "{{ result.package }}"
    patch_sets: [phase_profiler]
  register: release

- name: Verify it and make it current
  sglang_release:
    root: /opt/aerie
    state: current
    id: "{{ release.id }}"

- name: Go back
  sglang_release:
    root: /opt/aerie
    state: current
    id: previous
"""

RETURN = r"""
id:
  description: The release.
  returned: success
  type: str
  sample: 0.5.15.post1-3b1f4a9c02de
exists:
  description: Whether its tree is on the host now; false in check mode as long as it was not made.
  returned: success
  type: bool
  sample: true
path:
  description: The release's directory.
  returned: unless O(state=absent)
  type: str
  sample: /opt/aerie/releases/0.5.15.post1-3b1f4a9c02de
site_packages:
  description: Where its own copy of SGLang is.
  returned: unless O(state=absent)
  type: str
  sample: /opt/aerie/releases/0.5.15.post1-3b1f4a9c02de/lib/python3.12/site-packages
python:
  description: Its interpreter.
  returned: unless O(state=absent)
  type: str
  sample: /opt/aerie/releases/0.5.15.post1-3b1f4a9c02de/bin/python
release:
  description: What its C(release.json) says.
  returned: unless O(state=absent)
  type: dict
  sample:
    id: 0.5.15.post1-3b1f4a9c02de
    sglang_version: 0.5.15.post1
    profile: cuda
    patch_sets: [{name: phase_profiler, sha256: 9b1f4a}]
    verified: true
current:
  description: The release that is, or in check mode would be, current.
  returned: success
  type: str
  sample: 0.5.15.post1-3b1f4a9c02de
previous:
  description: The release that is, or in check mode would be, previous.
  returned: success
  type: str
  sample: 0.5.15.post1-77ab01c4de55
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, lease, release
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.release import Ingredients, PatchSetRef
from ansible.module_utils.basic import AnsibleModule

INGREDIENTS = ("version", "profile", "environment", "package")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "current", "absent"], "default": "present"},
            "id": {"type": "str"},
            "version": {"type": "str"},
            "profile": {"type": "str", "choices": ["cpu", "cuda"]},
            "environment": {"type": "dict"},
            "package": {"type": "dict"},
            "patch_sets": {"type": "list", "elements": "str", "default": []},
            "patch_set_hashes": {"type": "dict"},
            "lease": {"type": "dict"},
        },
        required_if=[("state", "present", INGREDIENTS), ("state", "current", ("id",)), ("state", "absent", ("id",))],
        supports_check_mode=True,
    )
    states = {"present": present, "current": current, "absent": absent}
    try:
        module.exit_json(**states[module.params["state"]](module, HostPaths(Path(module.params["root"]))))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")


def present(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    """Make the tree of the release that the ingredients name, unless it is there."""
    params = module.params
    hashes = params["patch_set_hashes"] or {}
    unknown = [name for name in params["patch_sets"] if name not in hashes]
    if unknown:
        raise AerieError("sglang_release needs its action plugin, which reads the patch sets: is action_plugins of ansible.cfg in force?")
    ingredients = Ingredients(
        version=params["version"],
        profile=params["profile"],
        environment=params["environment"],
        package=params["package"],
        patch_sets=tuple(PatchSetRef(name, hashes[name]) for name in params["patch_sets"]),
    )
    found = release.read(paths, ingredients.id)
    value = found or release.planned(ingredients)
    changed = found is None

    def result(exists: bool) -> dict[str, Any]:
        after = f"release {ingredients.id}\n"
        return {
            "changed": changed,
            "exists": exists,
            "diff": {"before": "" if changed else after, "after": after},
            **links(paths),
            **release.describe(paths, value),
        }

    if not changed or module.check_mode:
        return result(exists=not changed)

    def work(progress: jobs.Progress) -> dict[str, Any]:
        release.make(paths, ingredients, progress)
        return result(exists=True)

    return detached(module, paths, work)


def current(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    """Verify a release where that was not done yet, and make it current."""
    asked, before = module.params["id"], links(paths)
    if module.check_mode and release.ID.fullmatch(asked) and release.read(paths, asked) is None:
        return switched(before, asked) | {"id": asked, "exists": False, "changed": True}  # state present would have made it
    value = release.find(paths, asked)
    after = switched(before, value["id"])
    changed = after["current"] != before["current"] or not value["verified"]

    def result(verified: dict[str, Any]) -> dict[str, Any]:
        return after | {"changed": changed, "exists": True, **release.describe(paths, verified)}

    if not changed or module.check_mode:
        return result(value)
    if value["verified"]:
        lease.renew_if_given(paths.lease, module.params["lease"])
        release.switch(paths, value["id"])
        return result(value)

    def work(progress: jobs.Progress) -> dict[str, Any]:
        verified = release.verify(paths, value, progress)
        release.switch(paths, value["id"])
        return result(verified)

    return detached(module, paths, work)


def absent(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    """Remove a release that nothing needs."""
    asked = module.params["id"]
    if asked == "previous" or not release.ID.fullmatch(asked):
        raise AerieError(f"{asked!r} is no release id, such as 0.5.23-0123456789ab: name the release to remove")
    changed = paths.release(asked).exists()
    if changed:
        release.refuse_removal(paths, asked)
    if changed and not module.check_mode:
        lease.renew_if_given(paths.lease, module.params["lease"])
        release.remove(paths, asked)
    diff = {"before": f"release {asked}\n" if changed else "", "after": ""}
    return {"changed": changed, "id": asked, "exists": changed and module.check_mode, "diff": diff, **links(paths)}


def detached(module: AnsibleModule, paths: HostPaths, work: Any) -> dict[str, Any]:
    """Start the work, which the action plugin follows."""
    lease.renew_if_given(paths.lease, module.params["lease"])
    job = jobs.new_directory(paths.jobs, "sglang_release")
    jobs.start(job, work)
    return {"changed": True, "job": str(job)}


def links(paths: HostPaths) -> dict[str, str | None]:
    """Return the releases that the host's links point to."""
    return {"current": release.linked(paths.current), "previous": release.linked(paths.previous)}


def switched(before: dict[str, str | None], wanted: str) -> dict[str, Any]:
    """Return what the links will be once ``wanted`` is current, and the diff that shows it."""
    after = before if before["current"] == wanted else {"current": wanted, "previous": before["current"] or before["previous"]}
    return after | {"diff": {"before": f"current: {before['current'] or 'none'}\n", "after": f"current: {after['current']}\n"}}


if __name__ == "__main__":
    main()
