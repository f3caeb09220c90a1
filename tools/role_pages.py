#!/usr/bin/env python3
"""Write docs/roles/<role>.md, a page for each role, from its argument specification and defaults; ``--check`` only compares."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by tools/role_pages.py from the role's meta/argument_specs.yml and defaults/main.yml: edit these. -->"


def markdown(text: str) -> str:
    """Turn Ansible's markup, such as ``C(x)`` and ``V(x)``, into Markdown, and keep a table's cell in one piece."""
    plain = re.sub(r"\b[CVOEP]\(((?:[^()]|\([^()]*\))*)\)|\bRV\(([^()]*)\)", lambda found: f"`{found.group(1) or found.group(2)}`", text)
    return re.sub(r"\b[BI]\(([^()]*)\)", r"*\1*", plain).replace("|", "\\|").replace("\n", " ")


def prose(description: str | list[str] | None) -> str:
    """Join a description's sentences."""
    return markdown(" ".join([description] if isinstance(description, str) else description or []))


def shown(value: Any) -> str:
    """Return a default as YAML would have it, on one line."""
    text = (
        value
        if isinstance(value, str) and value
        else yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    )
    return f"`{text}`".replace("|", "\\|")


def kind(option: Mapping[str, Any]) -> str:
    """Return an option's type, with that of its elements, and its choices."""
    name = option.get("type", "str")
    if "elements" in option:
        name += f" of {option['elements']}"
    return name + (f": {', '.join(f'`{choice}`' for choice in option['choices'])}" if "choices" in option else "")


def page(role: str, specs: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a role's page."""
    lines = [NOTE, "", f"# {role}", ""]
    for name, entry in specs.items():
        title = entry.get("short_description", "").rstrip(".")
        lines += [f"{markdown(title)}." if len(specs) == 1 or name == next(iter(specs)) else f"## {name}: {markdown(title)}", ""]
        if description := prose(entry.get("description")):
            lines += [description, ""]
        if options := entry.get("options"):
            lines += ["| Variable | Type | Default | Description |", "|---|---|---|---|"]
            lines += [
                f"| `{option}` | {kind(spec)} | {shown(defaults.get(option))} | {prose(spec.get('description'))} |"
                for option, spec in options.items()
            ]
            lines.append("")
    return "\n".join(lines)


def pages(project: Path) -> dict[Path, str]:
    """Return every page of the project by its path."""
    found = {}
    for path in sorted(project.glob("roles/*/meta/argument_specs.yml")):
        role = path.parents[1]
        defaults = role / "defaults/main.yml"
        values = (yaml.safe_load(defaults.read_text()) or {}) if defaults.exists() else {}
        found[project / "docs/roles" / f"{role.name}.md"] = page(role.name, yaml.safe_load(path.read_text())["argument_specs"], values)
    return found


def stale(project: Path) -> list[Path]:
    """Return the pages that are missing, differ, or belong to no role."""
    wanted = pages(project)
    differing = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    return differing + [path for path in sorted(project.glob("docs/roles/*.md")) if path not in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is not current")
    arguments = parser.parse_args()
    outdated = stale(PROJECT)
    if arguments.check:
        for path in outdated:
            print(f"{path.relative_to(PROJECT)} is not current: run tools/role_pages.py", file=sys.stderr)
        return 1 if outdated else 0
    wanted = pages(PROJECT)
    for path in outdated:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
        else:
            path.unlink()
        print(path.relative_to(PROJECT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
