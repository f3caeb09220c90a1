#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_packages
short_description: Bring NVIDIA's driver, CUDA toolkit and NCCL to a host at wanted versions, and move nothing else
description:
  - Adds NVIDIA's apt repository with a key whose fingerprint is pinned, chooses versions, installs exactly these, pins and holds them, and
    enables the persistence daemon.
  - Everything is planned first, with a copy of apt's lists in a directory of its own; a key with another fingerprint, an unreachable
    repository, a version that is not offered, a downgrade, or a package outside the plan that would move, is refused before anything is
    written. Afterwards it is checked that what moved is what was planned, and that C(apt upgrade) would leave it alone.
  - Packages that dpkg left half installed are repaired first.
  - In a container the kernel driver is never touched; user space is compared with the driver that is loaded.
  - What was brought is kept in a manifest below O(root), and V(absent) takes exactly that away again.
  - The work runs detached on the host, survives a cut connection, and shows its progress.
author: Aerie contributors (!UNKNOWN)
options:
  root:
    description: The directory on the host that this project owns, C(aerie_root); the manifest lies there.
    type: path
    required: true
  state:
    description: V(absent) removes packages, holds, pins, repository and key that V(present) brought.
    type: str
    choices: [present, absent]
    default: present
  repositories:
    description:
      - Repositories by distribution as NVIDIA names them, such as V(ubuntu2404); each with C(url), C(key_url) and C(key_fingerprints).
      - The one of the host's distribution gives what the options below leave out.
    type: dict
    default: {}
  url:
    description: Address of the repository, of a mirror for example.
    type: str
  suite:
    description: Its suite; one that ends with a slash, as NVIDIA's, has no components.
    type: str
    default: /
  components:
    description: Its components.
    type: list
    elements: str
    default: []
  key_url:
    description: Address of its key, or a path on the host. Of a mirror, the file beside its packages when left out.
    type: str
  key:
    description: The key itself, armored.
    type: str
  key_fingerprints:
    description: Fingerprints that keys of the repository may have.
    type: list
    elements: str
    default: []
  manage_driver:
    description: Whether the kernel driver is this module's; V(auto) is yes, but for a container.
    type: str
    choices: [auto, "true", "false"]
    default: auto
  container:
    description: The kind of container that the host is, as M(gpu_host_info) tells; none when left out.
    type: str
  driver_package:
    description: The package that stands for the driver.
    type: str
    default: nvidia-open
  driver_version:
    description: Its version, exact or how it begins, such as V(580). Left out, the newest at first and then what is installed.
    type: str
  toolkit_package:
    description: The package that stands for the CUDA toolkit; none when left out.
    type: str
  toolkit_version:
    description: Its version, exact or how it begins.
    type: str
  nccl:
    description: Whether to install NCCL, built for the CUDA version of O(toolkit_package).
    type: bool
    default: true
  nccl_version:
    description: Its version, exact or how it begins.
    type: str
  packages:
    description: More packages by name, each with a version, exact or how it begins, or null.
    type: dict
    default: {}
  headers:
    description: Whether to install the headers of the running kernel, which the driver is built with.
    type: bool
    default: true
  persistence:
    description: Whether to install and enable the persistence daemon.
    type: bool
    default: true
  hold:
    description: Whether to hold the packages.
    type: bool
    default: true
  allow_downgrade:
    description: Let packages move to older versions.
    type: bool
    default: false
  may_move:
    description: Patterns of other packages that may change or be removed along with these.
    type: list
    elements: str
    default: []
  lock_seconds:
    description: How long to wait for another apt on the host, in seconds.
    type: int
    default: 300
  lease:
    description: The lease of this run on the host, as M(host_lease) returned it; renewed before anything is changed.
    type: dict
attributes:
  check_mode:
    description: Says exactly what would move, also on a host without the repository; only names where the repository can't be reached.
    support: full
  diff_mode:
    description: Shows versions of packages, holds, units and files.
    support: full
"""

EXAMPLES = r"""
- name: Bring the driver, CUDA 13.0 and NCCL
  nvidia_packages:
    root: /opt/aerie
    url: https://mirror.example.org/cuda/ubuntu2404/x86_64/
    key_url: https://mirror.example.org/cuda/key.asc
    key_fingerprints: [EB693B3035CD5710E231E123A4B469963BF863CC]
    driver_version: "580.105.08"
    toolkit_package: cuda-toolkit-13-0
    nccl_version: "2.28.9"
  become: true

- name: Take it all away
  nvidia_packages:
    root: /opt/aerie
    state: absent
  become: true
"""

RETURN = r"""
versions:
  description: Versions of the packages that were asked for, as they are, or in check mode would be, afterwards.
  returned: success
  type: dict
  sample: {nvidia-open: 580.105.08-1, cuda-toolkit-13-0: 13.0.2-1, libnccl2: 2.28.9-1+cuda13.0}
