"""A host that lies to every action of the controller, and a run over hosts of which some lie.

Inputs tried: every value of ``hostile.WRONG`` at every place of an honest answer, for each action whose answers the controller acts
upon. What fetches files is in test_placing.py, what is read later in test_untrusted.py, what is written in test_generated_yaml.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hostile
import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import survey_shape
from hostile import HOST, OTHER, RUN
from test_capture import GIVEN, INFO, SOURCE

from aerie_controller import generated_yaml, terminal

LEVEL = {"concurrency": 1, "status": "completed", "reason": None}
JOB = {"progress": None, "running": False, "result": {"ok": True, "changed": True, "files": [], "levels": [LEVEL]}}
BETTER = {
    "verdict": "better",
    "candidate": "PROTO=LL",
    "changes": {"NCCL_PROTO": "LL"},
    "environment": {"NCCL_PROTO": "LL"},
    "ratio": {"value": 1.1, "low": 1.05, "high": 1.2, "pairs": 8},
    "finalists": {},
    "medians_us": {"PROTO=LL": {"8192": 10.0}, "default": {"8192": 11.0}},
    "spreads": {},
}
SEARCH = {
    "schema": "aerie-nccl-search/1",
    "run_id": RUN,
    "host": HOST,
    "base": {"NCCL_DEBUG": "WARN"},
    "profile": "auto",
    "bench": {"ranks": 2, "backend": "gloo"},
    "versions": {"torch": "2.13.0", "nccl": None},
    "host_fingerprint": {"fingerprint": "f" * 64},
    "candidates": 2,
    "launches": 20,
    "objectives": {"latency": BETTER},
    "disqualified": [{"candidate": "PROTO=LL128", "why": "hung"}],
    "refused": [],
    "left_out": 0,
    "messages": [{"bytes": 8192, "objective": "latency", "why": "decode"}],
}


def cases(tmp_path: Path) -> dict[str, tuple[dict[str, Any], Mapping[str, Any]]]:
    """Return each action's arguments and an honest answer of its module."""
    job = {"job": "/opt/aerie/jobs/1", "changed": True}
    recording = {"files": {}, "commands": {}}
    return {
        "gpu_host_info": (
            {"record_to": str(tmp_path / "results/recordings"), "record": True},
            INFO | {"recording": recording},
        ),
        "host_capture": ({"info": INFO, "given": GIVEN, "to": str(tmp_path / f"results/capture/{HOST}.yml")}, {"sources": [SOURCE]}),
        "golden_prompts": ({"prompts": []}, {"summary": ["answered 3 of 3"], "changed": False}),
        "sglang_server": ({"name": "main", "state": "status"}, job | {"status": {"running": True, "name": "main"}}),
        "sglang_release": ({"patch_sets": []}, job | {"release": {"id": "0.5.23-0123456789ab"}}),
        "sglang_environment": ({"profile": "cpu", "version": "0.5.23"}, job),
        "sglang_benchmark": ({"root": "/opt/aerie", "run_id": RUN}, job | {"pending": ["c1"]}),
        "nvidia_packages": ({}, job),
        "model_identity": ({"models": {}}, {"missing": {"m": ["config.json"]}, "unreachable": {"m": ["127.0.0.1", 22]}, "again": False}),
    }


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what would be printed, as a person would see it."""
    found: list[str] = []
    monkeypatch.setattr(terminal, "warn", lambda text: found.append(terminal.clean_lines(text)))
    monkeypatch.setattr(terminal, "progress", lambda *words: found.append(" ".join(map(terminal.clean, words))))
    monkeypatch.setattr(terminal, "show", lambda parts: found.append(terminal.render(parts, 100)))
    return found


@pytest.mark.parametrize("name", cases(Path("/tmp")))
def test_no_answer_raises_or_touches_anything_of_another(name, tmp_path, said, record_property, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = hostile.results(tmp_path / "results")
    mine = tree / f"capture/{HOST}.yml"
    before = hostile.state(tree)
    arguments, honest = cases(tmp_path)[name]
    answers = [hostile.replaced(honest, where, value) for where in hostile.mutations(honest) if where for value in hostile.WRONG]
    for answer in answers:
        made = hostile.action(name, dict(arguments), lambda _, answer=answer: dict(answer))
        state = json.dumps(JOB)
        made._low_level_execute_command = lambda *_, state=state, **__: {"stdout": state, "stderr": ""}
        made._python = lambda _: "python3"
        try:
            result = hostile.run(made)
        except (AerieError, AnsibleError):  # Ansible shows its message, cleaned
            continue
        assert isinstance(result, dict)
        if name == "gpu_host_info" and not result.get("failed"):
            survey = {key: value for key, value in result.items() if key not in ("changed", "recording_path", "recording")}
            assert survey_shape.checked(survey) == (survey, [])
        if mine.exists():
            generated_yaml.read(mine)
    after = hostile.state(tree)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {f"capture/{HOST}.yml", f"recordings/{HOST}/recording.json"}
    assert not {"CANARY"} & {path.name for path in tmp_path.rglob("*")}
    assert all(not {"\x1b", "\x9b", "\u202e"} & set(text) and len(text) < 20_000 for text in said)
    record_property("counted answers of hostile modules", len(answers))


def test_no_host_has_a_file_of_the_controller_sent_or_a_connection_opened(tmp_path):
    require_source = hostile.plugin_of("model_identity").require_source
    catalog = {"m": {"source": "rsync", "from": "gpu-09:/srv/m"}, "sent": {"source": "controller", "path": str(tmp_path)}}
    require_source("m", "GPU-09", 22, catalog, {})
    require_source("m", "10.0.0.9", 2222, catalog, {"m": {"host": "10.0.0.9", "port": 2222}})
    for name, host, port in (("m", "169.254.169.254", 80), ("m", "gpu-09", 6379), ("other", "gpu-09", 22), ("sent", "gpu-09", 22)):
        with pytest.raises(AerieError, match="only to what these name"):
            require_source(name, host, port, catalog, {})
    made = hostile.action("model_identity", {"models": {}}, lambda _: {})
    for missing in ({"sent": ["../../etc/shadow"]}, {"sent": ["/etc/shadow"]}, {"none": ["config.json"]}):
        with pytest.raises(AerieError, match="no file of the catalog"):
            made._send(catalog, {"sent": {"files": {"config.json": {"size": 1}}}}, missing, HOST)


def test_an_honest_search_is_decided(tmp_path):
    path = tmp_path / f"{HOST}.yml"
    made = hostile.action("nccl_tune", {"state": "decided", "result": SEARCH, "path": str(path), "arm_options": []}, lambda _: {})
    assert hostile.run(made)["changed"]
    assert generated_yaml.read(path)["nccl_tuned"]["latency"]["environment"] == {"NCCL_PROTO": "LL"}


@pytest.mark.parametrize("where", [where for where in hostile.mutations(SEARCH) if where], ids=str)
def test_a_search_that_says_anything_decides_for_this_host_or_not_at_all(where, tmp_path, said):
    """Every wrong value at every place of a search's result, which the controller makes a variables file of."""
    path = tmp_path / f"{HOST}.yml"
    for value in hostile.WRONG:
        path.unlink(missing_ok=True)
        result = hostile.replaced(SEARCH, where, value)
        made = hostile.action("nccl_tune", {"state": "decided", "result": result, "path": str(path), "arm_options": []}, lambda _: {})
        answer = hostile.run(made)
        asked = {"state": "planned", "result": result, "workloads": {"latency": {}}, "in_force": {}}
        planned = hostile.run(hostile.action("nccl_tune", asked, lambda _: {}))
        assert planned.get("failed") or isinstance(planned["experiments"], list)
        if path.exists():
            assert list(generated_yaml.read(path)) == ["nccl_tuned"]
        else:
            assert answer["failed"] and answer["msg"]
        assert sorted(one.name for one in tmp_path.iterdir()) in ([], [path.name])
    assert all("\x1b" not in text for text in said)


