#!/usr/bin/python
# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

DOCUMENTATION = r"""
module: host_capture
short_description: Write what a good host is as variables
description:
  - Makes, from a survey and from what the host alone can tell, the variables that bring another host to the same state, and writes them
    with comments to a file on the controller.
  - Models keep their identity where the survey knows it, so that another host takes no other files.
  - Nothing on the host is changed. Keys, passwords and environments are never written.
author: Aerie contributors (!UNKNOWN)
options:
  info:
    description: The survey, as M(gpu_host_info) returned it. The action plugin uses it.
    type: dict
    required: true
  given:
    description:
      - The host's own variables that can't be read back from it, such as its catalog of models and C(aerie_root). The action plugin
        uses it.
    type: dict
    default: {}
  to:
    description: The file on the controller. The action plugin writes it.
    type: path
    required: true
  root:
    description: Where the host's file tree is.
    type: path
    default: /
attributes:
  action:
    description: The file is written in the action plugin.
    support: full
  check_mode:
    description: Says whether the file would change, and writes nothing.
    support: full
  diff_mode:
    description: Shows how the file changes.
    support: full
"""

EXAMPLES = r"""
- name: Write what this host is
  host_capture:
    info: "{{ __gpu_host_info }}"
    given:
      aerie_root: "{{ aerie_root }}"
      sglang_models_catalog: "{{ sglang_models_catalog }}"
    to: "{{ aerie_results }}/capture/{{ inventory_hostname }}.yml"
"""

RETURN = r"""
path:
  description: The file on the controller.
  returned: success
  type: str
  sample: /home/ops/aerie/results/capture/gpu-01.yml
variables:
  description: The variables that the file holds.
  returned: success
  type: dict
  sample: {nvidia_cuda_state: present, nvidia_cuda_driver_package: nvidia-open, nvidia_cuda_driver_version: 580.105.08-1}
sources:
  description: The host's apt sources of NVIDIA's packages, with the fingerprint of their key.
  returned: success
  type: list
  elements: dict
  sample:
    - url: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/
      suite: /
      components: []
      signed_by: /usr/share/keyrings/cuda-archive-keyring.gpg
      file: /etc/apt/sources.list.d/cuda.sources
      fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
"""

from pathlib import Path

from ansible.module_utils.aerie.host import capture
from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "info": {"type": "dict", "required": True},
            "given": {"type": "dict", "default": {}},
            "to": {"type": "path", "required": True},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["root"])
    module.exit_json(changed=False, sources=[capture.with_fingerprint(source, root) for source in capture.read_sources(root)])


if __name__ == "__main__":
    main()
