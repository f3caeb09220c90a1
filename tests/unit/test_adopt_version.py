"""tools/adopt_version.py says what a release of SGLang moved, as wide as a terminal, and writes hashes only when all sets apply."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import adopt_version

WORKER = "sglang/srt/speculative/worker.py"
SET = """
name: marker
summary: Marks.
why: To test.
versions: ">=1.0"
hooks:
  - name: the verification ends
    file: sglang/srt/speculative/worker.py
    at: [class: Worker, function: step]
    call: self.verify
    where: after
    insert: mark()
"""
SOURCE = """class Worker:
    def step(self, batch):
        draft = self.draft(batch)
        self.verify(draft)
        return draft
"""
ARGUMENTS = """class ServerArgs:
    speculative_num_steps: int = 3
    speculative_topk: int = 1
    port: int = 1
"""


@pytest.fixture
def adopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Adopt release 1.1 with the given files, where 1.0 is known; return the exit status and what was printed."""
    patches, wheels = tmp_path / "patches", tmp_path / "wheels"
    (patches / "marker").mkdir(parents=True)
    (patches / "marker/patchset.yml").write_text(SET)
    wheels.mkdir()

    def pack(version: str, files: dict[str, str]) -> None:
        with zipfile.ZipFile(wheels / f"sglang-{version}-py3-none-any.whl", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)

    pack("1.0", {WORKER: SOURCE, "sglang/srt/server_args.py": ARGUMENTS})
    options = ["--patches", str(patches), "--wheels", str(wheels)]
    (patches / "marker/hashes.json").write_text('{"1.0": {}}')
    assert adopt_version.main(["--known", *options]) == 0

    def run(source: str, *words: str, arguments: str = ARGUMENTS, **others: str) -> tuple[int, str]:
        pack("1.1", {WORKER: source, "sglang/srt/server_args.py": arguments, **others})
        capsys.readouterr()
        status = adopt_version.main(["1.1", *options, *words])
        said = capsys.readouterr()
        assert max(map(len, said.out.splitlines())) <= adopt_version.WIDTH
        return status, said.out + said.err

    run.hashes = lambda: json.loads((patches / "marker/hashes.json").read_text())
    run.patches, run.options, run.pack = patches, options, pack
    return run


def test_hashes_are_of_the_file_with_the_hooks_in_it(adopt):
    patched = SOURCE.replace("self.verify(draft)\n", "self.verify(draft)\n        mark()\n")
    assert adopt.hashes() == {"1.0": {WORKER: hashlib.sha256(patched.encode()).hexdigest()}}


def test_a_hook_that_moved_is_found_and_told_with_its_lines(adopt):
    status, said = adopt("import os\n\n\n" + SOURCE)
    assert status == 0
    assert "line     5 → 8     the verification ends" in said
    assert "SGLang 1.1 against 1.0, the newest before it that is known" in said
    assert "Next: make adopt-version VERSION=1.1 WRITE=1" in said
    assert "What to look at" not in said


def test_a_hook_in_a_function_that_changed_is_something_to_look_at(adopt):
    status, said = adopt(SOURCE.replace("return draft", "return self.publish(draft)"))
    assert status == 0
    assert "- Worker.step in sglang/srt/speculative/worker.py changed (+1 −1)" in said


def test_a_hook_whose_place_is_gone_is_told_with_near_matches_and_what_changed_there(adopt):
    status, said = adopt(SOURCE.replace("self.verify(draft)", "self.verify_all(draft)"), "--write")
    assert status == 1
    assert "marker: DOES NOT APPLY to 1.1" in said
    assert "LOST  the verification ends" in said
    assert "did you mean 'self.verify_all'" in said
    assert "-        self.verify(draft)" in said
    assert "+        self.verify_all(draft)" in said
    assert 'give each versions: "<1.1"' in said
    assert "nothing was written" in said
    assert "1.1" not in adopt.hashes()


def test_a_hook_whose_place_is_there_twice_is_told_with_both_lines(adopt):
    status, said = adopt(SOURCE.replace("        return", "        self.verify(draft)\n        return"))
    assert status == 1
    assert "but it has 2 (lines 4 and 5)" in " ".join(said.split())


def test_a_function_that_moved_to_another_file_is_told_where_it_is(adopt):
    gone = {"sglang/srt/speculative/common.py": SOURCE}
    status, said = adopt("class Other:\n    pass\n", **gone)
    assert status == 1
    assert "Worker.step is not in this file any more; there is sglang/srt/speculative/common.py:2" in said


def test_a_file_that_vanished_is_told(adopt):
    adopt.pack("1.2", {"sglang/srt/server_args.py": ARGUMENTS})
    assert adopt_version.main(["1.2", *adopt.options]) == 1


def test_files_and_server_arguments_about_speculation_are_compared(adopt):
    fields = "    speculative_num_steps: A[int, 'help'] = 5\n    spec_trace: A[bool, 'help'] = False\n    port: int = 2\n"
    added = {"sglang/srt/speculative/ragged.py": "x = 1\n"}
    status, said = adopt(SOURCE, arguments=f"class ServerArgs:\n{fields}", **added)
    assert status == 0
    assert "1 appeared, 0 vanished, 0 changed, 1 equal" in said
    assert "appeared  ragged.py (1 lines)" in said
    assert "1 appeared, 1 vanished, 1 with another default, 2 in all" in said
    assert "appeared  spec_trace (default False)" in said
    assert "vanished  speculative_topk" in said
    assert "default   speculative_num_steps: 3 → 5" in said
    assert "port" not in said


def test_arguments_that_are_written_down_in_another_form_are_the_same_ones(adopt):
    fields = "class Spec:\n    speculative_num_steps: A[int, 'help'] = 3\n    speculative_topk: A[int, Arg(help='x')] = 1\n"
    _, said = adopt(SOURCE, arguments="", **{"sglang/srt/arg_groups/fields/spec.py": fields})
    assert "0 appeared, 0 vanished, 0 with another default, 2 in all" in said


def test_hashes_are_written_when_asked_and_then_agree(adopt):
    status, said = adopt(SOURCE, "--write")
    assert (status, list(adopt.hashes())) == (0, ["1.0", "1.1"])
    assert "1.1 is known now" in said
    status, said = adopt(SOURCE)
    assert status == 0
    assert "what comes out for 1.1 is what is written there" in said


def test_a_set_that_is_not_for_the_release_is_left_out(adopt):
    (adopt.patches / "marker/patchset.yml").write_text(SET.replace(">=1.0", ">=1.0,<1.1"))
    status, said = adopt("", "--write")
    assert status == 0
    assert "marker: is for >=1.0,<1.1, not for 1.1" in said
    assert list(adopt.hashes()) == ["1.0"]


def test_after_a_hook_was_changed_the_hashes_of_all_known_releases_can_be_written_anew(adopt):
    before = adopt.hashes()
    (adopt.patches / "marker/patchset.yml").write_text(SET.replace("mark()", "mark(1)"))
    assert adopt_version.main(["--known", *adopt.options]) == 0
    assert adopt.hashes().keys() == before.keys()
    assert adopt.hashes() != before


def test_a_release_that_can_not_be_had_is_said_in_a_sentence(adopt, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert adopt_version.main(["1.7", *adopt.options]) == 2
    assert "sglang 1.7 can't be had: " in capsys.readouterr().err


def test_a_version_must_be_given(capsys):
    with pytest.raises(SystemExit):
        adopt_version.main([])
    assert "give a version, such as 0.5.24, or --known" in capsys.readouterr().err
