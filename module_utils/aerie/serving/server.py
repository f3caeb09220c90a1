"""One SGLang server on a host, started by its plan, stopped, looked at. Standard library only: this runs on hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import write_atomic, write_json
from ansible.module_utils.aerie.patching import patch_checks
from ansible.module_utils.aerie.releases import release as releases
from ansible.module_utils.aerie.serving import exposure, server_processes, server_smoke
from ansible.module_utils.aerie.serving.server_http import USELESS_ACCEPTANCE, Endpoint, ServerError, acceptance, wait_ready
from ansible.module_utils.aerie.serving.server_plan import Host, Plan, recorded
from ansible.module_utils.aerie.serving.service import last_lines
from ansible.module_utils.aerie.words import listing

GPU_FREE_SECONDS = 30
LEFTOVER_SECONDS = 5
"""How long processes that outlived their service may take to end before they are killed."""

Tell = Callable[[str], None]


def _silent(_message: str) -> None:
    pass


def look_before_start(wanted: Plan) -> list[str]:
    """Raise when the server would import SGLang from elsewhere than its release's own tree; return warnings about what hooks into it.

    That what the release adopted has changed since is a warning too.
    """
    changed = releases.drift(wanted.host.paths, wanted.release)
    warnings = [f"instance {wanted.name}: {changed}: install and patch again for a release of what is there now"] if changed else []
    tree = patch_checks.tree_of(wanted.host.paths, wanted.release)
    if tree is None:
        return warnings
    try:
        plugins = patch_checks.look(wanted.argv[0], wanted.environment, wanted.directory, tree)
    except AerieError as error:
        raise AerieError(f"instance {wanted.name} can't start on this host (nothing was touched): {error}") from error
    return warnings + [patch_checks.warning(plugin) for plugin in plugins]


def is_running_as_planned(wanted: Plan) -> bool:
    """Say whether the server runs, with the very definition that is wanted, and answers a generation."""
    found = recorded(wanted.host.paths, wanted.name)
    service = wanted.host.service()
    return (
        found.get("definition") == wanted.definition
        and found.get("state") == "ready"
        and found.get("service_manager") == service.kind
        and service.main_pid(wanted.name) is not None
        and wanted.endpoint.answers()
    )


def file_changes(wanted: Plan) -> list[tuple[Path, str, str]]:
    """Return (path, before, after) of each file that a start would change; the API key appears in none of them."""
    changes = []
    texts = {path: text for path, (text, _mode) in wanted.files().items() if path != wanted.secret}
    texts |= wanted.host.service().definitions(wanted.name)
    for path, text in texts.items():
        try:
            before = path.read_text()
        except OSError:
            before = ""
        if before != text:
            changes.append((path, wanted.redacted(before), wanted.redacted(text)))
    return changes


def start(wanted: Plan, ready_seconds: float, tell: Tell = _silent) -> dict[str, Any]:
    """Stop what runs in the way, write the files, start and wait until a real generation succeeds; a failed start leaves it stopped."""
    host, name, service = wanted.host, wanted.name, wanted.host.service()
    stopped = stop(host, name, tell)
    _write_files(wanted)
    service.install(name)
    record = {
        "name": name,
        "state": "starting",
        "definition": wanted.definition,
        "arm": dict(wanted.arm),
        "argv": [wanted.redacted(word) for word in wanted.argv],
        "environment": dict(wanted.environment),
        "release": wanted.release["id"],
        "sglang_version": wanted.release["sglang_version"],
        "models": dict(wanted.models),
        "host": wanted.endpoint.host,
        "port": wanted.endpoint.port,
        "gpus": list(wanted.gpus) if wanted.gpus is not None else None,
        "gpu_settings": [dict(setting) for setting in wanted.gpu_settings],
        "adaptive_config": dict(wanted.adaptive) or None,
        "recommendations": [dict(recommendation) for recommendation in wanted.recommendations],
        "patch_modes": dict(wanted.patch_modes),
        "api_key": bool(wanted.endpoint.api_key),
        "service_manager": service.kind,
        "started": time.time(),
        "pid": None,
        "warnings": list(wanted.warnings),
    }
    path = wanted.directory / "instance.json"
    write_json(path, record, 0o600)
    log = wanted.directory / "server.log"
    try:
        tell(f"{name}: starting arm {wanted.arm['name']} on port {wanted.endpoint.port}")
        service.start(name)
        record["pid"] = service.main_pid(name)
        seconds = wait_ready(wanted.endpoint, ready_seconds, _death(record["pid"]), _Waiting(name, log, wanted, tell))
        warnings = list(wanted.warnings)
        accept_length = None
        if wanted.arm.get("speculation") and str((wanted.arm.get("dynamic") or {}).get("threshold")) != "0":
            tell(f"{name}: generates after {seconds:.0f} s; looking at the draft's acceptance")
            accept_length, warning = _acceptance(wanted)
            warnings += [warning] if warning else []
        tell(f"{name}: several requests at once, and a long one")
        warnings += [f"instance {name}: {problem}" for problem in server_smoke.smoke(wanted.endpoint)]
        record["exposed"] = exposure.exposed(server_processes.of_instance(host.paths, name), wanted.endpoint.port)
        service.enable(name)
    except (AerieError, OSError) as error:
        lines = last_lines(log, 20, wanted.endpoint.api_key)
        reason = wanted.redacted(str(error))
        with contextlib.suppress(AerieError):
            stop(host, name, tell)
        service.disable(name)
        write_json(path, record | {"state": "failed", "reason": reason}, 0o600)
        shown = "\n".join(f"    {line}" for line in lines) or "    (empty)"
        raise AerieError(f"instance {name} (arm {wanted.arm['name']}): {reason}\nIt is stopped now. The end of {log}:\n{shown}") from error
    record |= {"state": "ready", "ready_seconds": round(seconds, 1), "accept_length": accept_length, "warnings": warnings}
    write_json(path, record, 0o600)
    tell(f"{name}: ready after {seconds:.0f} s" + (f", accept length {accept_length:.2f}" if accept_length else ""))
    return {
        "changed": True,
        "restarted": stopped["changed"],
        "pid": record["pid"],
        "ready_seconds": record["ready_seconds"],
        "accept_length": accept_length,
        "definition": wanted.definition,
        "warnings": warnings,
    }


class _Waiting:
    """Tells now and then that a start goes on, and what the server last said."""

    def __init__(self, name: str, log: Path, wanted: Plan, tell: Tell, every: float = 10) -> None:
        self._name, self._log, self._wanted, self._tell, self._every, self._next = name, log, wanted, tell, every, every

    def __call__(self, elapsed: float) -> None:
        if elapsed >= self._next:
            self._next = elapsed + self._every
            lines = last_lines(self._log, 20, self._wanted.endpoint.api_key)
            # SGLang's own lines start with a time in brackets; between them come its libraries' warnings.
            shown = next((line for line in reversed(lines) if line.startswith("[")), lines[-1] if lines else "no output yet")
            self._tell(f"{self._name}: not ready after {elapsed:.0f} s: {shown[:120]}")


def _death(pid: int | None) -> Callable[[], str | None]:
    launched = None if pid is None else processes.read(pid)

    def reason() -> str | None:
        # A service manager may have begun another try meanwhile, under another process id: the first one counts.
        return None if launched is not None and processes.is_same(launched) else "the server died while it started"

    return reason


def _acceptance(wanted: Plan) -> tuple[float | None, str | None]:
    try:
        length = acceptance(wanted.endpoint)
    except ServerError as error:
        return None, f"instance {wanted.name}: the draft's acceptance could not be read: {error}"
    if length is None:
        return (
            None,
            f"instance {wanted.name}: no accept length is told although arm {wanted.arm['name']} speculates: does SGLang use the draft?",
        )
    if length <= USELESS_ACCEPTANCE:
        return length, (
            f"instance {wanted.name}: accept length {length:.2f}: the target takes next to nothing from the draft, which only costs time: "
            "is it the draft of this very target?"
        )
    return length, None


def _write_files(wanted: Plan) -> None:
    wanted.directory.mkdir(parents=True, exist_ok=True)
    (wanted.directory / "profile").mkdir(exist_ok=True)
    shutil.rmtree(wanted.directory / "tmp", ignore_errors=True)  # what the server before left
    (wanted.directory / "tmp").mkdir()
    Path(wanted.environment["XDG_CACHE_HOME"]).mkdir(parents=True, exist_ok=True)
    files = wanted.files()
    for path, (text, mode) in files.items():
        write_atomic(path, text, mode)
    if wanted.secret not in files:
        wanted.secret.unlink(missing_ok=True)
    log = wanted.directory / "server.log"
    if log.exists():
        log.replace(log.with_suffix(".log.before"))
    # SGLang logs its arguments, the API key too, so the log is made private before anything writes to it.
    os.close(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))


def stop(host: Host, name: str, tell: Tell = _silent) -> dict[str, Any]:
    """Stop ``name``: its service, then what is left of its processes; return once they are gone, port and GPU memory too."""
    found = recorded(host.paths, name)
    services = [host.service()]
    if found.get("service_manager") and found["service_manager"] != services[0].kind:
        services.append(host.service(found["service_manager"]))
    seen = server_processes.of_instance(host.paths, name)
    active = [service for service in services if service.is_active(name)]
    enabled = [service for service in services if service.is_enabled(name)]
    used = server_processes.gpu_memory_used_mib() if seen else None
    if seen or active:
        tell(f"{name}: stopping ({len(seen)} processes)")
    for service in services:
        service.stop(name, host.stop_seconds)
        service.disable(name)
    killed = server_processes.end(host.paths, name, seen, LEFTOVER_SECONDS)
    if left := server_processes.of_instance(host.paths, name):
        raise AerieError(
            f"instance {name}: {listing(f'process {process.pid} ({process.title})' for process in left)} can't be killed: "
            "another user's, or stuck in the kernel"
        )
    held = server_processes.wait_gpu_memory_free([process.pid for process in seen], GPU_FREE_SECONDS)
    if held:
        raise AerieError(
            f"instance {name}: its processes are gone, yet {held} MiB of GPU memory are held after {GPU_FREE_SECONDS} s: look at nvidia-smi"
        )
    if found and found.get("state") in ("starting", "ready"):
        write_json(host.paths.instance(name) / "instance.json", found | {"state": "stopped", "pid": None}, 0o600)
    return {
        "changed": bool(seen or active or enabled),
        "killed": [process.pid for process in killed],
        "stopped": [process.pid for process in seen],
        "gpu_memory_used_mib": {"before": used, "after": server_processes.gpu_memory_used_mib()} if used else None,
    }


def status(host: Host, name: str, api_key: str | None = None) -> dict[str, Any]:
    """Return the facts about ``name``, changing nothing."""
    found = recorded(host.paths, name)
    service = host.service(found.get("service_manager"))
    pid = service.main_pid(name)
    pids = [process.pid for process in server_processes.of_instance(host.paths, name)]
    endpoint = Endpoint(found["host"], found["port"], api_key) if found else None
    return {
        "name": name,
        "installed": service.is_installed(name),
        "enabled": service.is_enabled(name),
        "running": pid is not None,
        "ready": pid is not None and endpoint is not None and endpoint.answers(timeout=20),
        "pid": pid,
        "pids": pids,
        "state": "dead" if pid is None and found.get("state") in ("ready", "starting") else found.get("state", "absent"),
        "reason": found.get("reason"),
        "arm": found.get("arm", {}).get("name"),
        "release": found.get("release"),
        "sglang_version": found.get("sglang_version"),
        "host": found.get("host"),
        "port": found.get("port"),
        "models": found.get("models", {}),
        "accept_length": found.get("accept_length"),
        "patch_modes": found.get("patch_modes", {}),
        "exposed": exposure.exposed(server_processes.of_instance(host.paths, name), found["port"]) if found else [],
        "recommendations": found.get("recommendations", []),
        "definition": found.get("definition"),
        "service_manager": service.kind,
        "uptime_seconds": round(time.time() - found["started"]) if pid is not None and found else None,
        "log": last_lines(host.paths.instance(name) / "server.log", 20, api_key),
    }