# ---- a whole run ----

FAKE = """#!{python}
# Stands for a host's interpreter: answers each module with what lies beside it, and looks at nothing else.
import re, shutil, sys
from pathlib import Path

here = Path(__file__).parent
if len(sys.argv) > 1 and sys.argv[1] == "-c":
    sys.stdout.buffer.write((here / "job.json").read_bytes())
    raise SystemExit
text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else sys.stdin.read()
name = next((name for name in {names!r} if re.search(rf"\\b{{name}}\\b", text[:100000])), "none")
packed = re.search(r'"archive": "(/[^"]+)"', text.replace(chr(92), ""))
if packed:
    shutil.copy(here / "archive.tar.gz", packed[1])
    name = "packed"
sys.stdout.buffer.write((here / f"{{name}}.json").read_bytes())
"""
MODULES = ("collect_results", "gpu_host_info", "host_capture", "golden_prompts", "sglang_server")
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - name: Survey
      gpu_host_info:
      register: survey
      ignore_errors: true
    - name: Capture
      host_capture: {info: "{{ survey }}", to: "{{ results }}/capture/{{ inventory_hostname }}.yml"}
      ignore_errors: true
    - name: Collect
      collect_results: {root: /opt/aerie, dest: "{{ results }}"}
      register: collected
      ignore_errors: true
    - name: Say what {{ survey.hostname | default('none') }} has
      ansible.builtin.debug:
        msg: "{{ survey.kernel | default('none') }}"
      ignore_errors: true
    - name: Look
      sglang_server: {root: /opt/aerie, name: main, state: status}
      ignore_errors: true
    - name: Prompts
      golden_prompts: {prompts: []}
      ignore_errors: true
    - name: Go on
      ansible.builtin.debug:
        msg: "{{ inventory_hostname }} went on"
