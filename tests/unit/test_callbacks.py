"""What ansible-playbook prints here: no escape of a host, each failure once, the summary last."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
ESC = b"\x1b"
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
DRAWS = re.compile(rb"[\x00-\x08\x0b-\x0d\x0e-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8b\xa8-\xae]|\xe2\x81[\xa0\xa6]")
EVIL = r"\x1b[1;33m\x1b[2J\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x1b]52;c;cm0=\x07 C\rR B\x08S \u202eRTL N\0L \x9b31mC1 \udcff"
"""A Python literal with everything that a terminal might follow."""

MODULE = f'''
from ansible.module_utils.basic import AnsibleModule
EVIL = "{EVIL}"
def main():
    module = AnsibleModule({{"how": {{"type": "str"}}}}, supports_check_mode=True)
    how = module.params["how"]
    module.warn("warned " + EVIL)
    if how == "crash":
        raise ValueError("crashed " + EVIL)
    if how == "forge":
        module.exit_json(changed=False, run_summary=[{{"command": "curl forged | sh"}}])
    content = {{"stdout": "printed " + EVIL, "key " + EVIL: [{{"deep": "nested " + EVIL}}], "items": [EVIL, EVIL]}}
    if how == "differ":
        module.deprecate("deprecated " + EVIL, version="9")
        module.exit_json(changed=True, diff={{"before": "old " + EVIL + "\\n", "after": "new " + EVIL + "\\n"}}, **content)
    if how == "short":
        module.fail_json(msg="it's 'quoted': and not folded " + "word " * 40 + "end")
    module.fail_json(msg="refused 'quoted': " + EVIL + "\\nsecond line", rc=3, **content)
main()
'''
ACTION = """
from ansible.plugins.action import ActionBase
from aerie_controller import terminal
class ActionModule(ActionBase):
    BYPASS_HOST_LOOP = True
    _requires_connection = False
    def run(self, tmp=None, task_vars=None):
        parts = [terminal.heading("A report"), terminal.paragraph("bad", style="error"), terminal.command("x " * 100 + "end")]
        terminal.show(parts)
        entries = [{"text": "1 of 1 hosts has errors \\x1b[2J", "style": "error"}, {"command": "ssh gpu-01 " + "y" * 200}]
        return {"changed": False, "run_summary": entries + entries}
"""
PLAYBOOK = """
- name: Hostile
  hosts: all
  gather_facts: false
  tasks:
    - {name: Report, report: {}}
    - {name: Forge, says: {how: forge}}
    - {name: Fail, says: {how: fail}, ignore_errors: true, register: answer}
    - {name: Crash, says: {how: crash}, ignore_errors: true}
    - {name: Differ, says: {how: differ}, diff: true}
    - name: Loop
      says: {how: "{{ 'fail' if '1' in item else 'differ' }}"}
      loop: ["{{ 1 ~ answer.stdout }}", "{{ 2 ~ answer.stdout }}"]
      ignore_errors: true
    - {name: "Named by a host {{ answer.stdout }}", ansible.builtin.debug: {msg: "{{ answer.stdout }}"}}
    - {name: Hide, ansible.builtin.fail: {msg: "{{ 'a se' ~ 'cret' }}"}, no_log: true, ignore_errors: true}
    - {name: Mistake, ansible.builtin.debug: {msg: "{{ nowhere.x }}"}, ignore_errors: true}
    - {name: Short, says: {how: short}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("callbacks")
    for name, content in (("library/says.py", MODULE), ("action/report.py", ACTION), ("play.yml", PLAYBOOK)):
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(content)
    # An action plugin belongs to a module.
    (site / "library/report.py").write_text(MODULE)
    return site


def environment(site: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "NO_COLOR", "COLUMNS"))}
    return kept | {
        "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(site / "library"),
        "ANSIBLE_ACTION_PLUGINS": f"{site / 'action'}{os.pathsep}{PROJECT / 'plugins/action'}",
        # Else Ansible refuses what is not UTF-8, before a callback sees it.
        "ANSIBLE_MODULE_STRICT_UTF8_RESPONSE": "false",
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
        **variables,
    }


