"""Every arm of the inventories that we ship is one that the SGLang they name can be started with."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "plugins"))
from ansible.module_utils.aerie.releases import release, versions  # noqa: E402
from ansible.module_utils.aerie.serving import server_flags  # noqa: E402

import aerie_controller  # noqa: E402, F401  makes the cores importable
from runs import HOST_OF_TESTS, playbook  # noqa: E402

pytestmark = pytest.mark.contract
CACHE = Path(os.environ.get("AERIE_CACHE", PROJECT / ".cache"))

OLDER_SGLANG = """
# Transformers of this environment is newer than this SGLang's, and has models of its own for names that SGLang registers.
from transformers.models.auto import configuration_auto
register = configuration_auto.CONFIG_MAPPING.register
configuration_auto.CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)
"""
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([vars(parser.parse_args(line)) for line in json.load(sys.stdin)], default=str))
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU profile's environment: that of the host of the end-to-end tests, made if it isn't there yet."""
    root = str(HOST_OF_TESTS)
    variables = {"aerie_root": root, "aerie_lease_break": True, "sglang_server_instances": {}}
    playbook("playbooks/install.yml", variables=variables, scratch=tmp_path_factory.mktemp("install")).require_success()
    newest = max(HOST_OF_TESTS.glob("environments/cpu-*/.aerie-environment.json"), key=lambda marker: marker.stat().st_mtime)
    return newest.parent / "bin/python"


def unpacked(build: versions.Build, python: Path) -> Path:
    """Return the directory of the unpacked wheel of ``build``, fetched once and known by its hash."""
    minor, digest = next(iter(build.sglang_sha256.items()))
    directory = CACHE / f"unpacked/sglang-{build.version}-{digest[:8]}"
    if directory.exists():
        return directory
    wheels = CACHE / "wheels"
    tag = f"cp{minor.replace('.', '')}"
    where = [
        "--python-version",
        minor,
        "--implementation",
        "cp",
        "--abi",
        tag,
        "--platform",
        "manylinux_2_34_x86_64",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([python, "-m", "pip", "download", "-q", "--no-deps", *where, "-d", wheels, f"sglang=={build.version}"], check=True)
    (wheel,) = wheels.glob(f"sglang-{build.version}-{tag}-*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == digest
    part = directory.with_name(f".{directory.name}.{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part)
    part.rename(directory)
    return directory


class Installed:
    """An SGLang's own parser, asked in a process of its own."""

    def __init__(self, python: Path, build: versions.Build, temporary: Path) -> None:
        self.python, self.directory, self.version = python, unpacked(build, python), build.version
        output = temporary / "server_arguments.json"
        self._run(release.DUMP_PROGRAM, str(output))
        self.parser = server_flags.Parser.load(output, build.version)

    def parse(self, lines: list[list[str]]) -> list[dict[str, Any]]:
        """Return what SGLang itself makes of each command line."""
        return json.loads(self._run(PARSE, input=json.dumps(lines)).splitlines()[-1])

    def _run(self, program: str, *arguments: str, input: str | None = None) -> str:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.directory), **release.PROFILE_ENVIRONMENT["cpu"]}
        command = [str(self.python), "-c", OLDER_SGLANG + program, *arguments]
        done = subprocess.run(command, env=environment, input=input, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def variables(inventory: str, host: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ansible.cli.inventory", "-i", str(PROJECT / "inventory" / inventory), "--host", host]
    return json.loads(subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout)


def layers(settings: dict[str, Any], arm: dict[str, Any], instance: dict[str, Any]) -> list[server_flags.Layer]:
    profile = yaml.safe_load((PROJECT / "profiles" / settings["aerie_profile"] / "server.yml").read_text())
    catalog = settings["sglang_models_catalog"]
    draft = (arm.get("speculation") or {}).get("draft_model")
    base = {
        "model-path": catalog[instance["model"]]["path"],
        "host": instance.get("host", "127.0.0.1"),
        "port": 30000,  # the demo's is a template, which only a run resolves
        "enable-metrics": True,
    }
    return [
        server_flags.Layer("Aerie", base, owner=True),
        server_flags.Layer("profile", profile["flags"], owner=True),
        server_flags.Layer("sglang_server_flags", settings.get("sglang_server_flags", {})),
        server_flags.Layer(
            "speculation", server_flags.speculation_flags(arm.get("speculation"), draft and catalog[draft]["path"]), owner=True
        ),
        server_flags.Layer("arm", arm.get("flags") or {}),
        server_flags.Layer("instance", instance.get("flags") or {}),
    ]


@pytest.fixture(
    scope="session",
    params=[("example", "gpu-01"), ("example", "gpu-04"), ("demo", "localhost")],
    ids=["example", "example-host_vars", "demo"],
)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return variables(*request.param)


@pytest.fixture(scope="session")
def installed(settings: dict[str, Any], python: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    data = yaml.safe_load((PROJECT / "versions.yml").read_text())
    build = versions.resolve(data, settings["aerie_profile"], settings.get("sglang_release_version"))
    return Installed(python, build, tmp_path_factory.mktemp("parser"))


def test_every_arm_is_one_that_the_named_version_parses(settings, installed):
    lines, arms = [], settings["sglang_server_arms"]
    for name, arm in arms.items():
        for instance in settings["sglang_server_instances"].values():
            line = server_flags.command_line(installed.parser, layers(settings, arm, instance))
            assert (line.problems, line.warnings) == ((), ()), name
            assert list(server_flags.speculation_problems(arm.get("speculation"))) == []
            lines.append(list(line.arguments))
    for arm, values in zip(arms.values(), installed.parse(lines), strict=True):
        speculation = arm.get("speculation") or {}
        assert values["speculative_algorithm"] == speculation.get("algorithm")
        assert values["speculative_num_steps"] == speculation.get("steps")
        assert values["speculative_eagle_topk"] == speculation.get("topk")
        assert values["speculative_num_draft_tokens"] == speculation.get("draft_tokens")
        assert values["enable_metrics"] is True


def test_every_flag_of_an_arm_reaches_the_parser(settings, installed):
    (instance,) = settings["sglang_server_instances"].values()
    arms = settings["sglang_server_arms"].values()
    lines = [list(server_flags.command_line(installed.parser, layers(settings, arm, instance)).arguments) for arm in arms]
    for arm, values in zip(arms, installed.parse(lines), strict=True):
        for flag, value in {**settings.get("sglang_server_flags", {}), **(arm.get("flags") or {})}.items():
            _, argument = installed.parser.find(flag)
            assert values[argument.dest] == value, flag


def test_a_flag_that_the_version_does_not_know_would_be_noticed(settings, installed):
    (instance,) = settings["sglang_server_instances"].values()
    line = server_flags.command_line(installed.parser, layers(settings, {"flags": {"speculativ-adaptive": True}}, instance))
    assert "has no such flag; did you mean 'speculative-adaptive'" in line.problems[0]
