"""A captured host is what another one needs to become the same, with its evidence and without secrets."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.aerie.host import capture
from ansible.module_utils.aerie.releases import model_catalog

from aerie_controller import generated_yaml, variables_file

GPU = {"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "persistence": True, "power": {"limit_w": 450.0, "default_w": 600.0}}
INFO: dict[str, Any] = {
    "os": {"name": "Ubuntu 24.04.3 LTS"},
    "kernel": "6.14.0-37-generic",
    "gpus": [GPU, GPU],
    "driver": {
        "loaded_version": "580.105.08",
        "modprobe_files": {
            "/etc/modprobe.d/a.conf": "options nvidia_uvm uvm_disable_hmm=0\nblacklist nouveau",
            "/etc/modprobe.d/b.conf": (
                'options nvidia-uvm uvm_disable_hmm=1\noptions nvidia NVreg_RegistryDwords="ForceP2P=0x11;RMForceP2PType=1"'
            ),
        },
    },
    "kernel_command_line": "BOOT_IMAGE=/boot/vmlinuz root=UUID=1-2 ro quiet iommu=pt amd_iommu=on pci=noacs pci=realloc",
    "pci": {
        "bridges": [
            {"to_gpus": [0, 1], "acs": {"request_redirect": False, "completion_redirect": False, "source_validation": True}},
            {"to_gpus": [], "acs": {"request_redirect": True}},
        ]
    },
    "cpu": {"governors": {"performance": 128}},
    "sysctl": {"vm.swappiness": "0", "kernel.numa_balancing": "1", "vm.max_map_count": "65530"},
    "limits": {"memlock": "unlimited", "nofile": 1024},
    "packages": {
        "system": {
            "nvidia-open": "580.105.08-1",
            "libcuda1": "580.105.08-1",
            "cuda-toolkit-12-9": "12.9.1-1",
            "cuda-toolkit-13-0": "13.0.2-1",
            "libnccl2": "2.28.9-1+cuda13.0",
            "linux-headers-6.14.0-37-generic": "6.14.0-37.37",
        },
        "held": ["nvidia-open", "libnccl2"],
        "release": {"sglang": "0.5.15.post1", "torch": "2.9.1", "flashinfer": None},
    },
    "nccl": {
        "configs": [
            {"path": "/opt/aerie/nccl.env", "settings": {"NCCL_P2P_LEVEL": "SYS", "NCCL_MIN_NCHANNELS": 8}},
            {"path": "/etc/nccl.conf", "settings": {"NCCL_PROTO": "LL"}},
        ]
    },
    "release": "0.5.15.post1-0123456789ab",
    "models": {},
}
SOURCE = {
    "url": "https://mirror.example.org/cuda/",
    "suite": "/",
    "components": [],
    "signed_by": "/usr/share/keyrings/cuda.gpg",
    "file": "/etc/apt/sources.list.d/cuda.sources",
    "fingerprint": "EB693B3035CD5710E231E123A4B469963BF863CC",
}
GIVEN = {
    "nvidia_cuda_repository_key_url": "https://me:hunter2@mirror.example.org/cuda.asc",
    "sglang_patches_sets": ["phase_profiler"],
    "sglang_models_catalog": {"kimi": {"path": "/srv/models/Kimi", "source": "host", "hub_token": "hf_secret"}},
}


def captured(info: dict[str, Any] | None = None, given: dict[str, Any] | None = None, sources: list | None = None) -> dict[str, Any]:
    whole, tuned = INFO | (info or {}), ["vm.swappiness", "kernel.numa_balancing"]
    sections = capture.sections(whole, [SOURCE] if sources is None else sources, GIVEN if given is None else given, tuned)
    return generated_yaml.load(variables_file.render("gpu-01", whole, sections)) or {}


def test_packages_are_captured_as_installed_with_their_repository():
    values = {name: value for name, value in captured().items() if name.startswith("nvidia_cuda_")}
    assert values == {
        "nvidia_cuda_state": "present",
        "nvidia_cuda_repository_url": "https://mirror.example.org/cuda/",
        "nvidia_cuda_repository_suite": "/",
        "nvidia_cuda_repository_key_fingerprint": "EB693B3035CD5710E231E123A4B469963BF863CC",
        "nvidia_cuda_repository_key_url": "https://mirror.example.org/cuda.asc",
        "nvidia_cuda_driver_package": "nvidia-open",
        "nvidia_cuda_driver_version": "580.105.08-1",
        "nvidia_cuda_toolkit_package": "cuda-toolkit-13-0",
        "nvidia_cuda_toolkit_version": "13.0.2-1",
        "nvidia_cuda_nccl_version": "2.28.9-1+cuda13.0",
        "nvidia_cuda_hold": True,
        "nvidia_cuda_headers": True,
        "nvidia_cuda_persistence": True,
    }


@pytest.mark.parametrize(
    ("installed", "package"),
    [
        (("nvidia-open", "nvidia-open-580", "nvidia-driver-580-open"), "nvidia-open"),
        (("nvidia-open-580", "nvidia-driver-580-open", "nvidia-dkms-580-open"), "nvidia-open-580"),
        (("nvidia-driver-580-open", "nvidia-utils-580"), "nvidia-driver-580-open"),
        (("cuda-drivers", "cuda-drivers-580", "nvidia-driver-580"), "cuda-drivers"),
    ],
)
def test_the_driver_is_captured_by_the_package_that_brings_all_the_others(installed, package):
    values = captured({"packages": {"system": dict.fromkeys(installed, "580.105.08-0ubuntu1"), "held": []}})
    assert values["nvidia_cuda_driver_package"] == package


def test_tuning_is_captured_as_effective_and_what_belongs_to_one_machine_is_not():
    assert captured()["host_tuning_settings"] == {
        "kernel_command_line": ["iommu=pt", "amd_iommu=on", "pci=noacs", "pci=realloc"],
        "modprobe": {"nvidia_uvm": {"uvm_disable_hmm": "1"}, "nvidia": {"NVreg_RegistryDwords": "ForceP2P=0x11;RMForceP2PType=1"}},
        "acs": "cleared",
        "cpu_governor": "performance",
        "sysctl": {"vm.swappiness": "0"},
        "limits": {"memlock": "unlimited"},
        "power_limit_w": 450,
    }


def test_a_host_that_nobody_tuned_gives_nothing_to_tune():
    plain = {
        "kernel_command_line": "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro",
        "driver": {"modprobe_files": {}},
        "pci": {"bridges": [{"to_gpus": [0], "acs": {"request_redirect": True}}, {"to_gpus": [0], "acs": None}]},
        "cpu": {"governors": {"schedutil": 8}},
        "sysctl": {"vm.swappiness": "60", "kernel.numa_balancing": "1"},
        "limits": {"memlock": 8388608},
        "gpus": [GPU | {"power": {"limit_w": 600.0, "default_w": 600.0}}],
    }
    assert captured(plain)["host_tuning_settings"] == {}


def test_what_could_not_be_read_is_left_out():
    nothing = dict.fromkeys(("driver", "pci", "cpu", "sysctl", "limits", "packages", "nccl", "kernel_command_line", "release"))
    assert captured(nothing | {"gpus": []}, {}, []) == {"host_tuning_settings": {}}


def test_gpus_that_differ_in_power_are_told_and_not_averaged():
    info = INFO | {"gpus": [GPU, GPU | {"power": {"limit_w": 600.0, "default_w": 600.0}}]}
    sections = capture.sections(info, [SOURCE], GIVEN, [])
    assert "power_limit_w" not in sections[1].values["host_tuning_settings"]
    assert "450.0, 600.0 W" in variables_file.render("gpu-01", info, sections)


def test_nccl_settings_are_those_of_our_file_and_a_stray_one_is_named():
    values = captured()
    assert (values["nccl_profile"], values["nccl_environment"]) == (None, {"NCCL_MIN_NCHANNELS": "8", "NCCL_P2P_LEVEL": "SYS"})
    assert "/etc/nccl.conf" in variables_file.render("gpu-01", INFO, capture.sections(INFO, [SOURCE], GIVEN, []))


def test_no_secret_reaches_the_file():
    text = variables_file.render("gpu-01", INFO, capture.sections(INFO, [SOURCE], GIVEN, []))
    assert [secret for secret in ("hunter2", "hf_secret", "hub_token") if secret in text] == []


ONE, OTHER = "3f" * 32, "4e" * 32
CATALOG = {
    "here": {"source": "host", "path": "/srv/models/here"},
    "sent": {"source": "controller", "path": "/home/ops/sent"},
    "copied": {"source": "rsync", "from": "gpu-01:/srv/copied", "identity_file": "/home/ops/.ssh/models"},
    "fetched": {"source": "hub", "repository": "lab/fetched", "revision": "0" * 40, "path": "/data/fetched"},
}
PLACES = ("/srv/models/here", "/opt/aerie/models/sent", "/opt/aerie/models/copied", "/data/fetched")


def models(identity: str | None, catalog: dict[str, Any], places: tuple[str, ...] = PLACES) -> tuple[dict[str, Any], str]:
    info = INFO | {"models": {path: {"problems": [], "bytes": 1, "identity": identity} for path in places}}
    given = {"aerie_root": "/opt/aerie", "sglang_models_catalog": catalog}
    text = variables_file.render("gpu-01", info, capture.sections(info, [SOURCE], given, []))
    return generated_yaml.load(text)["sglang_models_catalog"], " ".join(text.replace("\n#", " ").split())


def test_models_keep_their_identity_whatever_their_source():
    values, text = models(ONE, CATALOG)
    assert values == {name: entry | {"identity": ONE} for name, entry in CATALOG.items()}
    assert "not known" not in text
    assert list(model_catalog.problems(values)) == []


def test_a_model_whose_identity_is_not_known_is_told_with_how_to_know_it():
    values, text = models(None, CATALOG)
    assert values == CATALOG
    for name in CATALOG:
        assert f"{name}: its identity is not known here, so another host may get other files. Run playbooks/models.yml on this host" in text
    assert "sent: it is not here yet, so another host may get other files. Run playbooks/models.yml" in models(None, CATALOG, ())[1]


def test_the_identity_of_what_is_there_comes_before_that_of_the_hosts_variables():
    values, text = models(ONE, {"here": CATALOG["here"] | {"identity": OTHER}})
    assert values["here"]["identity"] == ONE
    assert f"here is another model here than the host's variables ask for: they say {OTHER}" in text
    values, text = models(None, {"here": CATALOG["here"] | {"identity": OTHER}})
    assert values["here"]["identity"] == OTHER
    assert "here: its identity is not known here, so the one below is that of the host's variables" in text


def test_a_driver_that_waits_for_a_reboot_is_told():
    info = INFO | {"driver": {"loaded_version": "570.1.2"}}
    assert "was not booted since" in variables_file.render("gpu-01", info, capture.sections(info, [SOURCE], GIVEN, []))


def test_the_same_host_is_the_same_file_on_another_day(monkeypatch):
    sections = capture.sections(INFO, [SOURCE], GIVEN, [])
    one = variables_file.render("gpu-01", INFO, sections)
    monkeypatch.setattr(variables_file.time, "strftime", lambda *_: "2001-01-01")
    other = variables_file.render("gpu-01", INFO, sections)
    assert one != other
    assert variables_file.without_date(one) == variables_file.without_date(other)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "cuda.sources",
            "# by hand\nTypes: deb\nURIs: https://u:p@m.example.org/cuda/\nSuites: /\nSigned-By: /etc/apt/keyrings/cuda.asc\n",
            [("https://m.example.org/cuda/", "/", "/etc/apt/keyrings/cuda.asc")],
        ),
        ("cuda.sources", "Enabled: no\nTypes: deb\nURIs: https://m.example.org/cuda/\nSuites: /\n", []),
        ("cuda.sources", "Types: deb-src\nURIs: https://m.example.org/cuda/\nSuites: /\n", []),
        (
            "x.list",
            "deb [arch=amd64 signed-by=/k.gpg] https://m.example.org/nvidia stable main\n",
            [("https://m.example.org/nvidia", "stable", "/k.gpg")],
        ),
        ("x.list", "deb https://m.example.org/debian stable main\n", []),
        ("cuda.list.bak", "deb https://m.example.org/cuda /\n", []),
    ],
)
def test_apt_sources_of_nvidia_are_found_in_both_formats(tmp_path, file, text, expected):
    path = tmp_path / "etc/apt/sources.list.d" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert [(source["url"], source["suite"], source["signed_by"]) for source in capture.read_sources(tmp_path)] == expected


def test_a_key_that_is_none_gives_no_fingerprint(tmp_path):
    (tmp_path / "k").write_text("nonsense")
    assert capture.with_fingerprint({"signed_by": "/k"}, tmp_path)["fingerprint"] is None
    assert capture.with_fingerprint({"signed_by": "/missing"}, tmp_path)["fingerprint"] is None
