"""The module hands the survey through, in check mode too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

import gpu_host_info

HOSTS = Path(__file__).parents[1] / "fixtures/hosts"


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

    answer = call(capsys, root=str(HOSTS / "container"))
    assert set(answer) - {"changed", "invocation"} == set(yaml.safe_load(gpu_host_info.RETURN))
