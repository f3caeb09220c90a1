#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_environment
short_description: Install what an SGLang version needs into a virtual environment
description:
  - Makes a virtual environment from a lock file, every package checked by its hash, and fetches SGLang's own wheel beside it.
  - An environment is named after all that it is made from, so releases share it, and one that is there is never made again.
  - An environment that a killed run left half made is made again.
  - Instead of making one, it can adopt what the host has, a Python with its packages and SGLang, or a checkout of SGLang. That is only
    looked at; of all this, nothing but the environment of supervisor is made then.
  - The work runs detached on the host, survives a cut connection, and shows its progress.
  - The action plugin of this module reads C(versions.yml) and the lock on the controller; the host needs neither.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root).
    type: path
    required: true
  profile:
    description: What the host serves with; V(cpu) adds the stand-ins for GPU-only packages, V(cuda) refuses them.
    type: str
    choices: [cpu, cuda]
    required: true
  version:
    description:
      - The SGLang version, one of C(versions.yml); its default for O(profile) when left out.
      - With O(adopt_environment) or O(adopt_tree), the version that must be there; any when left out.
    type: str
  python:
    description: The Python on the host that environments are made with, a name or a path.
    type: str
    default: python3
  wheels:
    description:
      - A directory on the host, or the URL of a page that links wheels. No index is asked then.
      - It must hold every package of the lock, SGLang, and torch.
    type: str
  index_url:
    description: The package index to ask instead of the one that pip on the host is configured for.
    type: str
  extra_index_urls:
    description:
      - Package indexes to ask as well. Profile V(cpu) asks them for torch only, as one may hold its CPU builds.
      - One that can't be reached is passed over, which takes pip a while.
    type: list
    elements: str
    default: []
  supervisor:
    description: Whether to make the environment of supervisor too, which owns servers where systemd does not run.
    type: bool
    default: false
  adopt_environment:
    description:
      - A Python on the host whose packages and SGLang are used as they are, as in a container image, such as V(/opt/venv/bin/python).
      - Its SGLang is an installed wheel, or an editable installation of a git checkout without uncommitted changes.
    type: str
  adopt_tree:
    description:
      - The directory of a checkout that holds the package C(sglang), to be used, and patched, in place.
      - Its packages are those of O(adopt_environment), or else of O(python).
    type: str
  architectures:
    description: The architectures of the host's GPUs, such as V(sm120); a version that was not verified on them causes a warning.
    type: list
    elements: str
    default: []
  build:
    description: What C(versions.yml) says of the version; the action plugin of this module fills it in.
    type: dict
  lock_text:
    description: The lock; the action plugin of this module fills it in.
    type: str
  supervisor_lock_text:
    description: The lock of supervisor; the action plugin of this module fills it in.
    type: str
  stand_ins:
    description: The stand-ins' files by path; the action plugin of this module fills it in.
    type: dict
    default: {}
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything is changed.
    type: dict
attributes:
  check_mode:
    description: Says what would be made, and refuses what would be refused.
    support: full
  diff_mode:
    description: Names the environment and packages that are made.
    support: full
"""

EXAMPLES = r"""
- name: Install the default version's environment
  sglang_environment:
    root: /opt/aerie
    profile: cuda
    python: python3.12
  register: result

- name: Install it on a host that can't reach a package index
  sglang_environment:
    root: /opt/aerie
    profile: cuda
    python: python3.12
    wheels: /srv/wheels

- name: Use what a container image brings
  sglang_environment:
    root: /opt/aerie
    profile: cuda
    adopt_environment: /opt/venv/bin/python
"""

RETURN = r"""
version:
  description: The SGLang version.
  returned: success
  type: str
  sample: 0.5.15.post1
profile:
  description: The profile it was installed for.
  returned: success
  type: str
  sample: cuda
verified_on:
  description: What this version was verified on; of an adopted one, what its lock was, and nothing when C(versions.yml) has none.
  returned: success
  type: list
  elements: str
  sample: [sm90, wheel]
environment:
  description: The environment; its torch version is null as long as it is not made.
  returned: success
  type: dict
  sample:
    id: cuda-0f3a51c2b9d8
    path: /opt/aerie/environments/cuda-0f3a51c2b9d8
    site_packages: /opt/aerie/environments/cuda-0f3a51c2b9d8/lib/python3.12/site-packages
    python: /opt/aerie/environments/cuda-0f3a51c2b9d8/bin/python
    python_version: 3.12.3
    torch_version: 2.11.0+cu130
    adopted: false
    search_path: [/opt/aerie/environments/cuda-0f3a51c2b9d8/lib/python3.12/site-packages]
package:
  description:
    - SGLang's own pristine copy, and the hash of the wheel that it came from.
    - Of an adopted one, the directory that it is imported from, a hash of its files (of a tree, of its path and commit), what of it was
      adopted (V(environment) or V(tree)), and the commit, if git knows it.
  returned: success
  type: dict
  sample:
    path: /opt/aerie/packages/sglang-0.5.15.post1-d1cf208d
    sha256: d1cf208d6ed6bd1d66e6c284635cb671519855dcdfe119e3c4011b6797c90679
    adopted: null
    commit: null
