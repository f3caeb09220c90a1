"""The module hands the survey through, in check mode too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.aerie.host.host_info import Question, open_host, survey
from ansible.module_utils.testing import patch_module_args

import gpu_host_info

PROJECT = Path(__file__).parents[2]
HOSTS = PROJECT / "tests/fixtures/hosts"


def call(capsys: pytest.CaptureFixture[str], **arguments: object) -> dict:
    with patch_module_args(arguments), pytest.raises(SystemExit):
        gpu_host_info.main()
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("check", [False, True])
def test_a_survey_changes_nothing(capsys, check):
    answer = call(capsys, root=str(HOSTS / "rtx-pro-6000"), paths=["/opt"], _ansible_check_mode=check)
    assert answer["changed"] is False
    assert len(answer["gpus"]) == 8
    assert answer["paths"]["/opt"]["exists"] is True


def test_a_root_that_is_no_recording_fails_with_the_reason(capsys, tmp_path):
    answer = call(capsys, root=str(tmp_path))
    assert answer["failed"] is True
    assert "must be a host's recording" in answer["msg"]


def test_every_value_returned_is_documented(capsys):
    import yaml

    answer = call(capsys, root=str(HOSTS / "container"), record=True)
    assert set(answer) - {"changed", "invocation"} == set(yaml.safe_load(gpu_host_info.RETURN)) - {"recording_path"}


@pytest.mark.parametrize("arguments", [{}, {"record": False}])
def test_a_recording_is_returned_only_when_asked_for(capsys, arguments):
    assert "recording" not in call(capsys, root=str(HOSTS / "container"), **arguments)


def test_a_relative_model_is_refused(capsys):
    answer = call(capsys, root=str(HOSTS / "container"), models=["models/x"])
    assert answer["failed"] is True
    assert "not absolute" in answer["msg"]


def test_a_catalog_that_can_not_be_used_is_refused_and_one_that_can_is_looked_through(capsys):
    host, path = str(HOSTS / "rtx-pro-6000"), "/data/models/Kimi-K2.5"
    refused = call(capsys, root=host, catalog={"kimi": {"source": "host", "path": path, "identity": "3f0c"}})
    assert refused["failed"] is True and "kimi.identity is '3f0c'" in refused["msg"]
    answer = call(capsys, root=host, catalog={"kimi": {"source": "host", "path": path}, "draft": {"source": "controller", "path": "/m/d"}})
    assert list(answer["models"]) == [path]


def test_a_recording_is_written_for_the_host_save_in_check_mode_and_without_the_inventorys_name(tmp_path):
    sick = tmp_path / "sick"
    sick.mkdir()
    recording = {"base": str(HOSTS / "rtx-pro-6000"), "files": {"/etc/nccl.conf": "NCCL_SOCKET_IFNAME=to-kestrel-07\n"}}
    (sick / "recording.json").write_text(json.dumps(recording))
    call = {"gpu_host_info": {"root": str(sick), "record_to": str(tmp_path / "written")}}
    rehearsed = {"gpu_host_info": {"root": str(sick), "record_to": str(tmp_path / "rehearsed")}, "check_mode": True}
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [rehearsed, call]}]))
    environment = {**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_LOCAL_TEMP": str(tmp_path / "temp")}
    options = ["-i", "kestrel-07,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    command = [sys.executable, "-m", "ansible.cli.playbook", *options, str(tmp_path / "play.yml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout
    written = (tmp_path / "written/kestrel-07/recording.json").read_text()
    assert "NCCL_SOCKET_IFNAME=to-host1" in written
    assert "kestrel" not in written
    assert not (tmp_path / "rehearsed").exists()
    info = survey(open_host(tmp_path / "written/kestrel-07"), Question())
    assert len(info["gpus"]) == 8
