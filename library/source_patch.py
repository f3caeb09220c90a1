#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: source_patch
short_description: Apply patch sets to an installed Python package, all or nothing
description:
  - Makes the sources of an installed package, or of a git checkout that Python imports it from (an editable install), its originals with
    exactly the given patch sets, in the given order.
  - A file is pristine (as the wheel's RECORD says, or as a clean checkout of git's HEAD would have it), ours (as this module wrote it) or
    unknown, which is refused with a diff.
  - In a git checkout, an uncommitted edit of a file that a set touches is unknown content; edits of other files are warned about once, by
    a run that changes something, and stay. Git is only read; C(state=absent) leaves C(git status) as it was before O(state=present).
  - Back-ups that somebody made by hand beside a touched file (C(x.py.bak), C(x.py.orig), C(x.py~) and the like) are compared with the
    pristine file and told, never changed.
  - Originals are kept by content hash in a store outside the package and are never overwritten. Every result is made from them, so
    that a set may be added, changed or removed in any order.
  - A run is a transaction. Where it fails, or was killed at any point, everything is put back; in the second case by the next run, which
    says so in RV(recovered).
  - Hooks are found in the syntax tree and must match exactly once; all that don't are reported at once and nothing is touched.
author: Aerie contributors (!UNKNOWN)
options:
  path:
    description:
      - The site-packages directory that holds the package, or the directory of a git checkout that it is imported from, such as C(python)
        of SGLang's; its own copy, as symbolic links are refused.
    type: path
    required: true
  package:
    description: The package's import name, such as V(sglang).
    type: str
    default: sglang
  sets:
    description:
      - Names of the patch sets, the whole wanted state, in order.
      - Required for O(state=present). With O(state=verified), leave it out to compare with what was last applied.
    type: list
    elements: str
  definitions:
    description: What these sets are; the action plugin of this module fills it in from the project's C(patches) directory.
    type: list
    elements: dict
  store:
    description: Where originals, manifests and journals are kept, outside O(path) and best on another file system.
    type: path
    required: true
  state:
    description:
      - V(present) applies O(sets) and takes back whatever else was applied.
      - V(absent) puts every file back as it was, byte for byte, and removes what was added.
      - V(verified) only reads, and fails with the names of all files that are not as they should be.
    type: str
    choices: [present, absent, verified]
    default: present
  verifier:
    description:
      - Commands to run after the files were replaced, each a list of words, in O(path), such as an import with the release's own Python.
      - When one fails, everything is put back and the end of its output is the reason.
      - Every changed file is compiled in any case, before anything is touched, with the Python that runs this module.
    type: list
    elements: list
    default: []
  version:
    description:
      - The package's version. When left out, it is that of the dist-info beside the package, else what its C(_version.py) or C(version.py)
        says, else what git's newest tag like C(v0.5.23) says.
    type: str
  search_path:
    description:
      - Directories in which other packages are looked for, besides O(path), by a set that C(requires) something of them.
    type: list
    elements: path
    default: []
  accept_unknown:
    description:
      - Go on where a file's content is unknown. What was never patched by us is taken as the original, so that O(state=absent) gives it
        back byte for byte; what was is restored from the original. Either is warned about, and the unknown content is kept in the store.
    type: bool
    default: false
  originals_on_controller:
    description:
      - A directory on the controller that gets a copy of every original that the applied sets need, and of their manifest, so that a lost
        host disk does not lose them. Relative to the playbook. What it has already is not brought again; check mode brings nothing.
      - Its layout is that of O(store), but for C(manifests/<host>/).
    type: str
  root:
    description: The directory on the host that this project owns, C(aerie_root); needed with O(lease).
    type: path
  lease:
    description: The lease to renew, as returned by M(host_lease); its user and controller are written to the manifest.
    type: dict
attributes:
  check_mode:
    description: Plans everything and fails where the change would; reads only.
    support: full
  diff_mode:
    description: Shows the unified diff of every file that changes. What is shown is what is applied.
    support: full
