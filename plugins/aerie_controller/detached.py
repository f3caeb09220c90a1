"""An action for modules that start long work on a host: it follows the work and shows its progress."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from aerie_controller import terminal
from aerie_controller.terminal import clean_lines

POLL_SECONDS = 0.5
RETRY_SECONDS = 3
LOST_AFTER_SECONDS = 600

READ_JOB = """
import json, os, sys
job = sys.argv[1]
def load(name):
    try:
        with open(os.path.join(job, name)) as stream:
            return json.load(stream)
    except FileNotFoundError:
        return None
def alive():
    try:
        with open(os.path.join(job, "pid")) as stream:
            os.kill(int(stream.read()), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
running = alive()
print(json.dumps({"progress": load("progress.json"), "result": load("result.json"), "running": running}))
"""


class DetachedAction(ActionBase):
    """Runs the module of the same name; when it returns a ``job``, follows that to its end and returns its result.

    Subclasses may override :meth:`prepare` to add what only the controller knows.
    """

    _supports_check_mode = True
    _supports_async = False

    def prepare(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - subclasses use it
        """Return the arguments for the module; raise AerieError to refuse before the host is asked."""
        return arguments

    def choose_arm(self, arguments: dict[str, Any], variable: str) -> dict[str, Any]:
        """Return the arguments with ``arm``, a name, as that arm of ``arms``; ``variable`` is where a user named it."""
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.words import listing, near

        arms = arguments.pop("arms", None) or {}
        name = arguments.get("arm")
        if isinstance(name, str):
            if name not in arms:
                raise AerieError(f"{variable}: {name!r} is not in sglang_server_arms{near(name, arms)}; it has {listing(arms)}")
            arguments["arm"] = {**(arms[name] or {}), "name": name}
        return arguments

    def bring(self, lacking: list[dict[str, Any]], dest: Path, task_vars: dict[str, Any], what: str, **packing: Any) -> None:
        """Bring files of a manifest to ``dest`` in one archive, which the module packs when it is called with ``packing``."""
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection

        shell = self._connection._shell
        remote = shell.join_path(shell.tmpdir or self._make_tmp_path(), f"{what}.tar.gz")
        arguments = packing | {"archive": remote, "wanted": [entry["path"] for entry in lacking]}
        packed = self._execute_module(module_args=arguments, task_vars=task_vars)
        if packed.get("failed"):
            raise AerieError(f"the host could not pack its {what}: {packed.get('msg')}")
        try:
            with tempfile.TemporaryDirectory() as scratch:
                local = Path(scratch) / f"{what}.tar.gz"
                self._connection.fetch_file(remote, str(local))
                collection.unpack(local, lacking, dest)
        finally:
            self._remove_tmp_path(shell.tmpdir, force=True)

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        variables = task_vars or {}
        result = super().run(tmp, variables)
        try:
            arguments = self.prepare(dict(self._task.args), variables)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        started = self._execute_module(module_args=arguments, task_vars=variables)
        job = started.pop("job", None)
        if started.get("failed") or not job:
            return result | started
        return result | started | self._follow(str(job), variables)

    def _follow(self, job: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        host = task_vars.get("inventory_hostname", "?")
        command = shlex.join([self._python(task_vars), "-c", READ_JOB, job])
        shown, heard = 0, time.monotonic()
        while True:
            try:
                answer = self._low_level_execute_command(command, sudoable=True)
            except AnsibleConnectionFailure as error:
                # The work goes on over there; a connection that comes back finds it.
                if time.monotonic() - heard > LOST_AFTER_SECONDS:
                    return {"unreachable": True, "msg": f"{error}\nthe work goes on on the host: {job}"}
                Display().vv(clean_lines(f"{host}: {error}; trying again"))
                self._connection.reset()
                time.sleep(RETRY_SECONDS)
                continue
            try:
                state = json.loads(answer["stdout"])
            except ValueError:
                return {"failed": True, "msg": f"can't read how far the work is ({job}): {answer['stderr'] or answer['stdout']}"}
            heard = time.monotonic()
            progress = state["progress"]
            if progress and progress["number"] > shown:
                shown = progress["number"]
                minutes, seconds = divmod(int(progress["time"] - progress["started"]), 60)
                terminal.progress(f"{host}  {minutes:02d}:{seconds:02d}", progress["message"])
            if state["result"] is not None:
                return self._finish(state["result"])
            if not state["running"]:
                return {"failed": True, "msg": f"the work on the host ended without a result (killed?): see {job}/job.log there"}
            time.sleep(POLL_SECONDS)

    def _python(self, task_vars: dict[str, Any]) -> str:
        """Return the interpreter that the module itself was run with."""
        discovered = task_vars.get("ansible_facts", {}).get("discovered_interpreter_python")
        configured = task_vars.get("ansible_python_interpreter")
        if configured and not str(configured).startswith("auto"):
            return str(self._templar.template(configured))
        return str(discovered or self._discovered_interpreter or "python3")

    @staticmethod
    def _finish(result: dict[str, Any]) -> dict[str, Any]:
        ok = result.pop("ok")
        return result if ok else result | {"failed": True}
