"""An action for modules that start long work on a host: it follows the work and shows its progress."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from aerie_controller import fetching, terminal
from aerie_controller.terminal import clean, clean_lines, cut

# isort: split
from ansible.module_utils.aerie import untrusted

POLL_SECONDS = 0.5
RETRY_SECONDS = 3
LOST_AFTER_SECONDS = 600
REPLACED = ("profile", "calibration")
"""Kinds of which a second measurement under one run's name replaces the first, which is kept beside it."""

LONGEST_SECONDS = 100 * 86400
LONGEST_PROGRESS = 400
JOB = untrusted.Limits(size=64 << 20, finite=False, unicode=False)
"""A job's result lists the files of its run, and may hold a figure that is no number, or a line of a log that is no UTF-8."""
JOB_STATE = {
    "progress": untrusted.Maybe(
        {
            "number": untrusted.COUNT,
            "time": untrusted.NUMBER,
            "started": untrusted.NUMBER,
            "message": untrusted.TEXT,
        }
    ),
    "result": untrusted.Maybe({"ok": untrusted.FLAG, "msg?": untrusted.TEXT, "changed?": untrusted.FLAG}),
    "running": untrusted.FLAG,
}
NOT_OF_A_HOST = ("ansible_facts", "run_summary", "unreachable", "skipped", "warnings", "deprecations", "invocation")
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
    # A pid alone may be a stranger's by now: the job's file has when its process started, and in which boot.
    try:
        with open(os.path.join(job, "pid")) as stream:
            pid, started, boot = (stream.read().split() + ["", ""])[:3]
        with open("/proc/%d/stat" % int(pid)) as stream:
            fields = stream.read().rpartition(")")[2].split()
        with open("/proc/sys/kernel/random/boot_id") as stream:
            now = stream.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return True
    return fields[0] != "Z" and (not started or (fields[19], now) == (started, boot))
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

    def bring_run(
        self, result: dict[str, Any], task_vars: dict[str, Any], what: str, arm: str | None = None, **packing: Any
    ) -> dict[str, Any]:
        """Bring the files of a run, or of one arm of it, to ``dest``, all or none; return the result with what was fetched.

        ``what`` is also the directory of the results that they go to; ``packing`` is what the module packs with.
        """
        from ansible.module_utils.aerie import untrusted
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.measuring import collection, placing

        dest = self._task.args.get("dest")
        if not dest or "files" not in result:
            return result
        try:
            limits = fetching.take_limits(dict(self._task.args))
            host, run_id = placing.require_host(task_vars.get("inventory_hostname")), str(self._task.args["run_id"])
            with untrusted.reading("the host's list of files"):
                entries = placing.of_run(result["files"], what, run_id, host, arm).entries
            lacking = collection.missing(entries, Path(dest))
            if lacking:
                if what in REPLACED:
                    lacking = list(entries)
                problems = fetching.bring(self, lacking, Path(dest), task_vars, what, limits, packing, replace=what in REPLACED)
                if problems:
                    raise AerieError("; ".join(problems))
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        except OSError as error:
            return result | {"failed": True, "msg": f"{error.filename}: {error.strerror}"}
        places = {entry.path: entry.place for entry in entries}
        files = [{**entry, "place": places[entry["path"]]} for entry in result["files"]]
        return result | {"files": files, "fetched": [entry.place for entry in lacking]}

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, variables)
        try:
            fetching.take_limits(dict(self._task.args))  # refused before the host is asked
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
                state = untrusted.made_unicode(untrusted.parse(answer["stdout"], JOB))
                untrusted.require(state, JOB_STATE)
            except untrusted.Malformed as error:
                said = cut(answer["stderr"] or answer["stdout"], 300)
                return {"failed": True, "msg": f"can't read how far the work is ({clean(job)}): {error}: {said}"}
            heard = time.monotonic()
            progress = state["progress"]
            if progress and progress["number"] > shown:
                shown = progress["number"]
                minutes, seconds = divmod(int(min(max(progress["time"] - progress["started"], 0), LONGEST_SECONDS)), 60)
                terminal.progress(f"{host}  {minutes:02d}:{seconds:02d}", cut(progress["message"], LONGEST_PROGRESS))
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
        """Return a job's result as a module's; keys that mean something to Ansible or to its callbacks are not the host's to set."""
        ok = result.pop("ok")
        kept = {name: value for name, value in result.items() if name not in NOT_OF_A_HOST and not name.startswith("_ansible")}
        return kept if ok else kept | {"failed": True}
