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
  - On an adopted environment a release has its own copy of SGLang all the same. Of an adopted tree it is a skeleton that imports SGLang
    from there; it is one release for all patch sets, and V(present) with other patch sets makes it unverified. Whatever was adopted is
    never written to, and a release whose adopted environment or commit has changed since is refused with what changed.
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
  set_caches_aside:
    description:
      - With V(current), when that changes anything, moves the compiled kernels of the release that was current before to C(caches/.aside),
        so that none is used for sources that it was not compiled from. Its servers must be stopped.
    type: bool
    default: false
  restore_previous:
    description:
      - With V(current), what C(previous) points to afterwards, in place of the release that is left; an empty string is none.
      - For taking back a switch that failed, so that the release that failed is not the one to go back to.
    type: str
  put_back:
    description:
      - With V(present), for an adopted tree whose files are back with the patch sets that it had before these; the release counts as
        verified again if it did with them.
      - For taking back a switch that failed, as what keeps a tree from being verified again need not keep it from serving as before.
    type: bool
    default: false
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
  description: Where its own copy of SGLang is, or the adopted tree.
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
    adopted: null
    tree: null
    commit: null
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
caches_aside:
  description: Where caches were moved to, below O(root); in check mode those that would be moved, where they are.
  returned: with O(state=current)
  type: list
  elements: str
  sample: [caches/.aside/0.5.15.post1-77ab01c4de55-580.95.05.20260301T120000Z]
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import release
from ansible.module_utils.aerie.releases.release import Ingredients, PatchSetRef
from ansible.module_utils.aerie.words import listing
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
            "set_caches_aside": {"type": "bool", "default": False},
            "restore_previous": {"type": "str"},
            "put_back": {"type": "bool", "default": False},
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
    repatched = found is not None and ingredients.adopted == "tree" and found["patch_sets"] != release.patch_sets_of(ingredients)
    changed = found is None or repatched
    after = shown(release.planned(ingredients))

    def result(exists: bool) -> dict[str, Any]:
        return {
            "changed": changed,
            "exists": exists,
            "diff": {"before": shown(found) if found else "", "after": after if changed or not found else shown(found)},
            **links(paths),
            **release.describe(paths, value),
        }

    if not changed or module.check_mode:
        return result(exists=found is not None)
    if repatched:
        lease.renew_if_given(paths.lease, params["lease"])
        value = release.set_patch_sets(paths, ingredients, put_back=params["put_back"])
        return result(exists=True)

    def work(progress: jobs.Progress) -> dict[str, Any]:
        release.make(paths, ingredients, progress)
        return result(exists=True)

    return detached(module, paths, work)


def current(module: AnsibleModule, paths: HostPaths) -> dict[str, Any]:
    """Verify a release where that was not done yet, and make it current."""
    asked, before = module.params["id"], links(paths)
    caches = release.caches_of(paths, before["current"]) if module.params["set_caches_aside"] else []
    names = [str(cache.relative_to(paths.root)) for cache in caches]
    if module.check_mode and release.ID.fullmatch(asked) and release.read(paths, asked) is None:  # state present would have made it
        return switched(before, asked) | {"id": asked, "exists": False, "changed": True, "caches_aside": names}
    value = release.find(paths, asked)
    after = switched(before, value["id"])
    restored = module.params["restore_previous"]
    if restored is not None and after["current"] != before["current"]:
        after["previous"] = restored or None
    changed = after["current"] != before["current"] or not value["verified"]

    def result(verified: dict[str, Any], aside: list[str]) -> dict[str, Any]:
        return after | {"changed": changed, "exists": True, "caches_aside": aside, **release.describe(paths, verified)}

    if not changed:
        return result(value, [])
    if module.check_mode:
        release.require_unchanged(paths, value)
        return result(value, names)
    if value["verified"]:
        lease.renew_if_given(paths.lease, module.params["lease"])
        release.require_unchanged(paths, value)
        release.switch(paths, value["id"], restored)
        return result(value, release.set_aside(paths, caches))

    def work(progress: jobs.Progress) -> dict[str, Any]:
        verified = release.verify(paths, value, progress)
        release.switch(paths, value["id"], restored)
        return result(verified, release.set_aside(paths, caches))

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


def shown(value: dict[str, Any]) -> str:
    """Return a release as the diff shows it; of an adopted tree, also the patch sets, as its id does not tell them."""
    sets = f"patch sets: {listing(one['name'] for one in value['patch_sets'])}\n" if value.get("tree") else ""
    return f"release {value['id']}\n{sets}"


def links(paths: HostPaths) -> dict[str, str | None]:
    """Return the releases that the host's links point to."""
    return release.links(paths)


def switched(before: dict[str, str | None], wanted: str) -> dict[str, Any]:
    """Return what the links will be once ``wanted`` is current, and the diff that shows it."""
    after = before if before["current"] == wanted else {"current": wanted, "previous": before["current"] or before["previous"]}
    return after | {"diff": {"before": f"current: {before['current'] or 'none'}\n", "after": f"current: {after['current']}\n"}}


if __name__ == "__main__":
    main()
