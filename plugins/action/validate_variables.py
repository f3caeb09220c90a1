# Copyright: Aerie contributors
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Checks all settings of a host on the controller, so that a run with a mistake in it ends before any host is touched."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

sys.path.insert(0, str(Path(__file__).parents[1]))
from aerie_controller import PROJECT, settings_overview


class ActionModule(ActionBase):
    """Returns every problem of every role's settings, and what the settings amount to."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        from ansible.module_utils.aerie import settings, variables

        host_variables = task_vars or {}
        result: dict[str, Any] = super().run(tmp, host_variables)
        _, arguments = self.validate_argument_spec(argument_spec={"project": {"type": "path", "default": str(PROJECT)}})
        project = Path(arguments["project"])
        specs = {path.parents[1].name: self._load(path) for path in sorted(project.glob("roles/*/meta/argument_specs.yml"))}
        roles = variables.Roles.of(specs)
        problems = variables.unknown(roles, {str(name): origin(name, value) for name, value in host_variables.items()})
        values: dict[str, Any] = {}
        defaults = self._defaults(project, specs)
        for role in specs:
            options = roles.options[role]
            templar = self._templar.copy_with_new_env(
                available_variables={**defaults, **host_variables, "role_path": str(project / "roles" / role), "role_name": role}
            )
            own = {}
            for name in options:
                if name in templar.available_variables:
                    try:
                        own[name] = templar.template(templar.available_variables[name])
                    except AnsibleError as error:
                        problems.append(f"{name}{at(name, host_variables)}: {error.message}")
            checked = ArgumentSpecValidator(dict(options)).validate(own, validate_role_argument_spec=True)
            problems += [f"role {role}: {message}" for message in checked.error_messages]
            values |= own | {name: checked.validated_parameters[name] for name in own if not checked.error_messages}
        if host_variables.get("__aerie_only_looks") and not values.get("sglang_models_catalog"):
            # A host that nothing is said of but its name serves nothing yet: the defaults' instance and arms would want models.
            values |= {name: {} for name in ("sglang_server_arms", "sglang_server_instances") if name not in host_variables}
        content = self._project(project)
        problems += settings.check(values, content)
        host = str(host_variables.get("inventory_hostname", "this host"))
        overview = None if problems else settings_overview.describe(host, values, content)
        return result | {"changed": False, "checked": len(values), "problems": problems, "overview": overview}

    def _load(self, path: Path, trusted: bool = False) -> Any:
        return self._loader.load_from_file(str(path), trusted_as_template=trusted) or {}

    def _defaults(self, project: Path, roles: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of every role: what a variable is when the inventory says nothing."""
        files = (project / "roles" / role / "defaults" / "main.yml" for role in roles)
        return {name: value for path in files if path.exists() for name, value in self._load(path, trusted=True).items()}

    def _project(self, project: Path) -> Any:
        from ansible.module_utils.aerie.releases import model_hub
        from ansible.module_utils.aerie.settings import Project

        versions = project / "versions.yml"
        gpu_tables = {path.parent.name: self._load(path) for path in project.glob("profiles/*/gpu_settings.yml")}
        return Project(
            patch_sets=[path.parent.name for path in sorted(project.glob("patches/*/patchset.yml"))],
            experiments={path.stem: self._load(path) for path in sorted(project.glob("experiments/*.yml"))},
            versions=self._load(versions) if versions.exists() else None,
            root=project,
            options={profile: list(table.get("options") or {}) for profile, table in gpu_tables.items()},
            gpu_tables=gpu_tables,
            tuning=self._load(project / "tuning/profiles.yml").get("profiles", {}) if (project / "tuning/profiles.yml").exists() else {},
            resolve_revision=model_hub.resolver,
        )


def origin(name: Any, value: Any) -> str | None:
    """Return the file and line that a variable was set at, where this Ansible remembers it."""
    try:
        from ansible._internal._datatag._tags import Origin
    except ImportError:  # private, so another ansible-core may have moved it; then the message just lacks the place
        return None
    tag = Origin.get_tag(name) or Origin.get_tag(value)
    if tag is None:
        return None
    return f"{tag.path}:{tag.line_num}" if tag.path and tag.line_num else tag.path or tag.description


def at(name: str, given: Mapping[str, Any]) -> str:
    """Return `` (file:line)`` for a variable of ``given``, or nothing."""
    key = next((key for key in given if key == name), None)
    where = origin(key, given.get(name))
    return f" ({where})" if where else ""
