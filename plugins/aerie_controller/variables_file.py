"""Captured variables as a YAML file for people: sections with the evidence as comments. No Ansible import."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aerie_controller import generated_yaml  # the package makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie.host.capture import Section
from ansible.module_utils.aerie.words import clean

WIDTH = generated_yaml.WIDTH
_DATE = re.compile(r"^# captured \S+\n", re.MULTILINE)


def render(host: str, info: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Return the file's text."""
    system = (info.get("os") or {}).get("name") or "unknown system"
    gpus = [gpu.get("name") for gpu in info.get("gpus") or ()]
    lines = generated_yaml.head(
        [
            f"What {host} is, by playbooks/capture.yml: {system}, kernel {info.get('kernel')}, {_counted(gpus)}.",
            f"captured {time.strftime('%Y-%m-%d', time.gmtime())}",
            "To make another host the same: ansible-playbook playbooks/provision.yml -e @<this file> --limit <host>, or copy what is",
            "wanted into group_vars, with its !unsafe. Keys, passwords and environments are never captured. docs/reference/capture.md",
        ]
    )
    for section in sections:
        lines += ["", f"# --- {section.title} ".ljust(WIDTH, "-")]
        for comment in section.comments:
            lines += textwrap.wrap(clean(comment), WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
        for name, value in section.values.items():
            text = generated_yaml.variable(name, value)
            note = section.notes.get(name)
            lines.append(f"{text}  # {clean(note)}" if note and "\n" not in text else text)
    return "\n".join(lines) + "\n"


def without_date(text: str) -> str:
    """Return the text without the day on which it was captured: the same host is the same tomorrow."""
    return _DATE.sub("", text)


def _counted(names: Sequence[Any]) -> str:
    if not names:
        return "no GPU"
    return ", ".join(f"{names.count(name)} × {clean(name)}" for name in dict.fromkeys(names))