"""

EXAMPLES = r"""
- name: Patch a release that is not in use yet
  source_patch:
    path: /opt/aerie/releases/0.5.23-0123456789ab/lib/python3.12/site-packages
    sets: [phase_profiler]
    store: /opt/aerie/originals
    verifier:
      - [/opt/aerie/releases/0.5.23-0123456789ab/bin/python, -c, import sglang.srt.speculative.eagle_worker_v2]

- name: See whether somebody edited the package since
  source_patch:
    path: /opt/aerie/releases/0.5.23-0123456789ab/lib/python3.12/site-packages
    store: /opt/aerie/originals
    state: verified

- name: Patch a checkout in place, and bring the originals to the controller
  source_patch:
    path: /sgl-workspace/sglang/python
    sets: [phase_profiler]
    store: /opt/aerie/originals
    originals_on_controller: originals
"""

RETURN = r"""
version:
  description: The package's version.
  returned: success
  type: str
  sample: 0.5.23
origin:
  description: What says how the package's files were, V(record) (the wheel's RECORD), V(git) (HEAD of a checkout) or V(none).
  returned: success
  type: str
  sample: git
commit:
  description: The commit that the git checkout is at; null with another origin.
  returned: success
  type: str
  sample: 4f7ef6ad1c0b6a6f1d5f1a1b0e3a9c55d2b8c7e0
backups:
  description: Back-ups made by hand beside the files that the sets touch; C(backups[].is) is V(pristine), V(differs) or V(unknown).
  returned: success, unless O(state=verified)
  type: list
  elements: dict
  sample:
    - path: sglang/srt/speculative/eagle_worker.py.bak
      file: sglang/srt/speculative/eagle_worker.py
      is: differs
      words: "differs from the pristine file: +3 -1"
notes:
  description: What a run that changes something saw besides, such as edits of files that no set touches; it is warned about too.
  returned: success, unless O(state=verified)
  type: list
  elements: str
  sample: ["/src/python: uncommitted edits of 1 file (sglang/utils.py), which no set touches: they stay, also when the sets are taken back"]
kept:
  description: The manifest of what is applied, and the hashes of the originals in O(store) that taking it back needs.
  returned: success, with O(originals_on_controller), when something is applied, not in check mode
  type: dict
  sample: {manifest: /opt/aerie/originals/manifests/0123456789abcdef.json, sha256: 5d1c07, originals: [3f0c5e2b9d]}
fetched:
  description: How many originals were brought to O(originals_on_controller).
  returned: success, with O(originals_on_controller)
  type: int
  sample: 2
files:
  description: Every file that is, was or would be patched, added, restored or removed; C(files[].accepted) where O(accept_unknown) made
    its original.
  returned: success, unless O(sets) was left out
  type: list
  elements: dict
  sample:
    - path: sglang/srt/speculative/eagle_worker_v2.py
      kind: patched
      state: pristine
      before: 3f0c5e2b9d
      after: 77ab01c4de
      hooks: [a decode cycle begins]
      changed: true
      accepted: false
sets:
  description: The patch sets that are applied, in order, each with the hash of all that it can change.
  returned: success
  type: list
  elements: dict
  sample: [{name: phase_profiler, sha256: 9b1f4a}]
sets_before:
  description: The patch sets that were applied before, in order, in the same form.
  returned: success, unless O(state=verified)
  type: list
  elements: dict
  sample: []
recovered:
  description: What a run that was cut off had begun, and whether it was V(undone) or found V(finished); in check mode what would be done.
  returned: when there was such a run
  type: dict
  sample: {outcome: undone, started: "2026-01-01T02:00:00Z", owner: {user: ops}, files: [sglang/srt/speculative/eagle_worker_v2.py]}
store_same_filesystem:
  description: Whether the store is on the file system of O(path), so that losing one loses both.
  returned: success
  type: bool
  sample: true
