# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ansible's own output, but no host's words draw on the terminal, and a failure is shown once."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.constants import COLOR_ERROR, COLOR_SKIP, COLOR_UNREACHABLE
from ansible.plugins.callback.default import CallbackModule as DefaultCallback

# Resolved, since playbooks/callback_plugins is a link to this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from aerie_controller import terminal

DOCUMENTATION = r"""
name: aerie
type: stdout
short_description: Ansible's output, cleaned, with each failure once
description:
  - Prints what the callback P(ansible.builtin.default#callback) prints, and takes its options.
  - Removes control characters and escape sequences from everything that a host said - messages,
    output, warnings, exceptions, differences and names of keys - before any of it is shown.
  - Shows a failure with a message once, as lines that are neither quoted nor folded, with what else
    the result holds below. With C(-v) Ansible's own block with an excerpt of the playbook is shown
    too. A traceback is always shown where Ansible has one.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements:
  - set as stdout callback in the configuration
author: Aerie contributors (!UNKNOWN)
"""

INDENT = " " * 4
BY_ANSIBLE = "Task failed: "
"""Before a message that no module chose: it crashed, or the playbook has a mistake."""
CRASHES = ("Module failed: ", "Action failed: ")
TRACEBACK = "ANSIBLE_DISPLAY_TRACEBACK=error shows the traceback."
SUMMARY = "run_summary"
"""The callback run_summary shows it after the recap."""
SAID_ELSEWHERE = {
    *("msg", "censored", "changed", "failed", "unreachable", "exception", "warnings", "deprecations"),
    *("invocation", "diff", "ansible_loop_var", "item", SUMMARY),
}
"""Keys of a failed result that its message, the task's other lines or -v show."""
DISCOVERED = "discovered_interpreter_python"


