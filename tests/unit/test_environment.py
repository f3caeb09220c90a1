"""An environment is exactly its lock, is whole or made again, and refuses what would be wrong before anything is written."""

from __future__ import annotations

import fcntl
import json
import subprocess
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import fake_wheels
import installed
import pytest
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment
from ansible.module_utils.aerie.releases.environment import Interpreter, Source

from ports import free_port


@pytest.fixture
def host() -> installed.Installed:
    return installed.host()


class Told(Progress):
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[str] = []

    def update(self, message: str, done: int | None = None, total: int | None = None) -> None:  # noqa: ARG002
        self.messages.append(message)


def imports(python: Path, expression: str) -> str:
    return subprocess.run([str(python), "-c", f"print({expression})"], capture_output=True, text=True, check=True).stdout.strip()


def test_an_environment_has_torch_the_lock_and_the_stand_ins_but_no_sglang(host):
    python = host.plan.environment / "bin/python"
    assert imports(python, "__import__('torch').__version__") == "1.9.1+cpu"
    assert imports(python, "__import__('small_library').value") == "1"
    assert imports(python, "__import__('pretend').value, __import__('pretend.deep.part').deep.part.x") == "7 1"
    assert imports(python, "__import__('importlib.util').util.find_spec('sglang')") == "None"


def test_supervisor_gets_an_environment_of_its_own(host):
    assert host.plan.supervisor is not None
    assert imports(host.plan.supervisor / "bin/python", "__import__('supervisor').__name__") == "supervisor"
    assert json.loads((host.plan.supervisor / environment.MARKER).read_text())["version"] == "4.3.0"


def test_the_package_is_the_wheel_untouched_and_says_which(host):
    files = {path.relative_to(host.plan.package).as_posix() for path in host.plan.package.rglob("*") if path.is_file()}
    assert set(fake_wheels.SGLANG) < files
    assert not any("__pycache__" in file for file in files)
    assert json.loads((host.plan.package / environment.PACKAGE_MARKER).read_text())["sha256"] == host.spec.sglang_sha256[installed.MINOR]


def test_what_is_there_is_not_made_again(host):
    plan = environment.plan(host.paths, host.spec, host.interpreter, supervisor=True)
    assert not plan.changed
    assert plan.made(host.paths) == []
    described = environment.describe(plan, host.spec, host.interpreter)
    assert described["environment"]["torch_version"] == "1.9.1+cpu"
    assert Path(described["environment"]["site_packages"], "torch").is_dir()


def test_a_half_made_environment_is_made_again_and_user_settings_do_not_divert_it(host, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    paths = HostPaths(tmp_path / "host")
    plan = environment.plan(paths, host.spec, host.interpreter, supervisor=False)
    plan.environment.mkdir(parents=True)
    (plan.environment / "left-over").write_text("of a killed run")
    told = Told()
    environment.apply(paths, host.spec, host.interpreter, host.source, told, supervisor=False)
    assert environment.is_whole(plan.environment)
    assert not (plan.environment / "left-over").exists()
    assert (environment.site_packages_of(plan.environment, installed.MINOR) / "torch").is_dir()
    assert not (tmp_path / "elsewhere").exists()
    assert told.messages[1:4] == ["installing torch 1.9.1", "1 of 1 packages: small_library", "unpacking 1 packages"]


@pytest.mark.parametrize(
    ("lock_text", "said"),
    [
        (f"small_library==1.0 --hash=sha256:{'0' * 64}\n", "DO NOT MATCH THE HASHES"),
        ("small_library==1.0\n", "Hashes are required"),
    ],
)
def test_a_package_whose_hash_is_wrong_or_missing_is_refused_and_leaves_no_whole_environment(host, tmp_path, lock_text, said):
    spec = replace(host.spec, lock_text=lock_text)
    path = tmp_path / "environments" / "cpu-bad"
    with pytest.raises(AerieError, match=rf"(?s)packages of the lock could not be installed.*pip's last words.*{said}"):
        environment.make_environment(path, spec, host.interpreter, host.source, Progress(None))
    assert not environment.is_whole(path)


def test_a_missing_wheel_names_where_it_was_looked_for(host, tmp_path):
    spec = replace(host.spec, version="1.2.4")
    with pytest.raises(AerieError, match=rf"SGLang 1\.2\.4 could not be fetched from the wheels at {host.source.wheels}: add those"):
        environment.make_package(host.plan, spec, host.interpreter, host.source, Progress(None))
    assert not list(host.paths.packages.glob(".incoming-*"))


def test_the_second_of_two_runs_waits_and_finds_everything_made(host):
    told = Told()
    with (host.paths.environments / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        arguments = (host.paths, host.spec, host.interpreter, host.source, told)
        second = threading.Thread(target=environment.apply, args=arguments, kwargs={"supervisor": True})
        second.start()
        second.join(0.5)
        assert second.is_alive()
    second.join(20)
    assert told.messages == ["waiting: another run is making an environment on this host"]


@pytest.mark.parametrize(
    ("profile", "text", "message"),
    [
        ("cpu", "__version__ = '1.9.1'\ncuda = '13.0'\n", "build for CUDA 13.0.*sglang_release_extra_index_urls.*sglang_release_wheels"),
        ("cpu", "__version__ = '1.9.2+cpu'\ncuda = None\n", r"1.9.2\+cpu was installed and 1.9.1 is pinned"),
        ("cuda", "__version__ = '1.9.1+cpu'\ncuda: 'str | None' = None\n", "is a CPU build, and profile cuda needs one for CUDA"),
    ],
)
def test_the_wrong_build_of_torch_is_refused_with_a_cure(host, tmp_path, profile, text, message):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(text)
    with pytest.raises(AerieError, match=message):
        environment.check_torch(tmp_path, replace(host.spec, profile=profile))


def test_a_gpu_host_that_could_import_a_stand_in_is_refused_with_its_path(host):
    python = host.plan.environment / "bin/python"
    with pytest.raises(AerieError, match=rf"would import pretend \({host.plan.environment}.*/pretend\): remove"):
        environment.refuse_stand_ins(python)
    assert host.plan.supervisor is not None
    environment.refuse_stand_ins(host.plan.supervisor / "bin/python")


def test_a_damaged_wheel_is_refused(tmp_path):
    wheel = fake_wheels.make(tmp_path, "small_library", "1.0", fake_wheels.LIBRARY)
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    for changed, message in (
        (contents | {"small_library/__init__.py": b"value = 2\n"}, "differs from the wheel's RECORD"),
        (contents | {"small_library/extra.py": b""}, "extra.py differs from the wheel's RECORD"),
        (contents | {"../outside.py": b""}, "would lie outside"),
        (
            {name: content for name, content in contents.items() if name != "small_library/__init__.py"},
            "RECORD names small_library/__init__",
        ),
    ):
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in changed.items():
                archive.writestr(name, content)
        with pytest.raises(AerieError, match=message):
            environment.unpack_wheel(wheel, tmp_path / "unpacked")
    assert not (tmp_path / "outside.py").exists()


def test_a_python_without_lock_is_refused_before_anything_is_written(host, tmp_path):
    paths = HostPaths(tmp_path / "host")
    with pytest.raises(AerieError, match=rf"locked for Python {installed.MINOR}, and /old is 3.8.1.*sglang_release_python"):
        environment.plan(paths, host.spec, Interpreter("/old", "3.8.1"), supervisor=True)
    assert not paths.root.exists()


def test_a_full_disk_is_refused_with_what_is_needed(host, tmp_path):
    with pytest.raises(AerieError, match=r"GiB free, and 10000001\.1 GiB are needed: free some, or set aerie_root"):
        environment.plan(HostPaths(tmp_path / "host"), replace(host.spec, disk_gib=1e7), host.interpreter, supervisor=True)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "this host has no .*python-x: install it, or set sglang_release_python"),
        ("echo broken >&2; exit 3", r"(?s)does not run.*broken"),
        ("""echo '{"path": "/p", "version": "3.11.2", "venv": false}'""", "apt-get install python3.11-venv"),
    ],
)
def test_a_python_that_cannot_make_environments_is_refused_with_a_cure(tmp_path, script, message):
    program = tmp_path / "python-x"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(AerieError, match=message):
        environment.find_interpreter(str(program))


