"""A unit or contract test that looks at the machine fails; others have a machine of their own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.aerie import processes

from ports import BUSY_PORTS, free_port

TESTS = Path(__file__).parents[1]
HEAD = """
import os, shutil, socket, subprocess, sys, threading
from pathlib import Path
import pytest
"""
VIOLATIONS = {
    "file": ("Path('/etc/os-release').read_text()", "open /etc/os-release"),
    "absent_file": ("Path('/etc/absent').exists()", "os.stat /etc/absent"),
    "directory": ("os.listdir('/sys')", "os.listdir /sys"),
    "device": ("Path('/dev/nvidia0').exists()", "os.stat /dev/nvidia0"),
    "port_table": ("Path('/proc/net/tcp').read_text()", "open /proc/net/tcp"),
    "another_process": ("Path(f'/proc/{os.getppid()}/stat').read_text()", "open /proc/"),
    "signal": ("os.kill(os.getppid(), 0)", "os.kill process "),
    "search_path": ("shutil.which('lspci', path='/usr/bin')", "os.stat /usr/bin/lspci"),
    "program": ("subprocess.run(['/bin/true'])", "subprocess.Popen /bin/true with /bin/true"),
    "argument": ("subprocess.run(['cat', '/etc/fstab'])", "subprocess.Popen cat with /etc/fstab"),
    "fixed_port": ("socket.socket().connect_ex(('127.0.0.1', 1))", "socket.connect 127.0.0.1:1,"),
    "all_addresses": ("socket.socket().bind(('', 0))", "socket.bind :0,"),
    "host": ("sys.audit('socket.getaddrinfo', 'a.org', 80, 0, 0, 0)", "socket.getaddrinfo a.org"),
    "thread": ("run_in_thread(lambda: os.listdir('/etc'))", "os.listdir /etc"),
}
"""What a test does, and how the failure names it."""
THREAD = """
def run_in_thread(target):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
"""
IN_A_FIXTURE = """
@pytest.fixture(scope="module")
def machine():
    return os.listdir("/etc")


def test_fixture(machine):
    pass
"""
CLEAN = """
def test_own_files(tmp_path):
    (tmp_path / "a").write_text(Path(os.devnull).read_text())
    assert tmp_path.resolve().exists() and Path("/proc/self/stat").read_text()


def test_own_processes():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert Path(f"/proc/{child.pid}/stat").read_text()
        child.kill()


def test_own_ports():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()


def test_own_programs(tmp_path):
    subprocess.run(["sh", "-c", "true"], cwd=tmp_path, check=True)
    assert shutil.which("nvidia-smi") is None and shutil.which("systemctl") is None
    assert list(Path.home().iterdir()) == []
"""
SESSION_FIXTURE = """
import os
from pathlib import Path
import pytest

@pytest.fixture(scope="session", autouse=True)
def of_other_tests():
    yield
    Path("/etc/os-release").read_text()
    Path(__file__).with_name("home").write_text(os.environ["HOME"])
"""
SET_HOME = "monkeypatch.setenv('HOME', '/elsewhere')"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""
TCP_TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1
   1: 0100007F:7531 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
"""


def run_tests(directory: Path, *texts: str) -> tuple[dict[str, str], str]:
    """Run a file of tests in ``directory``; return the outcome of each test, and the output."""
    directory.mkdir()
    (directory / "test_sample.py").write_text("\n\n".join([HEAD, *texts]))
    (directory.parent / "pytest.ini").write_text("[pytest]\n")
    argv = [sys.executable, "-m", "pytest", "-rA", "-p", "isolated_machine"]
    done = subprocess.run(
        [*argv, "-p", "no:cacheprovider", str(directory)],
        cwd=directory.parent,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(r"^(PASSED|FAILED|ERROR) \S+::test_(\w+)", done.stdout, re.MULTILINE)
    return {name: outcome for outcome, name in lines}, done.stdout + done.stderr


@pytest.mark.parametrize("directory", ["unit", "contract"])
def test_each_way_to_look_at_the_machine_fails_with_what_and_where(tmp_path, directory):
    functions = [f"def test_{name}():\n    {call}\n" for name, (call, _) in VIOLATIONS.items()]
    outcomes, output = run_tests(tmp_path / directory, THREAD, *functions, IN_A_FIXTURE)
    assert outcomes == dict.fromkeys(VIOLATIONS, "FAILED") | {"fixture": "ERROR"}, output
    for _, message in VIOLATIONS.values():
        line = rf"^  {re.escape(message)}.*: {directory}/test_sample\.py:\d+"
        assert re.search(line, output, re.MULTILINE), (message, output)


def test_a_test_that_stays_with_its_own_passes(tmp_path):
    outcomes, output = run_tests(tmp_path / "unit", CLEAN)
    assert outcomes == dict.fromkeys(re.findall(r"def test_(\w+)", CLEAN), "PASSED"), output


def test_tests_of_other_directories_are_not_watched(tmp_path):
    text = "def test_file():\n    Path('/etc/os-release').read_text()\n"
    outcomes, output = run_tests(tmp_path / "e2e", text)
    assert outcomes == {"file": "PASSED"}, output


def test_fixtures_of_the_session_end_on_the_machine_itself(tmp_path):
    (tmp_path / "conftest.py").write_text(SESSION_FIXTURE)
    home = os.environ["HOME"]
    outcomes, output = run_tests(tmp_path / "unit", "def test_home(monkeypatch):\n    " + SET_HOME)
    assert outcomes == {"home": "PASSED"}, output
    assert (tmp_path / "home").read_text() == home


def test_ports_of_others_are_free_here_and_own_ones_are_not():
    assert not any(processes.is_listening(port) for port in BUSY_PORTS)
    port = free_port()
    assert processes.holders(port) is None
    with socket.create_server(("127.0.0.1", port)):
        assert [process.pid for process in processes.listeners(port)] == [os.getpid()]


def test_a_reserved_port_refuses_connections_and_is_given_to_nobody_else():
    ports = [free_port() for _ in range(100)]
    assert len(set(ports)) == len(ports)
    for _ in range(2000):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] not in ports
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]))


def test_a_daemon_that_a_test_started_stays_its_own(tmp_path):
    variables = {"AERIE_TEST_DAEMON": str(tmp_path)}
    subprocess.run([sys.executable, "-c", DAEMON], env=os.environ | variables, check=True)
    (daemon,) = processes.with_variables(variables)
    assert daemon.ppid == os.getpid()
    assert os.getppid() not in [process.pid for process in processes.scan()]
    assert processes.end([daemon], 5) == []


def test_proc_is_read_as_the_kernel_writes_it(tmp_path):
    for directory in ("7/fd", "net"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "7/stat").write_text("7 (a) b) S 1 7")
    (tmp_path / "7/fd/3").symlink_to("socket:[4711]")
    (tmp_path / "net/tcp").write_text(TCP_TABLE)
    machine = processes.Machine(tmp_path)
    assert machine.pids() == [7]
    assert machine.open_sockets(7) == {"socket:[4711]"}
    assert [(listener.port, listener.socket) for listener in machine.listeners()] == [(30000, "socket:[4711]")]
    assert machine.text(7, "stat") == "7 (a) b) S 1 7"
    assert (machine.text(8, "stat"), machine.link(7, "exe")) == ("", None)
