# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Refuses a run that can't be right before its first task: without this project's ansible.cfg, with
files of the inventory that are no YAML, or without any host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.constants import CONFIG_FILE, DEFAULT_ACTION_PLUGIN_PATH
from ansible.plugins.callback import CallbackBase

# Resolved, since playbooks/callback_plugins is a link to this directory.
PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "plugins"))
from aerie_controller import inventory_files

DOCUMENTATION = r"""
name: run_checks
type: aggregate
short_description: Refuse a run that can't be right before its first task
description:
  - Ends the run with a message where this project's C(ansible.cfg) is not in use, as in another
    working directory. Without it Ansible finds neither the action plugins nor the inventory, and its
    own message does not say so.
  - Ends the run with file, line and reason where a file of C(group_vars) or C(host_vars) is no YAML
    or holds a key twice, all files at once. Ansible reads them later, and does not name the file.
  - Warns of a file that another hides, such as C(group_vars/gpu_hosts.yml) beside a directory
    C(group_vars/gpu_hosts/).
  - Fails a run in which no play had a host, which Ansible itself ends with status 0.
author: Aerie contributors (!UNKNOWN)
"""

CONFIG = PROJECT / "ansible.cfg"
REFUSED = 4
"""Exit status, the one that ansible-playbook has for files that it can't read."""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "run_checks"

    def __init__(self) -> None:
        super().__init__()
        self.plays = 0
        self.empty_plays = 0

    def v2_playbook_on_start(self, playbook: Any) -> None:
        if str(PROJECT / "plugins/action") not in DEFAULT_ACTION_PLUGIN_PATH:
            self._refuse(
                f"Ansible did not find Aerie's ansible.cfg (it uses {CONFIG_FILE or 'none'}), so Aerie's "
                f"plugins are missing; nothing was touched. Do one of these:\n    cd {PROJECT}\n"
                f"    export ANSIBLE_CONFIG={CONFIG}\n"
                "The second is needed where everyone may write to the directory: there Ansible ignores "
                "ansible.cfg."
            )
        from ansible.context import CLIARGS  # bound anew when the command line was read

        bases = inventory_files.source_directories(CLIARGS.get("inventory") or (), Path.cwd())
        bases.append(Path(playbook._file_name).resolve().parent)
        for sentence in inventory_files.hidden_files(bases):
            self._display.warning(sentence)
        if problems := inventory_files.problems(bases):
            count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
            heading = f"these files can't be read, and no host was touched: {count}"
            self._refuse("\n  - ".join((heading, *problems)))

    def v2_playbook_on_play_start(self, play: Any) -> None:  # noqa: ARG002  Ansible's signature
        self.plays += 1

    def v2_playbook_on_no_hosts_matched(self) -> None:
        self.empty_plays += 1

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if self.plays and self.empty_plays == self.plays and not stats.processed:
            from ansible.context import CLIARGS

            inventory = ", ".join(CLIARGS.get("inventory") or ()) or "none"
            limit = f" with --limit {CLIARGS['subset']}" if CLIARGS.get("subset") else ""
            self._refuse(
                f"nothing was done, since the inventory ({inventory}){limit} has no host in the group "
                "gpu_hosts: put the hosts into that group, as in inventory/example/hosts.yml, or name "
                "another inventory with -i"
            )

    def _refuse(self, message: str) -> None:
        """End the whole run. An exception of a callback is only a warning to Ansible, but not this one."""
        self._display.error(message, wrap_text=False)
        raise SystemExit(REFUSED)
