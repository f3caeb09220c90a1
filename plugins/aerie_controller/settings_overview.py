"""What a host's settings amount to, for a person: its instances, and the experiment that would be
measured. Pure; for settings that were checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aerie_controller import PROJECT  # noqa: F401  makes ansible.module_utils.aerie importable

# isort: split
from ansible.module_utils.aerie import settings as settings_check
from ansible.module_utils.aerie.measuring import experiment
from ansible.module_utils.aerie.releases import versions
from ansible.module_utils.aerie.serving import gpu_settings, launch_checks, server_flags
from ansible.module_utils.aerie.specifiers import Version
from ansible.module_utils.aerie.words import listing

from . import experiment_duration

ADOPTED = "the host's own"


def describe(host: str, values: Mapping[str, Any], project: settings_check.Project) -> dict[str, Any]:
    """Return ``instances`` (a row of words each), ``experiment`` (or None) and ``recommendations`` (texts) of ``host``.

    ``values`` are its settings, checked and with templates resolved.
    """
    return {
        "instances": _instances(values, project),
        "experiment": _experiment(host, values, project),
        "recommendations": _recommendations(values, project),
    }


def _recommendations(values: Mapping[str, Any], project: settings_check.Project) -> list[str]:
    """Return which patch sets are recommended for what the instances and the experiment serve.

    That is what the settings alone say: what depends on GPUs or models is looked at where a server starts.
    """
    version = _version(values, project)
    table = project.gpu_tables.get(str(values.get("aerie_profile")))
    if not table or not version[:1].isdigit():
        return []
    rules = gpu_settings.Table.of(table)
    arms = values.get("sglang_server_arms") or {}
    instances = values.get("sglang_server_instances") or {}
    plan = project.experiments.get(str(values.get("sglang_benchmark_experiment"))) or {}
    measured = settings_check.measured_instance(values, plan) if plan else None
    served = {(instance, str(value["arm"])) for instance, value in instances.items()}
    served |= {(str(measured), str(arm)) for arm in plan.get("arms") or () if measured in instances}
    arms_by_recommendation: dict[str, list[str]] = {}
    for instance_name, arm_name in sorted(served):
        arm, instance = arms.get(arm_name) or {}, instances[instance_name]
        for text in _recommended(rules, version, values, arm, instance):
            names = arms_by_recommendation.setdefault(text, [])
            names += [] if arm_name in names else [arm_name]
    return [f"{_arms(names)}: {text}" for text, names in arms_by_recommendation.items()]


def _recommended(
    rules: gpu_settings.Table, version: str, values: Mapping[str, Any], arm: Mapping[str, Any], instance: Mapping[str, Any]
) -> list[str]:
    flags = (values.get("sglang_server_flags"), arm.get("flags"), instance.get("flags"))
    variables = (values.get("sglang_server_environment"), arm.get("environment"), instance.get("environment"))
    environment: dict[str, str] = {}
    for layer in variables:
        environment |= {str(name): str(value) for name, value in (layer or {}).items()}
    there = gpu_settings.Situation(
        version=Version.parse(version),
        capabilities=frozenset(),
        target=None,
        speculation=bool(arm.get("speculation")),
        environment=environment,
        patch_sets=frozenset(values.get("sglang_patches_sets") or ()),
    )
    layers = [server_flags.Layer("settings", layer or {}) for layer in flags]
    return [str(recommendation) for recommendation in gpu_settings.recommended_unseen(rules, layers, there)]


def _arms(names: Sequence[str]) -> str:
    return f"arm{'s' * (len(names) != 1)} {listing(names)}"


def _instances(values: Mapping[str, Any], project: settings_check.Project) -> list[dict[str, str]]:
    arms, version = values.get("sglang_server_arms") or {}, _version(values, project)
    rows = []
    for name, instance in (values.get("sglang_server_instances") or {}).items():
        flags = settings_check.instance_flags(values, arms.get(instance["arm"]), instance)
        is_cpu = values.get("aerie_profile") == "cpu"
        rows.append(
            {
                "instance": name,
                "arm": str(instance["arm"]),
                "speculation": _speculation(arms.get(instance["arm"])),
                "model": str(instance["model"]),
                "gpus": "CPU" if is_cpu else _gpus(launch_checks.gpus_used(instance.get("gpus"), flags)),
                "port": str(instance["port"]),
                "version": version,
            }
        )
    return rows


def _speculation(arm: Any) -> str:
    """Return what an arm speculates with: algorithm, steps, topk and drafted tokens."""
    speculation = (arm or {}).get("speculation")
    if not speculation:
        return "none"
    numbers = [speculation[key] for key in ("steps", "topk", "draft_tokens") if speculation.get(key) is not None]
    shape = "/".join(str(number) for number in numbers)
    candidates = server_flags.candidate_steps(speculation)
    depths = f"of {', '.join(map(str, candidates))} steps" if candidates else ""
    words = [str(speculation["algorithm"]), shape, depths, "dynamic" if arm.get("dynamic") else ""]
    return " ".join(word for word in words if word)


def _version(values: Mapping[str, Any], project: settings_check.Project) -> str:
    if settings_check.adopts(values):
        return ADOPTED
    profile = values.get("aerie_profile")
    if project.versions is None or profile not in versions.PROFILES:
        return "–"
    return versions.resolve(project.versions, str(profile), values.get("sglang_release_version")).version


def _gpus(gpus: Sequence[int]) -> str:
    """Return GPU numbers in words, such as ``0–7`` or ``0, 2``."""
    if len(gpus) > 2 and list(gpus) == list(range(gpus[0], gpus[0] + len(gpus))):
        return f"{gpus[0]}–{gpus[-1]}"
    return ", ".join(str(gpu) for gpu in gpus)


def _experiment(host: str, values: Mapping[str, Any], project: settings_check.Project) -> dict[str, Any] | None:
    name, arms = values.get("sglang_benchmark_experiment"), values.get("sglang_server_arms") or {}
    if not isinstance(name, str) or name not in project.experiments:
        return None
    instances = values.get("sglang_server_instances") or {}
    plan = experiment.plan(experiment.validate(project.experiments[name], arms, instances), arms)
    instance = settings_check.measured_instance(values, project.experiments[name])
    results = Path(str(values.get("aerie_results") or ""))
    runs = experiment_duration.last_runs(results, plan.experiment.name, host)
    estimates = (experiment_duration.estimate(plan, records) for records in runs)
    seconds = next((estimate for estimate in estimates if estimate is not None), None)
    return {
        "name": name,
        "instance": str(instance or "–"),
        "arms": list(plan.experiment.arms),
        "starts": len(plan.launches),
        "cells": sum(len(launch.cells) for launch in plan.launches),
        "seconds": round(seconds) if seconds is not None else None,
        "limit_seconds": experiment_duration.limit(plan, int(values.get("sglang_server_ready_seconds") or 0)),
    }


def problem_report(problems: Mapping[str, Sequence[str]]) -> str:
    """Return one message for the problems of all hosts (by host), each problem once."""
    hosts_by_problem: dict[str, list[str]] = {}
    for host, texts in problems.items():
        for text in dict.fromkeys(texts):
            hosts_by_problem.setdefault(text, []).append(host)
    problems_by_hosts: dict[tuple[str, ...], list[str]] = {}
    for text, hosts in hosts_by_problem.items():
        problems_by_hosts.setdefault(tuple(hosts), []).append(text)
    count = _counted(len(hosts_by_problem), "problem")
    lines = [f"these settings can't be used, and nothing was touched: {count}"]
    for sharing, shared_problems in problems_by_hosts.items():
        lines.append(f"{_hosts(sharing, len(problems))}:")
        lines += [f"  - {text}" for text in shared_problems]
    return "\n".join(lines)


def count_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """Return how many problems the hosts have, each counted once."""
    different = {text for texts in problems.values() for text in texts}
    affected = sum(1 for texts in problems.values() if texts)
    return f"{_counted(len(different), 'problem')} of settings on {_counted(affected, 'host')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _hosts(hosts: Sequence[str], count: int) -> str:
    if len(hosts) == count and count > 1:
        return f"all {count} hosts"
    return listing(hosts)


def duration(experiment_row: Mapping[str, Any]) -> str:
    """Return how long an experiment takes, in words, and where that is known from."""
    if experiment_row["seconds"] is not None:
        return f"about {_time(experiment_row['seconds'])}, as last time"
    return f"not measured yet (limit {_time(experiment_row['limit_seconds'])})"


def _time(seconds: float) -> str:
    minutes = max(round(seconds / 60), 1)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