"""


def definition(host: str) -> bytes:
    return json.dumps({"experiment": "demo", "run_id": RUN, "host": host, "cell": "c1"}).encode()


def host_of(directory: Path, name: str, change: Any = None) -> Path:
    """Make a host that answers honestly, or with ``change`` in the place of every text and of every list of its answers."""
    place = directory / "hosts" / name
    place.mkdir(parents=True)
    record = {"experiment": "demo", "run_id": RUN, "host": name, "cell": "c1"}
    files = [hostile.entry(f"{RUN}/c1/record.json", definition(name)), hostile.entry(f"{RUN}/c1/client.log", b"log")]
    job = {"ok": True, "changed": True, "msg": "done"}
    answers: dict[str, Any] = {
        "collect_results": {"changed": True, "records": [record], "files": files, "written": [], "problems": []},
        "gpu_host_info": {"changed": False, **INFO, "hostname": name},
        "host_capture": {"changed": False, "sources": [SOURCE]},
        "golden_prompts": {"changed": False, "summary": ["answered"]},
        "sglang_server": {"changed": False, "job": "/opt/aerie/jobs/1"},
        "job": {"progress": {"number": 1, "time": 2.0, "started": 1.0, "message": "working"}, "result": job, "running": True},
        "packed": {"changed": False},
        "none": {"changed": False},
    }
    for key, answer in answers.items():
        (place / f"{key}.json").write_text(json.dumps(answer if change is None else change(key, answer)))
    hostile.archive(place / "archive.tar.gz", {f"{RUN}/c1/record.json": definition(name), f"{RUN}/c1/client.log": b"log"})
    interpreter = place / "python"
    interpreter.write_text(FAKE.format(python=sys.executable, names=MODULES))
    interpreter.chmod(0o755)
    return interpreter


def poisoned(text: str) -> Any:
    def change(_: str, value: Any) -> Any:
        if isinstance(value, str):
            return value + text
        if isinstance(value, dict):
            return {key: item if key in ("ok", "sha256") else change(_, item) for key, item in value.items()}
        return [change(_, item) for item in value] if isinstance(value, list) else value

    return change


LIARS: dict[str, Any] = {
    "template": poisoned("{{ lookup('ansible.builtin.pipe', 'touch CANARY') }}"),
    "escape": poisoned(hostile.ESCAPE),
    "newline": poisoned("\nansible_python_interpreter: /tmp/evil\n"),
    "surrogate": poisoned("\udcff\ud800"),
    "elsewhere": lambda key, value: json.loads(json.dumps(value).replace("demo", "capture").replace("liar-elsewhere", OTHER)),
    "climbs": lambda key, value: json.loads(json.dumps(value).replace(RUN, "../..")),
    "nested": lambda key, value: dict.fromkeys(value, hostile.nested(60)),
    "huge": lambda key, value: dict.fromkeys(value, 10**300),
    "wrong": lambda key, value: {name: [None, True, {}] for name in value},
    "nothing": lambda key, value: {},
    "list": lambda key, value: [value],
    "fails": lambda key, value: {"failed": True, "msg": hostile.ESCAPE, "stderr": hostile.ESCAPE, hostile.ESCAPE: 1},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, str]]:
    """One run of ansible-playbook over two honest hosts and every liar; what it printed, its directory, the results before it."""
    directory = tmp_path_factory.mktemp("hostile")
    results = hostile.results(directory / "results")
    before = hostile.state(results)
    hosts = {"honest-1": host_of(directory, "honest-1"), "honest-2": host_of(directory, "honest-2")}
    hosts |= {f"liar-{name}": host_of(directory, f"liar-{name}", change) for name, change in LIARS.items()}
    inventory = {name: {"ansible_python_interpreter": str(path), "ansible_connection": "local"} for name, path in hosts.items()}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": inventory, "vars": {"results": str(results)}}}))
    (directory / "play.yml").write_text(PLAY)
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(hostile.PROJECT / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    done = subprocess.run(argv, cwd=directory, env=environment, capture_output=True, timeout=280, check=False)
    text = (done.stdout + done.stderr).decode(errors="surrogateescape")
    return text, directory, before


def test_a_run_prints_no_escape_and_no_traceback_and_evaluates_nothing(finished):
    text, directory, _ = finished
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(text)
    assert "Traceback" not in text and "Unexpected" not in text, text[-3000:]
    assert not list(directory.rglob("CANARY"))


def test_every_host_goes_on_whatever_another_says(finished):
    text, _, _ = finished
    went_on = set(re.findall(r"([\w-]+) went on", text))
    assert went_on == {"honest-1", "honest-2", *(f"liar-{name}" for name in LIARS)}, text[-6000:]
    assert set(re.findall(r"^(\S+) .*ignored=0", text, re.MULTILINE)) >= {"honest-1", "honest-2"}


def test_no_file_is_written_outside_a_hosts_own_directories(finished):
    text, directory, before = finished
    after = hostile.state(directory / "results")
    assert {name: after.get(name) for name in before} == before
    for path in after.keys() - before.keys():
        place = re.fullmatch(r"capture/([\w-]+)\.yml|demo\w*/[\w.-]+/([\w-]+)/[\w.-]+/[\w.-]+", path)
        assert place, path
        assert (place[1] or place[2]) in text
    for host in ("honest-1", "honest-2"):
        assert {f"capture/{host}.yml", f"demo/{RUN}/{host}/c1/record.json", f"demo/{RUN}/{host}/c1/client.log"} <= after.keys()
        assert json.loads(after[f"demo/{RUN}/{host}/c1/record.json"])["host"] == host


def test_what_was_captured_of_liars_is_data(finished):
    _, directory, _ = finished
    captured = sorted((directory / "results/capture").glob("liar-*.yml"))
    assert captured
    for path in captured:
        assert "ansible_python_interpreter" not in hostile.load(path.read_text(), directory)


def test_no_page_holds_a_control_character_or_turns_text_around():
    from aerie_controller import report
    from aerie_controller.preflight import results

    one = results.HostResult(f"gpu{hostile.ESCAPE}", machine=f"GPU \u202e{hostile.ESCAPE}", unreachable=f"gone \u2066{hostile.ESCAPE}")
    page = report.render_preflight([one])
    assert "gone" in page and not {"\x1b", "\x9b", "\x07", "\u202e", "\u2066"} & set(page)
