"""versions.yml: what can be deployed is in it whole, and what cannot is refused with what can."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import versions
from ansible.module_utils.aerie.releases.environment import count_packages

ROOT = Path(__file__).parents[2]
DATA = yaml.safe_load((ROOT / "versions.yml").read_text())
BUILDS = [(str(version), profile) for version, entry in DATA["versions"].items() for profile in entry["builds"]]


@pytest.fixture
def data() -> dict[str, Any]:
    """A copy of the project's own versions, to be broken."""
    return copy.deepcopy(DATA)


@pytest.mark.parametrize("profile", versions.PROFILES)
def test_the_default_of_a_profile_can_be_deployed(profile):
    build = versions.resolve(DATA, profile)
    assert build.version == DATA["default"][profile]
    assert build == versions.resolve(DATA, profile, build.version)


@pytest.mark.parametrize(("profile", "proof"), [("cpu", "cpu"), ("cuda", "sm90")])
def test_a_default_was_verified_where_its_profile_runs(profile, proof):
    assert proof in versions.resolve(DATA, profile).verified_on


@pytest.mark.parametrize(("version", "profile"), BUILDS)
def test_a_lock_has_hashes_for_every_package_and_leaves_sglang_to_the_release(version, profile):
    build = versions.resolve(DATA, profile, version)
    text = (ROOT / build.lock).read_text()
    assert count_packages(text) > 50
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text.partition("\n")[2]):
        assert re.fullmatch(r"[\w.-]+==[\w.+!-]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+", entry.rstrip("\n")), entry[:200]
    assert not re.search(r"^sglang==", text, re.MULTILINE)
    assert bool(re.search(rf"^torch=={re.escape(build.torch)} ", text, re.MULTILINE)) is build.torch_in_lock


@pytest.mark.parametrize(
    ("profile", "version", "message"),
    [
        ("cpu", "0.5.32", r"SGLang 0.5.32 has no lock for profile cpu; did you mean '0.5.23'\? versions.yml has 0.5.23"),
        ("cuda", "0.5.23", r"SGLang 0.5.23 has no lock for profile cuda \(it has one for cpu\)"),
        ("cuda", "1.0", r"no lock for profile cuda.* versions.yml has 0.5.15.post1: set sglang_release_version"),
        ("gpu", None, "there is no profile 'gpu': choose cpu or cuda"),
    ],
)
def test_a_version_without_a_lock_is_refused_with_those_that_have_one(profile, version, message):
    with pytest.raises(AerieError, match=message):
        versions.resolve(DATA, profile, version)


def test_a_deploy_to_a_gpu_that_nothing_was_verified_on_says_so():
    build = versions.resolve(DATA, "cuda")
    assert "not on sm120" in str(versions.unverified(build))
    assert "not on sm100 or sm120" in str(versions.unverified(build, ["sm120", "sm90", "sm100"]))
    assert versions.unverified(build, ["sm90"]) is None
    assert versions.unverified(versions.resolve(DATA, "cpu")) is None


def test_all_that_is_wrong_is_said_at_once(data):
    cuda = data["versions"]["0.5.15.post1"]["builds"]["cuda"]
    del cuda["torch"]
    cuda |= {"stand_ins": "profiles/cpu/packages", "verified_on": ["sm12"], "lokc": "x", "sglang_sha256": {3.12: "a" * 64}}
    data["default"]["cpu"] = "9"
    with pytest.raises(AerieError) as caught:
        versions.resolve(data, "cpu")
    for part in (
        "torch is missing",
        "unknown key 'lokc'; did you mean 'lock'?",
        "stand_ins must never reach a GPU host",
        "'sm12' is none of",
        "3.12 needs quotes",
        "default.cpu is 9, which has no lock",
    ):
        assert part in str(caught.value)


def test_every_stand_in_is_marked_so_that_a_gpu_host_can_refuse_it():
    packages = [path for path in (ROOT / "profiles/cpu/packages").iterdir() if path.is_dir()]
    assert len(packages) == 5
    for package in packages:
        assert re.search(r"^__aerie_stand_in__ = True$", (package / "__init__.py").read_text(), re.MULTILINE), package.name


def test_the_triton_stand_in_defines_kernels_without_running_them():
    program = (
        "import triton, triton.language as tl\nfrom triton.runtime.driver import driver\n"
        "@triton.jit\ndef plain(x: tl.constexpr): return x + 1\n"
        "@triton.autotune(configs=[triton.Config({'A': 1})], key=['n'])\n@triton.jit\ndef tuned(x): return x + 2\n"
        "class Mine(triton.compiler.CompiledKernel): pass\n"
        "print(plain(1), tuned(1), triton.cdiv(7, 2), triton.next_power_of_2(9), bool(driver), tl.float32 is tl.float32)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT / "profiles/cpu/packages"
    )
    assert answer.stdout.split() == ["2", "3", "4", "16", "False", "True"], answer.stderr


def test_a_lock_is_kept_without_what_names_a_place():
    spec = importlib.util.spec_from_file_location("make_lock", ROOT / "tools/make_lock.py")
    assert spec and spec.loader
    make_lock = importlib.util.module_from_spec(spec)
    sys.modules["make_lock"] = make_lock
    spec.loader.exec_module(make_lock)
    text = (
        "# This file was autogenerated by uv via\n--index-url https://index.example/simple\n\n"
        "a==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n    # via b\n"
        "sglang==2 \\\n    --hash=sha256:22\nsglang-kernel==3 \\\n    --hash=sha256:33\n"
    )
    lines = make_lock.tidy(text, make_lock.Lock("x", "3.12", (), without=("sglang",))).splitlines()
    assert lines[0].startswith("# Made by tools/make_lock.py from x.in for Python 3.12")
    assert lines[1:] == ["a==1 \\", "    --hash=sha256:00 \\", "    --hash=sha256:11", "sglang-kernel==3 \\", "    --hash=sha256:33"]


@pytest.mark.parametrize(
    ("version", "torch", "verified_on", "message"),
    [
        ("0.5.9", "2.9.1+cu130", (), "SGLang 0.5.9, adopted as it is on the host, was not verified anywhere"),
        ("0.5.23", "2.13.0+cpu", ("cpu", "wheel"), "what was verified on cpu and wheel is the lock of this version: compare"),
        ("0.5.23+g12", "2.9.1", ("cpu", "wheel"), "the lock of this version, with torch 2.13.0 and not 2.9.1"),
    ],
)
def test_what_is_adopted_is_told_to_be_no_lock_that_was_verified(version, torch, verified_on, message):
    found = versions.adopted(DATA, "cpu", version, torch)
    assert found[0] == verified_on
    assert message in found[1]
