"""Processes are found by what they listen on and by what they were started with."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import uuid

import pytest
from ansible.module_utils.aerie import processes

CHILD = "import os, time; os.setsid() if os.fork() == 0 else None; print('up', flush=True); time.sleep(60)"


def test_a_listener_is_found_with_its_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.is_listening(port)
        assert [process.pid for process in processes.listeners(port)] == [os.getpid()]
    assert not processes.is_listening(port)
    assert processes.listeners(port) == []


def test_children_are_found_by_environment_even_in_a_session_of_their_own_and_end_leaves_none():
    wanted = {"AERIE_INSTANCE": uuid.uuid4().hex}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=os.environ | wanted, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        parent.stdout.readline(), parent.stdout.readline()
        found = processes.with_variables(wanted)
        assert len(found) == 2 and parent.pid in [process.pid for process in found]
        assert processes.end(found, seconds=10) == []
        assert processes.with_variables(wanted) == []


def test_a_pid_that_is_a_strangers_by_now_is_neither_found_nor_signalled():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        identity = processes.identify(stranger.pid)
        assert identity is not None
        assert processes.Identity.parse(str(identity)) == identity
        assert processes.find(identity) == processes.read(stranger.pid)
        before = dataclasses.replace(identity, started=identity.started - 1)
        other_boot = dataclasses.replace(identity, boot="another")
        assert processes.find(before) is processes.find(other_boot) is None
        process = processes.read(stranger.pid)
        assert process is not None
        former = dataclasses.replace(process, started=process.started - 1)
        assert processes.end([former], seconds=0.2) == []
        assert not processes.kill(former)
        assert stranger.poll() is None
        assert processes.kill(process)
        stranger.wait(10)
        assert not processes.kill(process)


@pytest.mark.parametrize("text", ["", "4711", "4711 12", "a b c", "4711 x boot"])
def test_a_pid_alone_is_no_identity(text):
    assert processes.Identity.parse(text) is None


def test_a_process_that_ignores_sigterm_is_killed_and_named():
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout
        stubborn.stdout.readline()
        killed = processes.end([process for process in [processes.read(stubborn.pid)] if process], seconds=0.2)
        assert [process.pid for process in killed] == [stubborn.pid]
        assert not processes.alive(stubborn.pid)
