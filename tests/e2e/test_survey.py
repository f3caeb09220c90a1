"""The survey reads this very machine: unit tests survey a directory instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie.host import packages
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.aerie.host.recordings import RECORDING

Survey = tuple[Question, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    """A survey of this machine: its question, what it returned, and its recording."""
    recording: dict[str, Any] = {}
    root = tmp_path_factory.mktemp("survey")
    model = root / "model"
    model.mkdir()
    question = Question(aerie_root=root, paths=(str(root / "x"), "/"), models=(str(model),))
    return question, survey(open_host(Path("/")), question, recording), recording


def test_this_machine_replays_to_what_was_surveyed(surveyed, tmp_path):
    question, info, recording = surveyed
    (tmp_path / RECORDING).write_text(json.dumps(recording))
    again = survey(open_host(tmp_path), question)
    assert {**again, "survey": None} == json.loads(json.dumps({**info, "survey": None}))


def test_files_of_the_kernel_that_refuse_large_reads_are_read(surveyed):
    assert surveyed[1]["hostname"] == Path("/proc/sys/kernel/hostname").read_text().strip()


def test_what_python_knows_of_the_machine_is_what_the_survey_says(surveyed):
    info = surveyed[1]
    assert info["kernel"] == packages.running_kernel() == os.uname().release
    assert info["cpu"]["available"] == len(os.sched_getaffinity(0))
    assert info["memory"]["total_bytes"] > 0
    assert info["kernel_command_line"]