def command(site: Path, *options: str) -> list[str]:
    program = str(Path(sys.executable).parent / "ansible-playbook")
    local = ["-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    return [program, *local, *options, str(site / "play.yml")]


def piped(site: Path, *options: str, **variables: str) -> bytes:
    """Return what a run prints where its output is no terminal."""
    done = subprocess.run(
        command(site, *options),
        env=environment(site, **variables),
        cwd=site,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout.decode(errors="replace")
    return done.stdout


def on_terminal(site: Path, columns: int, *options: str, **variables: str) -> bytes:
    """Return what a run writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        command(site, *options),
        env=environment(site, **variables),
        cwd=site,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the terminal's other end was closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    assert process.wait(60) == 2, output.decode(errors="replace")
    return output.replace(b"\r\n", b"\n")


@pytest.fixture(scope="module")
def plain(site) -> bytes:
    return piped(site)


@pytest.fixture(scope="module")
def verbose(site) -> bytes:
    return piped(site, "-v", ANSIBLE_DISPLAY_TRACEBACK="error")


@pytest.fixture(scope="module")
def coloured(site) -> bytes:
    return on_terminal(site, 80, ANSIBLE_LOG_PATH=str(site / "ansible.log"))


@pytest.fixture(scope="module")
def wide_without_colour(site) -> bytes:
    return on_terminal(site, 140, NO_COLOR="1")


@pytest.mark.parametrize("name", ["plain", "verbose", "wide_without_colour"])
def test_no_byte_of_a_host_draws(request, name):
    output = request.getfixturevalue(name)
    assert not DRAWS.findall(output)
    for words in (b"refused 'quoted': ", b"printed ", b"nested ", b"warned ", b"deprecated ", b"crashed ", b"+new ", b"-old "):
        assert words in output, words
    for payload in (b"52;c", b"cm0=", b"http://x", b"[1;33m", b"[2J", b"31m"):
        assert payload not in output, payload
    assert b"link C R B S RTL N L C1 \\xff" in output


def test_in_colour_there_are_colours_and_nothing_else(coloured):
    assert not DRAWS.findall(COLOUR.sub(b"", coloured))
    assert b"\x1b[1;31mbad\x1b[0m" in coloured
    # The host's own colour would be one that is not ended.
    assert b"\x1b[1;33m" not in coloured


def test_the_log_is_plain(site, coloured):
    log = (site / "ansible.log").read_bytes()
    assert ESC not in log
    assert b"A report" in log and b"1 of 1 hosts has errors" in log


@pytest.mark.parametrize("name", ["plain", "coloured", "wide_without_colour"])
def test_a_failure_is_shown_once_as_lines_without_quotes_or_folds(request, name):
    output = COLOUR.sub(b"", request.getfixturevalue(name)).decode()
    assert output.count("it's 'quoted': and not folded") == 1
    sentence = "it's 'quoted': and not folded " + "word " * 40 + "end"
    assert f"fatal: [localhost]: FAILED! => {sentence}\n" in output
    task = output.partition("TASK [Fail]")[2].partition("TASK [")[0]
    assert task.count("refused") == 1
    assert re.search(r"^    refused 'quoted': link .*\n    second line\n", task, re.MULTILINE)
    assert "rc: 3" in task and "stdout: " in task and "deep: " in task
    assert "...ignoring" in task
    assert "[ERROR]" not in output


def test_an_item_that_failed_is_named(plain):
    assert plain.decode().partition("TASK [Loop]")[2].count("failed: [localhost] (item=1printed link") == 1


def test_a_mistake_is_shown_with_its_position_and_a_crash_with_the_way_to_its_traceback(site, plain):
    text = plain.decode()
    mistake, crash = (text.partition(f"TASK [{name}]")[2].partition("TASK [")[0] for name in ("Mistake", "Crash"))
    assert "'nowhere' is undefined" in mistake
    assert re.search(rf"^    Origin: {re.escape(str(site))}/play.yml:\d+:\d+$", mistake, re.MULTILINE)
    assert "crashed" in crash and "ANSIBLE_DISPLAY_TRACEBACK=error" in crash


def test_what_no_log_hides_stays_hidden_and_says_so(plain, verbose):
    for output in (plain, verbose):
        assert b"a secret" not in output
        assert b"the output has been hidden" in output.partition(b"TASK [Hide]")[2].partition(b"TASK [")[0]


def test_verbose_output_has_ansible_s_own_block_and_real_tracebacks(site, verbose):
    task = verbose.decode().partition("TASK [Crash]")[2].partition("TASK [")[0]
    assert "[ERROR]: Task failed: Module failed: crashed" in task
    assert f"Origin: {site}/play.yml" in task
    assert "Traceback (most recent call last):" in task and "in main" in task


def test_a_traceback_that_ansible_shows_is_shown_without_v_too(site):
    output = piped(site, ANSIBLE_DISPLAY_TRACEBACK="error").decode()
    task = output.partition("TASK [Crash]")[2].partition("TASK [")[0]
    assert "Traceback (most recent call last):" in task and "in main" in task


@pytest.mark.parametrize("name", ["plain", "coloured", "wide_without_colour", "verbose"])
def test_the_last_lines_are_the_run_s_summary_each_entry_once(request, name):
    output = COLOUR.sub(b"", request.getfixturevalue(name)).decode()
    after = output.partition("PLAY RECAP")[2].rstrip("\n").splitlines()
    assert after[-2:] == ["1 of 1 hosts has errors", f"    ssh gpu-01 {'y' * 200}"]
    assert "failed=1" in after[-4]
    assert output.count("1 of 1 hosts has errors") == 1, "it is not in the result that -v shows"


def test_a_host_can_not_put_a_command_into_the_summary(plain, verbose):
    assert b"curl forged" not in plain + verbose


@pytest.mark.parametrize(("name", "columns"), [("coloured", 80), ("wide_without_colour", 140), ("plain", 100)])
def test_a_report_of_a_worker_has_the_width_of_the_terminal_and_whole_commands(request, name, columns):
    lines = COLOUR.sub(b"", request.getfixturevalue(name)).decode().splitlines()
    assert lines[lines.index("A report") + 1] == "─" * columns
    assert f"    {'x ' * 100}end" in lines


def test_a_host_that_can_not_be_reached_is_shown_once(site):
    refusing = site / "ssh"
    refusing.write_text("#!/bin/sh\nprintf 'connect to host gpu-9: \\033[31mrefused\\033[2J' >&2\nexit 255\n")
    refusing.chmod(0o755)
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "gpu-9,", "--connection", "ssh", str(site / "play.yml")]
    variables = environment(site, ANSIBLE_SSH_EXECUTABLE=str(refusing))
    done = subprocess.run(argv, env=variables, cwd=site, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 4, output
    assert output.count("connect to host gpu-9") == 1
    assert re.search(r"^fatal: \[gpu-9\]: UNREACHABLE! => .*connect to host gpu-9: refused$", output, re.MULTILINE)
