"""Service definitions say what they must."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.serving import service
from ansible.module_utils.aerie.serving.service_supervisor import LONGEST_SOCKET, Supervisor
from ansible.module_utils.aerie.serving.service_systemd import Systemd


def settings(text: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str
    parsed.read_string(text)
    return parsed


def test_the_unit_ends_the_whole_cgroup_and_lets_gpus_be_used(tmp_path):
    (text,) = Systemd(HostPaths(tmp_path), 75, tmp_path).definitions("main").values()
    unit = settings(text)["Service"]
    wanted = {"KillMode": "mixed", "TimeoutStopSec": "75", "LimitMEMLOCK": "infinity", "LimitNOFILE": "1048576", "Restart": "on-failure"}
    assert {key: unit[key] for key in wanted} == wanted
    assert unit["ExecStart"] == f"{tmp_path}/instances/%i/launch"
    assert not {"PrivateDevices", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "PrivateNetwork"} & set(unit)
    assert settings(text)["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Service]\nExecStart=/usr/bin/sglang\n", "was not written by Aerie"),
        ("", "was not written by Aerie"),
        ("# Written by Aerie (role sglang_server)\nExecStart=/srv/other/instances/%i/launch\n", "of another aerie_root, /srv/other"),
    ],
)
def test_a_unit_that_is_anothers_is_refused_and_left_as_it_is(tmp_path, text, message):
    unit = tmp_path / "units/sglang@.service"
    unit.parent.mkdir()
    unit.write_text(text)
    systemd = Systemd(HostPaths(tmp_path / "root"), 75, unit.parent, systemctl="true")
    for act in (systemd.definitions, systemd.install):
        with pytest.raises(AerieError, match=message):
            act("main")
    assert unit.read_text() == text


def test_a_unit_of_an_older_version_is_replaced(tmp_path):
    systemd = Systemd(HostPaths(tmp_path / "root"), 75, tmp_path, systemctl="true")
    (text,) = systemd.definitions("main").values()
    (tmp_path / "sglang@.service").write_text(text.replace("UMask=0077\n", ""))
    assert systemd.install("main")
    assert (tmp_path / "sglang@.service").read_text() == text
    assert not systemd.install("main")


def test_the_program_is_stopped_with_its_group_and_not_started_for_ever(tmp_path):
    definitions = Supervisor(HostPaths(tmp_path), 33, None).definitions("main")
    program = settings(definitions[tmp_path / "supervisor/conf.d/main.conf"])["program:main"]
    wanted = {"stopasgroup": "true", "killasgroup": "true", "stopwaitsecs": "33", "autostart": "false", "startretries": "2"}
    assert {key: program[key] for key in wanted} == wanted
    assert program["command"] == f"{tmp_path}/instances/main/launch"


def test_a_socket_always_fits_into_a_unix_address(tmp_path):
    long = HostPaths(tmp_path / ("d" * 120))
    short = HostPaths(Path("/opt/aerie"))
    assert len(str(Supervisor(long, 1, None).socket)) <= LONGEST_SOCKET
    assert Supervisor(short, 1, None).socket == short.supervisor / "supervisor.sock"


@pytest.mark.parametrize("root", ["/opt/a b", "/opt/100%", "relative", "/opt/a;b", "/opt/'a'"])
def test_a_root_that_service_files_would_misread_is_refused(root):
    with pytest.raises(AerieError, match="must be an absolute path"):
        Systemd(HostPaths(Path(root)), 1)


def test_auto_takes_supervisor_where_systemd_does_not_run(tmp_path):
    assert service.choose("auto", tmp_path / "absent") == "supervisor"
    with pytest.raises(AerieError, match="systemd does not run here"):
        service.choose("systemd", tmp_path / "absent")


def test_the_last_lines_of_a_log_hide_the_secret(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)) + "api_key=sesame\n")
    assert service.last_lines(log, 2, "sesame") == ["line 99", "api_key=********"]
    assert service.last_lines(tmp_path / "absent") == []