class CallbackModule(DefaultCallback):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "aerie"

    def __init__(self) -> None:
        super().__init__()
        terminal.guard(self._display)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        content = _cleaned(result)
        if result.task.loop and "results" in content:
            # Each item that failed was shown when it did.
            content.pop("exception", None)
            super().v2_runner_on_failed(result, ignore_errors)
            return
        message = self._message(content)
        if message is None:
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self._begin(result)
        if self._display.verbosity < 2 and self.get_option("show_task_path_on_failure"):
            self._print_task_path(result.task)
        self._show_failure(f"fatal: [{self.host_label(result)}]: FAILED!", message, content)
        if ignore_errors:
            self._display.display("...ignoring", color=COLOR_SKIP)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        content = _cleaned(result)
        message = self._message(content)
        if message is None:
            super().v2_runner_item_on_failed(result)
            return
        self._begin(result)
        item = self._get_item_label(content)
        self._show_failure(f"failed: [{self.host_label(result)}] (item={item})", message, content)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        content = _cleaned(result)
        message = self._message(content)
        if message is None:
            super().v2_runner_on_unreachable(result)
            return
        self._begin(result)
        self._show_failure(f"fatal: [{self.host_label(result)}]: UNREACHABLE!", message, content, COLOR_UNREACHABLE)
        if result.task.ignore_unreachable:
            self._display.display("...ignoring", color=COLOR_SKIP)

    def v2_runner_on_ok(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_on_ok(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_on_skipped(result)

    def v2_runner_item_on_ok(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_item_on_ok(result)

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_item_on_skipped(result)

    def v2_runner_retry(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_retry(result)

    def v2_runner_on_async_poll(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_on_async_poll(result)

    def v2_runner_on_async_ok(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_on_async_ok(result)

    def v2_runner_on_async_failed(self, result: Any) -> None:
        _cleaned(result)
        super().v2_runner_on_async_failed(result)

    def v2_on_file_diff(self, result: Any) -> None:
        _cleaned(result)
        super().v2_on_file_diff(result)

    # The three that follow are Ansible's private ones, the same in ansible-core 2.19 to 2.21. Warnings
    # and exceptions travel beside the result, as objects; an item's label is also made of variables.
    def _get_item_label(self, result: Any) -> Any:
        return cleaned_value(super()._get_item_label(result))

    def _handle_warnings(self, res: Any) -> None:
        current = self._current_task_result
        if res.pop("warnings", None) and current:
            for warning in current.warnings:
                self._display._warning(cleaned_event(warning))
        if res.pop("deprecations", None) and current:
            for deprecation in current.deprecations:
                self._display._deprecated(cleaned_event(deprecation))

    def _handle_exception(self, result: Any, use_stderr: bool = False) -> None:
        current = self._current_task_result
        if result.pop("exception", None) and current and current.exception:
            self._display._error(cleaned_event(current.exception), stderr=use_stderr)

    def _begin(self, result: Any) -> None:
        """Print the task's banner where it is not printed yet, and the result's warnings."""
        if self._last_task_banner != result.task._uuid:
            self._print_task_banner(result.task)
        self._handle_warnings(result.result)
        self._clean_results(result.result, result.task.action)

    def _message(self, content: Mapping[str, Any]) -> list[str] | None:
        """Return the lines of a failure's message; None where Ansible's own block says more."""
        if _is_hidden(content):
            return [str(content.get("censored"))]
        message = content.get("msg")
        if self._display.verbosity > 0 or not isinstance(message, str) or not message.strip():
            return None
        current = self._current_task_result
        events = list(_events(current.exception.event)) if current and current.exception else []
        if any(event.formatted_traceback or event.events for event in events):
            return None
        by_ansible = message.startswith(BY_ANSIBLE) and not content.get("unreachable")
        message = message.removeprefix(BY_ANSIBLE)
        crashed = by_ansible and message.startswith(CRASHES)
        for prefix in CRASHES:
            message = message.removeprefix(prefix)
        lines = message.strip("\n").split("\n")
        # What Ansible knows besides: how to go on, and the position where the message does not help.
        for event in events:
            hint = event.help_text
            if hint and hint not in message:
                lines += terminal.clean_lines(hint).strip().split("\n")
        if by_ansible and (position := _position(events)):
            lines.append(terminal.clean(position))
        return [*lines, TRACEBACK] if crashed else lines

    def _show_failure(self, title: str, message: list[str], content: Mapping[str, Any], color: str = COLOR_ERROR) -> None:
        others = {key: value for key, value in content.items() if not _is_said_elsewhere(key, value)}
        text = f"{title} => {message[0]}" if len(message) == 1 else f"{title} =>"
        if len(message) > 1:
            text += "".join(f"\n{INDENT}{line}".rstrip() for line in message)
        if any(not key.startswith("_ansible_") for key in others):
            text += self._dump_results(others).rstrip("\n")
        self._display.display(text, color=color, stderr=self.get_option("display_failed_stderr"))


def _is_said_elsewhere(key: str, value: Any) -> bool:
    if key == "ansible_facts":
        return not isinstance(value, Mapping) or set(value) <= {DISCOVERED}
    return key in SAID_ELSEWHERE and not (key == "changed" and value)


def _is_hidden(content: Mapping[str, Any]) -> bool:
    """Say whether ``no_log`` hides a result: its exception would tell what it hides."""
    return "censored" in content


def _cleaned(result: Any) -> dict[str, Any]:
    """Clean a result in place, and return its content; a callback has a copy of its own."""
    content: dict[str, Any] = result.result
    cleaned = cleaned_value({key: value for key, value in content.items() if key != SUMMARY})
    content.clear()
    content.update(cleaned)
    return content


def cleaned_value(value: Any) -> Any:
    """Return ``value`` with every text in it cleaned, names of keys too; newlines stay."""
    if isinstance(value, str):
        return terminal.clean_lines(value)
    if isinstance(value, Mapping):
        cleaned: dict[Any, Any] = {}
        for key, inner in value.items():
            name = cleaned_value(key) if isinstance(key, str) else key
            while name in cleaned:
                name = f"{name} (again)"
            cleaned[name] = cleaned_value(inner)
        return cleaned
    if isinstance(value, list | tuple):
        return [cleaned_value(inner) for inner in value]
    return value


def cleaned_event(value: Any) -> Any:
    """Return a warning or an error of Ansible with every text in it cleaned.

    These are nested frozen dataclasses, which are walked whatever fields a version gives them.
    """
    if isinstance(value, str):
        return terminal.clean_lines(value)
    if isinstance(value, tuple):
        return tuple(cleaned_event(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value) if field.init)
        return dataclasses.replace(value, **{name: cleaned_event(getattr(value, name)) for name in fields})
    return value


def _events(event: Any) -> list[Any]:
    """Return an error and what caused it, the outermost first."""
    events = []
    while event is not None:
        events.append(event)
        event = event.chain.event if event.chain and event.chain.follow else None
    return events


def _position(events: list[Any]) -> str | None:
    """Return where the innermost cause stands in a file, as Ansible writes it."""
    contexts = [event.formatted_source_context for event in events if event.formatted_source_context]
    return contexts[-1].splitlines()[0] if contexts else None