moves:
  description: Every package that changes, from a version, null for a new one, to a version, null for one removed.
  returned: success
  type: list
  elements: dict
  sample: [{name: nvidia-open, before: 580.95.05-1, after: 580.105.08-1}]
repaired:
  description: Packages that dpkg had left unfinished, and how.
  returned: success
  type: dict
  sample: {cuda-nvcc-13-0: half-configured}
held:
  description: All packages of the host that are held afterwards.
  returned: success
  type: list
  elements: str
  sample: [cuda-toolkit-13-0, libnccl2, nvidia-open]
units:
  description: Units that are enabled or started.
  returned: success
  type: list
  elements: str
  sample: [nvidia-persistenced.service]
complete:
  description: False when, in check mode, the repository could not be reached, so that only names are foretold.
  returned: success
  type: bool
  sample: true
driver:
  description: Whether the driver is managed here, the version that is loaded, and the one that is installed afterwards.
  returned: success
  type: dict
  sample: {managed: true, loaded: 580.95.05, installed: 580.105.08}
reboot_required:
  description: Whether the host must boot for the driver that is loaded to be the one that is installed.
  returned: success
  type: bool
  sample: true
reboot_reason:
  description: Why, or null.
  returned: success
  type: str
  sample: the NVIDIA driver 580.105.08 is installed, and 580.95.05 is loaded
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import jobs, lease
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import packages, packages_apply
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "repositories": {"type": "dict", "default": {}},
            "url": {"type": "str"},
            "suite": {"type": "str", "default": "/"},
            "components": {"type": "list", "elements": "str", "default": []},
            "key_url": {"type": "str", "no_log": False},
            "key": {"type": "str", "no_log": False},
            "key_fingerprints": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "manage_driver": {"type": "str", "choices": ["auto", "true", "false"], "default": "auto"},
            "container": {"type": "str"},
            "driver_package": {"type": "str", "default": "nvidia-open"},
            "driver_version": {"type": "str"},
            "toolkit_package": {"type": "str"},
            "toolkit_version": {"type": "str"},
            "nccl": {"type": "bool", "default": True},
            "nccl_version": {"type": "str"},
            "packages": {"type": "dict", "default": {}},
            "headers": {"type": "bool", "default": True},
            "persistence": {"type": "bool", "default": True},
            "hold": {"type": "bool", "default": True},
            "allow_downgrade": {"type": "bool", "default": False},
            "may_move": {"type": "list", "elements": "str", "default": []},
            "lock_seconds": {"type": "int", "default": 300},
            "lease": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**converge(module))
    except AerieError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")


def request_of(params: dict[str, Any]) -> packages.Request:
    manage = params["manage_driver"]
    return packages.Request(
        root=Path(params["root"]),
        repositories=params["repositories"],
        url=params["url"],
        suite=params["suite"],
        components=tuple(params["components"]),
        key_url=params["key_url"],
        key=params["key"].encode() if params["key"] else None,
        fingerprints=tuple(params["key_fingerprints"]),
        manage_driver=not params["container"] if manage == "auto" else manage == "true",
        driver_package=params["driver_package"],
        driver_version=params["driver_version"],
        toolkit_package=params["toolkit_package"],
        toolkit_version=params["toolkit_version"],
        nccl=params["nccl"],
        nccl_version=params["nccl_version"],
        packages=params["packages"],
        headers=params["headers"],
        persistence=params["persistence"],
        hold=params["hold"],
        allow_downgrade=params["allow_downgrade"],
        may_move=tuple(params["may_move"]),
        locked_seconds=params["lock_seconds"],
    )


def converge(module: AnsibleModule) -> dict[str, Any]:
    """Plan; return the module's result when nothing is to be done, else the detached job that does it."""
    params = module.params
    if os.geteuid() != 0:
        raise AerieError("installing packages needs root: log in as root, or set ansible_become: true")
    if params["container"] and params["manage_driver"] == "true":
        raise AerieError(
            f"nvidia_cuda_manage_driver: this host is a container ({params['container']}), whose kernel is its host's: set it to auto"
        )
    request = request_of(params)
    plan = packages.plan_removal(request) if params["state"] == "absent" else packages.plan(request, check=module.check_mode)
    paths = HostPaths(request.root)
    try:
        result = plan.describe()
        if not plan.changed or module.check_mode:
            plan.close()
            return result
        lease.renew_if_given(paths.lease, params["lease"])
        job = jobs.new_directory(paths.jobs, "nvidia_packages")
    except BaseException:
        plan.close()
        raise

    def work(progress: jobs.Progress) -> dict[str, Any]:
        try:
            packages_apply.apply(plan, progress.update)
        finally:
            plan.close()
        # What is loaded may have changed: a package may load the driver as it is installed.
        return result | packages_apply.driver_result(plan) | ({"warnings": plan.warnings} if plan.warnings else {})

    jobs.start(job, work)
    return {"changed": True, "job": str(job)}


if __name__ == "__main__":
    main()
