# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Reads a variables file that was made from what a host reported: its values are data, and never templates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from aerie_controller import generated_yaml  # importing the package makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.errors import AerieError

DOCUMENTATION = r"""
name: host_variables
short_description: Read a variables file that was made from what a host reported
description:
  - Reads a YAML file as C(playbooks/calibrate.yml) and C(playbooks/tune_nccl.yml) write it, and returns its variables.
  - Knows the tag C(!unsafe) of these files, which the filter P(ansible.builtin.from_yaml#filter) does not. No text in the file is a
    template, with or without it.
author: Aerie contributors (!UNKNOWN)
options:
  _terms:
    description: The files, on the controller.
    required: true
"""

EXAMPLES = r"""
- name: Show what was calibrated
  ansible.builtin.debug:
    msg: "{{ lookup('host_variables', sglang_server_calibration_file).sglang_server_calibration }}"
"""

RETURN = r"""
_raw:
  description: The variables of each file.
  type: list
  elements: dict
"""


class LookupModule(LookupBase):
    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
        self.set_options(var_options=variables, direct=kwargs)
        found = []
        for term in terms:
            path = self.find_file_in_search_path(variables, "files", term)
            if path is None:
                raise AnsibleLookupError(f"{term} does not exist")
            try:
                found.append(generated_yaml.read(Path(path)))
            except AerieError as error:
                raise AnsibleLookupError(str(error)) from error
            except OSError as error:
                raise AnsibleLookupError(f"{error.filename}: {error.strerror}") from error
        return found