supervisor:
  description: The environment of supervisor, or null when it was not asked for.
  returned: success
  type: dict
  sample:
    path: /opt/aerie/environments/supervisor-51c2b9d80f3a
    python: /opt/aerie/environments/supervisor-51c2b9d80f3a/bin/python
made:
  description: What was, or in check mode would be, made.
  returned: success
  type: list
  elements: str
  sample: [environments/cuda-0f3a51c2b9d8, packages/sglang-0.5.15.post1-d1cf208d]
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import adoption, environment
from ansible.module_utils.aerie.releases.environment import Source, Spec
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "profile": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "version": {"type": "str"},
            "python": {"type": "str", "default": "python3"},
            "wheels": {"type": "str"},
            "index_url": {"type": "str"},
            "extra_index_urls": {"type": "list", "elements": "str", "default": []},
            "supervisor": {"type": "bool", "default": False},
            "adopt_environment": {"type": "str"},
            "adopt_tree": {"type": "str"},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "build": {"type": "dict"},
            "lock_text": {"type": "str"},
            "supervisor_lock_text": {"type": "str"},
            "stand_ins": {"type": "dict", "default": {}},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        adopting = module.params["adopt_environment"] or module.params["adopt_tree"]
        module.exit_json(**(adopt(module) if adopting else converge(module)))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")


def converge(module: AnsibleModule) -> dict[str, Any]:
    """Make what is missing, in a detached job; return the module's result, or the job to follow."""
    params = module.params
    if params["build"] is None:
        raise AerieError("sglang_environment needs its action plugin, which reads versions.yml: is action_plugins of ansible.cfg in force?")
    paths, supervisor = HostPaths(Path(params["root"])), params["supervisor"]
    build = params["build"]
    spec = Spec(
        version=build["version"],
        profile=params["profile"],
        lock_text=params["lock_text"],
        torch=build["torch"],
        torch_in_lock=build["torch_in_lock"],
        sglang_sha256=build["sglang_sha256"],
        disk_gib=build["disk_gib"],
        stand_ins=params["stand_ins"],
        supervisor_lock_text=params["supervisor_lock_text"],
    )
    source = Source(params["wheels"], params["index_url"], tuple(params["extra_index_urls"]))
    interpreter = environment.find_interpreter(params["python"])
    plan = environment.plan(paths, spec, interpreter, supervisor=supervisor)
    made = plan.made(paths)

    def result() -> dict[str, Any]:
        return {
            "changed": plan.changed,
            "made": made,
            "verified_on": build["verified_on"],
            "diff": {"before": "", "after": "".join(f"{name}\n" for name in made)},
            **environment.describe(plan, spec, interpreter),
        }

    if not plan.changed or module.check_mode:
        return result()
    lease.renew_if_given(paths.lease, params["lease"])

    def work(progress: jobs.Progress) -> dict[str, Any]:
        environment.apply(paths, spec, interpreter, source, progress, supervisor=supervisor)
        return result()

    job = jobs.new_directory(paths.jobs, "sglang_environment")
    jobs.start(job, work)
    return {"changed": True, "job": str(job)}


def adopt(module: AnsibleModule) -> dict[str, Any]:
    """Look at what the host has; make supervisor's environment, in a detached job, where that is missing."""
    params = module.params
    paths, profile = HostPaths(Path(params["root"])), params["profile"]
    named = params["adopt_environment"]
    found = adoption.survey(named or params["python"], adoption.ENVIRONMENT_SETTING if named else "sglang_release_python")
    notes = adoption.check(found, profile)
    tree, asked = params["adopt_tree"], params["version"]
    package = adoption.tree(found, tree, asked) if tree else adoption.installed(found, asked)
    for note in (*notes, *package.notes):
        module.warn(note)
    supervisor, lock_text = None, params["supervisor_lock_text"]
    if params["supervisor"]:
        interpreter = adoption.supervisor_interpreter((params["python"], str(found.python)))
        supervisor = environment.supervisor_path(paths, lock_text, interpreter)
    missing = supervisor is not None and not environment.is_whole(supervisor)
    made = [str(supervisor.relative_to(paths.root))] if supervisor and missing else []
    result = {
        "changed": missing,
        "made": made,
        "verified_on": [],
        "diff": {"before": "", "after": "".join(f"{name}\n" for name in made)},
        "supervisor": environment.describe_supervisor(supervisor),
        **adoption.describe(found, package, profile),
    }
    if not missing or module.check_mode:
        return result
    environment.check_disk(paths.root, environment.SUPERVISOR_GIB)
    lease.renew_if_given(paths.lease, params["lease"])
    source = Source(params["wheels"], params["index_url"], tuple(params["extra_index_urls"]))

    def work(progress: jobs.Progress) -> dict[str, Any]:
        assert supervisor is not None
        with environment.alone(paths, progress):
            if not environment.is_whole(supervisor):
                environment.make_supervisor(supervisor, lock_text, interpreter, source, progress, extra=profile == "cuda")
        return result

    job = jobs.new_directory(paths.jobs, "sglang_environment")
    jobs.start(job, work)
    return {"changed": True, "job": str(job)}


if __name__ == "__main__":
    main()