def test_the_interpreter_is_the_one_behind_a_virtual_environment(host):
    found = environment.find_interpreter(str(host.plan.environment / "bin/python"))
    assert found == host.interpreter


def test_an_environment_is_named_after_all_that_it_is_made_from(host):
    spec = host.spec
    others = [
        replace(spec, lock_text=spec.lock_text + "# more\n"),
        replace(spec, torch="1.9.2"),
        replace(spec, profile="cuda"),
        replace(spec, stand_ins={**spec.stand_ins, "pretend/__init__.py": "x = 2\n"}),
    ]
    names = [one.environment_id("3.11") for one in (spec, *others)] + [spec.environment_id("3.12")]
    assert len(set(names)) == len(names)
    shuffled = replace(spec, stand_ins=dict(reversed(spec.stand_ins.items())), sglang_sha256={}, disk_gib=7)
    assert shuffled.environment_id("3.11") == names[0]


def test_wheels_replace_every_index_and_extra_indexes_are_asked_only_where_said():
    wheels = Source(wheels="/w", index_url="https://a", extra_index_urls=("https://b",))
    assert wheels.options(extra=True) == ["--no-index", "--find-links", "/w"]
    indexes = Source(index_url="https://a", extra_index_urls=("https://b", "https://c"))
    assert indexes.options(extra=True) == ["--index-url", "https://a", "--extra-index-url", "https://b", "--extra-index-url", "https://c"]
    assert indexes.options(extra=False) == ["--index-url", "https://a"]
    assert Source().options(extra=True) == []


def test_an_unreachable_extra_index_is_passed_over(host, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(host.source.wheels))
    index = f"http://127.0.0.1:{free_port()}"
    source = Source(index_url=f"{index}/simple", extra_index_urls=(f"{index}/extra",))
    pip = environment._Pip(host.plan.environment / "bin/python", source, extra=True, retries=0)
    pip.run(["download", "--no-deps", "-d", str(tmp_path), "small_library==1.0"], "nothing came")
    assert [path.name for path in tmp_path.glob("*.whl")] == ["small_library-1.0-py3-none-any.whl"]


def test_the_count_of_packages_is_that_of_the_lock():
    assert environment.count_packages("# two\na==1 \\\n    --hash=sha256:00\nb-c.d==2 --hash=sha256:11\n") == 2


def test_stand_ins_stay_inside_the_environment(tmp_path):
    with pytest.raises(AerieError, match="would lie outside"):
        environment._write_stand_in(tmp_path / "site", "../../evil.py", "")
    assert not (tmp_path.parent / "evil.py").exists()
