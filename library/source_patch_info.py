#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: source_patch_info
short_description: Tell what is patched on a host, file by file
description:
  - Looks at every release that C(current), C(previous) or a link below C(pins) means, in one call, and changes nothing.
  - Each file that a patch set changed or added is compared with what was written, and its kept original with its own hash. Every other
    Python file is compared with what the package was published with, so that edits, missing and additional files show.
  - What isn't as it should be is returned in RV(drift) and is no failure. To fail on it, use M(source_patch) with C(state=verified).
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  release:
    description: The id of one release to look at, instead of those that links mean.
    type: str
  path:
    description: One tree to look at, instead of releases; the directory that holds the package, such as a checkout's C(python).
    type: path
  package:
    description: The package's import name; with O(path).
    type: str
    default: sglang
  version:
    description: The package's version, where O(path) doesn't tell.
    type: str
  store:
    description: Where originals are kept; C(originals) below O(root) when left out.
    type: path
  copies:
    description:
      - A directory on the controller with a copy of the store; the action plugin of this module looks there for each original.
      - The module itself never sees it.
    type: path
  show:
    description: Print a table on the controller; done by the action plugin.
    type: bool
    default: false
attributes:
  check_mode:
    description: Changes nothing in any case.
    support: full
  diff_mode:
    description: There is nothing to show, as nothing changes.
    support: none
"""

EXAMPLES = r"""
- name: Look at what is patched
  source_patch_info:
    root: /opt/aerie
  register: patches

- name: Look at a checkout
  source_patch_info:
    root: /opt/aerie
    path: /sgl-workspace/sglang/python
"""

RETURN = r"""
releases:
  description: Each release that was looked at.
  returned: success
  type: list
  elements: dict
  contains:
    id:
      description: The release; null with O(path).
      type: str
      sample: 0.5.23-571f039bbac0
    links:
      description: The links that mean it.
      type: list
      elements: str
      sample: [current, pins/nightly]
    adopted:
      description: V(environment) or V(tree) where it is one that was there before, else null.
      type: str
      sample: tree
    verified:
      description: Whether it was verified.
      type: bool
      sample: true
    sets:
      description: The patch sets that it was made for.
      type: list
      elements: str
      sample: [phase_profiler]
    applied:
      description: The patch sets that are applied.
      type: list
      elements: str
      sample: [phase_profiler]
    since:
      description: When they were applied.
      type: str
      sample: "2026-01-01T02:00:00Z"
    tree:
      description: Where its sources are.
      type: str
      sample: /opt/aerie/releases/0.5.23-571f039bbac0/lib/python3.12/site-packages
    version:
      description: The package's version.
      type: str
      sample: 0.5.23
    origin:
      description: What tells which files are pristine, V(record), V(git) or V(none).
      type: str
      sample: record
    commit:
      description: The commit of a checkout.
      type: str
      sample: 1f0c27fe7e9d
    files:
      description: Each file that was patched or added, and each Python file that isn't as published.
      type: list
      elements: dict
      sample:
        - path: sglang/srt/speculative/eagle_worker_v2.py
          state: patched
          sets: [phase_profiler]
          hooks: [a decode cycle begins]
          original: {sha256: 7d3548362886, state: kept, accepted: false, copied: true}
          drift: null
    pristine:
      description: How many Python files are as published; null where that isn't known.
      type: int
      sample: 4716
    store_same_filesystem:
      description: Whether losing one file system loses the tree and its originals.
      type: bool
      sample: true
    backups_beside:
      description: Copies that somebody left beside files, such as C(.bak), and for those of patched files how they compare.
      type: list
      elements: dict
      sample: [{path: sglang/srt/server_args.py.bak, words: is the pristine file}]
    interrupted:
      description: A transaction that was cut off, and what the next run of M(source_patch) does about it; null where there is none.
      type: dict
      sample:
        started: "2026-01-01T02:00:00Z"
        owner: {user: ops}
        files: [sglang/srt/server_args.py]
        outcome: undone
        next: the next run puts its files back first (1)
    drift:
      description: Every way in which it isn't as it should be, in words.
      type: list
      elements: str
      sample: ["sglang/srt/server_args.py was changed by somebody: it is neither as published nor patched by Aerie"]
drift:
  description: The same of all releases, each with its release before it; empty where all is well.
  returned: success
  type: list
  elements: str
  sample: []
table:
  description: What the action plugin showed.
  returned: with O(show)
  type: str
  sample: "gpu-01: release 0.5.23-571f039bbac0 (current, verified)"
"""

from pathlib import Path

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.patching import patch_status
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "release": {"type": "str"},
            "path": {"type": "path"},
            "package": {"type": "str", "default": "sglang"},
            "version": {"type": "str"},
            "store": {"type": "path"},
            "copies": {"type": "path"},
            "show": {"type": "bool", "default": False},
        },
        mutually_exclusive=[("release", "path")],
        supports_check_mode=True,
    )
    asked = module.params
    paths = HostPaths(Path(asked["root"]))
    try:
        if asked["path"]:
            store = Path(asked["store"]) if asked["store"] else paths.originals
            facts = patch_status.tree(Path(asked["path"]), store, package=asked["package"], version=asked["version"])
            found = [{"id": None, "links": [], "adopted": None, "verified": False, "sets": facts["applied"]} | facts]
        else:
            found = patch_status.survey(paths, release_id=asked["release"])
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    drift = [f"{one['id'] or one['tree']}: {words}" for one in found for words in one["drift"]]
    module.exit_json(changed=False, releases=found, drift=drift)


if __name__ == "__main__":
    main()
