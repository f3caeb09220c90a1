"""sglang_server of plugins/action, which can leave a start under way: servers that are started one after the other then load side by side.

Where the variable ``__servers_begin`` is true, a start is only begun; the same task without it finds it under way, and follows it.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[4] / "plugins/action/sglang_server.py"
_spec = importlib.util.spec_from_file_location("aerie_sglang_server_action", SOURCE)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

BEGUN_SECONDS = 60
SYSTEMD = Path("/run/systemd/system")


class ActionModule(_module.ActionModule):  # type: ignore[misc, name-defined]
    def _follow(self, job: str, task_vars: dict[str, Any]) -> dict[str, Any]:
        if not task_vars.get("__servers_begin"):
            followed: dict[str, Any] = super()._follow(job, task_vars)
            return followed
        # The next server's start asks the supervisor that this one's brings up: it must be there.
        pid = Path(self._task.args["root"]) / "supervisor/supervisord.pid"
        deadline = time.monotonic() + BEGUN_SECONDS
        while not SYSTEMD.is_dir() and not _runs(pid) and not (Path(job) / "result.json").exists():
            if time.monotonic() > deadline:
                return {"failed": True, "msg": f"no supervisord after {BEGUN_SECONDS} s: see {job}/job.log"}
            time.sleep(0.1)
        return {}


def _runs(pid: Path) -> bool:
    try:
        return Path(f"/proc/{int(pid.read_text())}").is_dir()
    except (OSError, ValueError):
        return False
