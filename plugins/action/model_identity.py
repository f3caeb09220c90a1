"""Brings models: sends those that lie on the controller, follows the host while it fetches others, and leads it there where it can't go."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, terminal
from aerie_controller.detached import DetachedAction
from aerie_controller.terminal import clean

# isort: split
from ansible.module_utils.aerie import untrusted

CACHE = PROJECT / ".cache" / "identities"
HUB_LOCK = PROJECT / "locks" / "hub.txt"
TUNNEL_SECONDS = 30
ALLOCATED = re.compile(r"Allocated port (\d+) for remote forward")
TOLD = ("changed", "missing", "diff")
ANSWER = {
    "again?": untrusted.FLAG,
    "job?": untrusted.TEXT,
    "missing?": untrusted.Maybe(untrusted.MapOf(untrusted.ListOf(untrusted.WORD))),
    "unreachable?": untrusted.MapOf(untrusted.Kind("a name and a port", lambda value: is_place(value))),
}


def is_place(value: Any) -> bool:
    """Say whether a value is a name of a host and a port."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and untrusted.WORD.test(value[0])
        and untrusted.COUNT.test(value[1])
        and value[1] < 1 << 16
    )


class ActionModule(DetachedAction):
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie.errors import AerieError

        variables = task_vars or {}
        result: dict[str, Any] = super(DetachedAction, self).run(tmp, variables)
        arguments = dict(self._task.args)
        catalog = arguments.get("models") or {}
        try:
            arguments["manifests"] = _manifests(catalog)
            arguments["addresses"] = _addresses(catalog, variables)
            if any(entry["source"] == "hub" for entry in catalog.values()):
                arguments["hub_lock_text"] = HUB_LOCK.read_text()
            with contextlib.ExitStack() as tunnels:
                return result | self._bring(arguments, variables, tunnels)
        except AerieError as error:
            return result | {"failed": True, "msg": str(error)}
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)

    def _bring(self, arguments: dict[str, Any], variables: dict[str, Any], tunnels: contextlib.ExitStack) -> dict[str, Any]:
        answer = self._ask(arguments, variables)
        if answer.get("again") and not answer.get("failed"):
            prepared = self._follow(str(answer["job"]), variables)
            if prepared.get("failed") or prepared.get("unreachable"):
                return answer | prepared
            answer = self._ask(arguments, variables)
        if answer.get("unreachable") and not answer.get("failed") and isinstance(answer["unreachable"], Mapping):
            for name, (host, port) in answer["unreachable"].items():
                require_source(name, host, port, arguments["models"], arguments["addresses"])
                address = arguments["addresses"].setdefault(name, {})
                address["tunnel"] = tunnels.enter_context(self._tunnel(name, host, port, variables))
            answer = self._ask(arguments, variables)
        told = {key: answer[key] for key in TOLD if key in answer}
        if not answer.get("failed") and not self._task.check_mode and answer.get("missing") and "job" not in answer:
            arguments["incoming"] = self._send(arguments["models"], arguments["manifests"], answer["missing"], _host(variables))
            answer = self._ask(arguments, variables)
        if answer.get("failed") or "job" not in answer:
            return answer if answer.get("failed") else answer | told
        return answer | self._follow(str(answer.pop("job")), variables) | told

    def _ask(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Ask the host; what its answer makes the controller do is checked first."""
        answer: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=variables)
        if not answer.get("failed") and answer.get("unreachable") is not True:
            untrusted.require(answer, ANSWER | ({"job": untrusted.TEXT} if answer.get("again") else {}), "the host's answer")
        return answer

    def _send(self, catalog: Any, manifests: Any, missing: dict[str, list[str]], host: str) -> dict[str, dict[str, str]]:
        from ansible.module_utils.aerie.errors import AerieError

        # The connecting user may not write to the root, so files go to Ansible's own directory first.
        shell = self._connection._shell
        if not shell.tmpdir:
            self._make_tmp_path()
        sent: dict[str, dict[str, str]] = {}
        number = 0
        for name, files in missing.items():
            for file in files:
                # What leaves the controller is a file of a model in its catalog, whatever a host asks for.
                if file not in (manifests.get(name) or {}).get("files", {}):
                    raise AerieError(f"the host asks for {clean(name)[:80]}: {clean(file)[:80]}, which is no file of the catalog's models")
                number += 1
                size = manifests[name]["files"][file]["size"]
                terminal.progress(host, f"sending model {name}: {file} ({size / 1e6:.1f} MB)")
                remote = shell.join_path(shell.tmpdir, f"model-{number}")
                self._transfer_file(str(Path(catalog[name]["path"]) / file), remote)
                self._fixup_perms2((shell.tmpdir, remote), execute=False)
                sent.setdefault(name, {})[file] = remote
        return sent

    @contextlib.contextmanager
    def _tunnel(self, name: str, host: str, port: int, variables: dict[str, Any]) -> Iterator[int]:
        """Open a port on the target that leads to the source by way of the controller; yield its number.

        The target's rsync goes on as before, with its own keys and its own look at the source's; the controller only passes bytes on.
        """
        from ansible.module_utils.aerie.errors import AerieError
        from ansible.module_utils.aerie.releases.model_sources import unreachable_text

        where = f"{name}: {unreachable_text(host, port)}"
        if self._connection.transport != "ssh":
            raise AerieError(where)
        if self._connection.get_option("password"):
            raise AerieError(f"{where}. The controller can lead a connection on only where it logs in with a key, not with a password")
        target = self._connection.get_option("host")
        place = f"[{host}]" if ":" in host else host
        options = ("-S", "none", "-o", "LogLevel=INFO", "-o", "ExitOnForwardFailure=yes", "-N", "-R", f"127.0.0.1:0:{place}:{port}")
        command = self._connection._build_command(self._connection.get_option("ssh_executable"), "ssh", *options, target)
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
            try:
                deadline = time.monotonic() + TUNNEL_SECONDS
                while True:
                    said.seek(0)
                    text = said.read().decode(errors="replace")
                    if match := ALLOCATED.search(text):
                        break
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise AerieError(
                            f"{where}. The controller could not open a port there (AllowTcpForwarding of its sshd?): {text.strip()[-500:]}"
                        )
                    time.sleep(0.05)
                terminal.progress(
                    _host(variables),
                    f"{name}: {host} can't be reached from there, going by way of the controller",
                )
                yield int(match[1])
            finally:
                process.terminate()
                process.wait()


def require_source(name: str, host: str, port: int, catalog: Mapping[str, Any], addresses: Mapping[str, Any]) -> None:
    """Raise AerieError where a host wants to be led to a place that neither the catalog nor the inventory names for this model.

    The controller reaches what a host may not: it opens no connection on a host's word.
    """
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.releases.model_catalog import Place

    entry, address = catalog.get(name) or {}, addresses.get(name) or {}
    place = Place.of(entry.get("from")) if entry.get("source") == "rsync" else None
    expected = (str(address.get("host") or (place.host if place else "")), int(entry.get("port") or address.get("port") or 22))
    if not place or (host.casefold(), port) != (expected[0].casefold(), expected[1]):
        raise AerieError(
            f"{clean(name)[:80]}: this host reaches its source at {clean(host)[:80]}:{port}, and the catalog and the inventory name "
            f"{expected[0] or 'none'}:{expected[1]}: the controller leads a connection on only to what these name; set from and port"
        )


def _host(variables: Mapping[str, Any]) -> str:
    return str(variables.get("inventory_hostname"))


def _manifests(catalog: Mapping[str, Any]) -> dict[str, Any]:
    from ansible.module_utils.aerie.errors import raise_all
    from ansible.module_utils.aerie.releases import model_catalog, model_identity

    found = list(model_catalog.problems(catalog))
    raise_all(found, "sglang_models_catalog")
    here = {name: entry for name, entry in catalog.items() if entry["source"] == "controller"}
    for name, entry in here.items():
        found += [
            f"{name} (on the controller): {one}" for one in model_identity.problems(Path(entry["path"]), weights=entry.get("weights", True))
        ]
    raise_all(found, "sglang_models_catalog")
    return {name: model_identity.manifest(Path(entry["path"]), CACHE) for name, entry in here.items()}


def _addresses(catalog: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the hosts of the inventory are reached that models come from."""
    from ansible.module_utils.aerie.errors import AerieError
    from ansible.module_utils.aerie.releases.model_catalog import Place

    found = {}
    known = variables.get("hostvars") or {}
    for name, entry in catalog.items():
        place = Place.of(entry.get("from")) if entry["source"] == "rsync" else None
        if place is None or place.host not in known:
            continue
        if place.host == variables.get("inventory_hostname"):
            raise AerieError(f"sglang_models_catalog.{name}.from: {place.host} is this host itself: give it source host in its host_vars")
        facts = known[place.host]
        if facts.get("ansible_connection") == "local":
            raise AerieError(f"sglang_models_catalog.{name}.from: {place.host} is this controller: use source controller with path")
        address = {"host": facts.get("ansible_host", place.host), "user": facts.get("ansible_user"), "port": facts.get("ansible_port")}
        found[name] = {key: value for key, value in address.items() if value is not None}
    return found