drift:
  description: With O(state=verified), every way in which the package isn't as it should be.
  returned: failure of O(state=verified)
  type: list
  elements: str
  sample: ["sglang/srt/speculative/eagle_worker_v2.py was put back since 2026-01-01T02:00:00Z"]
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import sha256_file
from ansible.module_utils.aerie.patching import patch_plan, patch_requires, patch_store, patch_transaction
from ansible.module_utils.aerie.patching.patch_set import PatchSet, selected
from ansible.module_utils.aerie.patching.patch_store import PatchStore
from ansible.module_utils.aerie.patching.source_tree import SourceTree
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def verified(tree: SourceTree, store: PatchStore, sets: list[PatchSet] | None) -> dict[str, Any]:
    found = patch_plan.drift(tree, store, sets)
    if found:
        return {"failed": True, "msg": f"{tree.path} is not as it should be:\n" + "\n".join(f"  - {one}" for one in found), "drift": found}
    return {"changed": False, "sets": patch_plan.applied(store)}


def converged(module: AnsibleModule, tree: SourceTree, store: PatchStore, sets: list[PatchSet]) -> dict[str, Any]:
    asked = {"accept_unknown": module.params["accept_unknown"]}
    patch_requires.check(selected(sets, tree.version)[0], [tree.path, *map(Path, module.params["search_path"])])
    if module.check_mode:
        planned = patch_plan.plan(tree, store, sets, **asked)
    else:
        if module.params["lease"]:
            lease.renew_if_given(HostPaths(Path(module.params["root"])).lease, module.params["lease"])
        with store.locked():
            planned = patch_plan.plan(tree, store, sets, **asked)
            patch_transaction.apply(
                tree,
                store,
                planned,
                owner=module.params["lease"],
                verify=lambda: patch_transaction.run_verifiers(module.params["verifier"], tree.path),
            )
    for warning in (*planned.warnings, *planned.notes):
        module.warn(warning)
    recovered = {"recovered": planned.interrupted.as_result()} if planned.interrupted else {}
    return {
        "changed": planned.changed,
        "files": [file.as_result() for file in planned.files],
        "sets": planned.applied_after,
        "sets_before": planned.applied_before,
        "backups": [one.as_result() for one in planned.backups],
        "notes": list(planned.notes),
        "diff": {"prepared": planned.diff()},
        **recovered,
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "package": {"type": "str", "default": "sglang"},
            "sets": {"type": "list", "elements": "str"},
            "definitions": {"type": "list", "elements": "dict"},
            "store": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent", "verified"], "default": "present"},
            "verifier": {"type": "list", "elements": "list", "default": []},
            "version": {"type": "str"},
            "search_path": {"type": "list", "elements": "path", "default": []},
            "accept_unknown": {"type": "bool", "default": False},
            "originals_on_controller": {"type": "str"},
            "root": {"type": "path"},
            "lease": {"type": "dict"},
        },
        required_if=[("state", "present", ("sets",))],
        required_by={"sets": ("definitions",), "lease": ("root",)},
        supports_check_mode=True,
    )
    state = module.params["state"]
    try:
        tree = SourceTree.open(Path(module.params["path"]), module.params["package"], module.params["version"])
        store = PatchStore.beside(tree, Path(module.params["store"]))
        definitions = module.params["definitions"]
        sets = None if definitions is None else [PatchSet.of(one) for one in definitions]
        result = (
            verified(tree, store, sets) if state == "verified" else converged(module, tree, store, [] if state == "absent" else sets or [])
        )
        wanted = module.params["originals_on_controller"] and not module.check_mode
        if wanted and (manifest := store.manifest()):
            result["kept"] = {
                "manifest": str(store.manifest_path),
                "sha256": sha256_file(store.manifest_path),
                "originals": sorted(patch_store.needed(manifest)),
            }
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(
        version=tree.version.text,
        origin=tree.origin,
        commit=tree.commit,
        store_same_filesystem=store.same_filesystem_as(tree.path),
        **result,
    )


if __name__ == "__main__":
    main()
