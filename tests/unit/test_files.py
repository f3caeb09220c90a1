"""A file is the old one or the new one, never a part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ansible.module_utils.aerie import files

ROOT = Path(__file__).parents[2]


def test_a_written_file_has_its_content_and_mode_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "deep" / "file"
    files.write_atomic(target, "text", mode=0o600)
    assert target.read_text() == "text"
    assert target.stat().st_mode & 0o777 == 0o600
    assert os.listdir(target.parent) == ["file"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "file"
    target.mkdir()
    with pytest.raises(OSError):
        files.write_atomic(target, "text")
    assert target.is_dir()
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    target = tmp_path / "file.json"
    program = f"""
        import sys, ansible.module_utils
        ansible.module_utils.__path__.append({str(ROOT / "module_utils")!r})
        from pathlib import Path
        from ansible.module_utils.aerie import files
        number = 0
        while True:
            files.write_json(Path({str(target)!r}), [number] * 20000)
            number += 1
            print(number, flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout
        for _ in range(5):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    value = json.loads(target.read_text())
    assert len(value) == 20000 and len(set(value)) == 1


def test_equal_values_have_equal_hashes_whatever_their_order():
    assert files.canonical_hash({"a": 1, "b": [1, 2]}) == files.canonical_hash({"b": [1, 2], "a": 1})
    assert files.canonical_hash({"a": 1}) != files.canonical_hash({"a": 2})
