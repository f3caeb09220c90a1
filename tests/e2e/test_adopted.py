"""An image that ships SGLang is adopted: a release of its own serves with the image's packages, and no file of the image changes."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from ports import free_port
from runs import HOST_OF_TESTS, playbook, processes_of, snapshot


@pytest.fixture(scope="module")
def image(deployed, tmp_path_factory) -> Path:
    """A Python as a container image has it, SGLang installed from its wheel; torch and the rest come from the demo's environment."""
    made = json.loads((HOST_OF_TESTS / "current/release.json").read_text())
    path = tmp_path_factory.mktemp("image") / "venv"
    subprocess.run([made["environment"]["python"], "-I", "-m", "venv", "--without-pip", str(path)], check=True)
    (site_packages,) = path.glob("lib/python*/site-packages")
    (site_packages / "packages.pth").write_text(f"import site; site.addsitedir({made['environment']['site_packages']!r})\n")
    for part in Path(made["package"]["path"]).glob("sglang*"):
        shutil.copytree(part, site_packages / part.name)
    return path


def test_an_adopted_image_is_patched_beside_and_served_and_a_second_run_changes_nothing(image, tmp_path):
    root, port = tmp_path / "host", free_port()
    root.mkdir()
    (root / "environments").symlink_to(HOST_OF_TESTS / "environments")  # supervisor is there
    variables = {
        "aerie_root": str(root),
        "aerie_results": str(tmp_path / "results"),
        "sglang_benchmark_experiment": None,
        "sglang_server_instances": {"main": {"arm": "eagle3", "model": "target", "port": port}},
        "sglang_release_adopt_environment": str(image / "bin/python"),
    }
    before = snapshot(image)
    try:
        first = playbook("deploy_eagle3.yml", variables=variables, scratch=tmp_path).require_success()
        assert "0.5.23 is adopted as it is on the host" in " ".join(first.output.split())
        release = json.loads((root / "current/release.json").read_text())
        assert release["adopted"] == "environment"
        assert [one["name"] for one in release["patch_sets"]] == ["phase_profiler"]
        assert list(root.glob("current/lib/python*/site-packages/sglang/srt/speculative/aerie_phase_profiler.py"))
        assert not (root / "packages").exists(), "SGLang was fetched although the image has it"
        body = json.dumps({"text": "import os", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["text"]
        second = playbook("deploy_eagle3.yml", variables=variables, scratch=tmp_path).require_success()
        assert second.changed == {}
    finally:
        playbook("playbooks/stop.yml", variables=variables, scratch=tmp_path)
    assert processes_of(root) == []
    assert snapshot(image) == before
