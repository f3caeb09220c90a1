"""A server's dynamic speculation, asked and told over HTTP: which mode it is in, and which it is to be. Standard library only.

Patch set dynamic_speculation answers at SGLang's own endpoints: its state is in ``/server_info``, and ``/set_internal_state`` changes it.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
from collections.abc import Mapping
from typing import Any

from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.measuring import bench_runner
from ansible.module_utils.aerie.measuring.bench_runner import CellError, Server, ServerDiedError

STATE = "speculative_dynamic"
PLAIN, SPECULATIVE = "plain", "speculative"


def info(server: Server) -> dict[str, Any]:
    """Return the server's information, and in it its arguments and internal states."""
    for path in ("/server_info", "/get_server_info"):
        try:
            found = json.loads(bench_runner.request(server, path))
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                continue
            raise CellError(f"{path} answered {error.code}: {error.reason}") from error
        except OSError as error:
            raise _lost(server, path, error) from error
        except ValueError as error:
            raise CellError(f"{path} answered no JSON: {error}") from error
        return found if isinstance(found, dict) else {}
    raise CellError("the server has neither /server_info nor /get_server_info")


def state_of(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the state of dynamic speculation in a server's information; None where it has none."""
    states = (found or {}).get("internal_states") or [{}]
    state = states[0].get(STATE) if isinstance(states[0], Mapping) else None
    return dict(state) if isinstance(state, Mapping) else None


def state(server: Server) -> dict[str, Any]:
    """Return the state of dynamic speculation; raise CellError where the server has none."""
    found = state_of(info(server))
    if found is None:
        raise CellError(
            f"the server tells nothing of {STATE}: start it with patch set dynamic_speculation in the release and an arm that has `dynamic`"
        )
    return found


def released(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the change that forces nothing any more, for a server with the state ``found``.

    Servers that can't force a number of steps refuse a setting that they don't know.
    """
    return {"force": None} | ({"num_steps": None} if "num_steps" in found else {})


def is_forced(found: Mapping[str, Any]) -> bool:
    """Say whether a mode or a number of steps is forced."""
    return found.get("force") is not None or found.get("num_steps") is not None


def release(server: Server) -> None:
    """Let the server decide again what it does."""
    change(server, released(state(server)))


def change(server: Server, changes: Mapping[str, Any]) -> None:
    """Change settings of the running server; raise CellError with its reason when it keeps them."""
    path = "/set_internal_state"
    try:
        answer = bench_runner.request(server, path, "POST", body={"server_args": {STATE: dict(changes)}})
    except urllib.error.HTTPError as error:
        raise CellError(f"{path} answered {error.code}: {error.read(300).decode(errors='replace').strip()}") from error
    except OSError as error:
        raise _lost(server, path, error) from error
    if not _is_done(answer):
        reason = (state_of(info(server)) or {}).get("refused")
        raise CellError(f"the server refused {json.dumps(dict(changes), sort_keys=True)}: {reason or answer.strip() or 'without a reason'}")


def _is_done(answer: str) -> bool:
    try:
        found = json.loads(answer)
    except ValueError:
        return False
    parts = found if isinstance(found, list) else [found]
    return bool(parts) and all(part.get("updated", True) if isinstance(part, Mapping) else bool(part) for part in parts)


def require_only(mode: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
    """Raise CellError unless every decode step between two informations of the server was one of ``mode``."""
    steps = [(state_of(found) or {}).get("steps") or {} for found in (before, after)]
    other = PLAIN if mode == SPECULATIVE else SPECULATIVE
    grown = {kind: int(steps[1].get(kind, 0)) - int(steps[0].get(kind, 0)) for kind in (mode, other)}
    if grown[other] or grown[mode] <= 0:
        raise CellError(f"forced to be {mode}, the server made {grown[mode]} {mode} and {grown[other]} {other} decode steps", exit_status=0)


class Modes:
    """Makes one server decode in a mode for the cells that share its launch."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def enter(self, mode: str) -> None:
        """Decode in ``mode`` from the next step on; ``policy`` leaves it to the server."""
        if mode in (PLAIN, SPECULATIVE):
            change(self._server, {"force": mode})
        else:
            release(self._server)

    def leave(self) -> None:
        """Force nothing any more. A server that is gone has nothing forced."""
        with contextlib.suppress(CellError):
            release(self._server)

    def require(self, mode: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
        """Raise CellError unless the server decoded in ``mode`` only."""
        if mode in (PLAIN, SPECULATIVE):
            require_only(mode, before, after)


def _lost(server: Server, path: str, error: OSError) -> CellError:
    if not processes.is_listening(server.port):
        return ServerDiedError(bench_runner.death(server))
    return CellError(f"{path} did not answer: {error}")
