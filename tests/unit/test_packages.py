"""Versions are ordered as dpkg orders them, keys are told by their fingerprint, and a plan that moves what nobody asked for is refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import apt, apt_key, dpkg, packages
from ansible.module_utils.aerie.host.apt import Repository
from ansible.module_utils.aerie.host.dpkg import Move
from ansible.module_utils.aerie.host.packages import Driver, Manifest, Plan, Request, Want

import nvidia_packages

URL = "https://mirror.example.org/cuda/"

# An ed25519 key that was made for this test and signed nothing; its fingerprint is what gpg says of it.
KEY = """-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEawye9hYJKwYBBAHaRw8BAQdAUbcJd9WpojUBxGtvRD2ZH9gr7hgCLIFsIclI
QVQcayi0HWFlcmllLXVuaXQgPHVuaXRAZXhhbXBsZS5vcmc+iJAEExYIADgWIQSr
tX9N1o/fs5E+erT2AadjMdpDogUCawye9gIbAwULCQgHAgYVCgkICwIEFgIDAQIe
AQIXgAAKCRD2AadjMdpDon4QAQDxR9gSK2Yuh10Fzh1GO4lA32py7bKLZetlcg1R
Ta/UHgD/VmHkvqEU0MW2aser/k7rPaX4oSLCT/Qd9ae+ogPORQw=
=q0m/
-----END PGP PUBLIC KEY BLOCK-----
"""
FINGERPRINT = "ABB57F4DD68FDFB3913E7AB4F601A76331DA43A2"

SIMULATED = """NOTE: This is only a simulation!
Reading package lists...
Inst libcuda1 [580.95.05-1] (580.105.08-1 NVIDIA CUDA:stable [amd64]) []
Inst nvidia-open [580.95.05-1] (580.105.08-1 NVIDIA CUDA:stable [amd64])
Inst linux-headers-6.8.0-1 (6.8.0-1.1 Ubuntu:24.04/noble [amd64])
Remv nvidia-old [550.1-1]
Purg nvidia-older [540.1-1]
Conf libcuda1 (580.105.08-1 NVIDIA CUDA:stable [amd64])
"""


# -- versions


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("580.95.05-1", "580.105.08-1"),
        ("2.28.9-1+cuda12.9", "2.28.9-1+cuda13.0"),
        ("1.0~rc1-1", "1.0-1"),
        ("1.0-1~x", "1.0-1"),
        ("1.0-1", "1.0-1ubuntu1"),
        ("9.9", "1:0.1"),
        ("1.0a", "1.0+b"),
        ("1.9", "1.10"),
    ],
)
def test_versions_are_ordered_as_dpkg_does(lower, higher):
    assert dpkg.compare(lower, higher) < 0 < dpkg.compare(higher, lower)
    assert dpkg.compare(higher, higher) == 0


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("580.105.08-1", "580", True),
        ("580.105.08-1", "580.105.08", True),
        ("580.105.08-1", "580.105.08-1", True),
        ("580.105.08-1", "58", False),
        ("580.105.08-1", "580.10", False),
        ("580", "580.105", False),
    ],
)
def test_the_beginning_of_a_version_names_its_branch(version, wanted, fits):
    assert dpkg.matches(version, wanted) is fits


def test_the_upstream_part_leaves_epoch_and_revision():
    assert [dpkg.upstream(version) for version in ("580.105.08-1ubuntu1", "1:3.9-4", "1.0")] == ["580.105.08", "3.9", "1.0"]


# -- what dpkg and apt say


def test_a_simulation_tells_every_package_that_moves():
    assert dpkg.parse_simulation(SIMULATED) == [
        Move("libcuda1", "580.95.05-1", "580.105.08-1"),
        Move("nvidia-open", "580.95.05-1", "580.105.08-1"),
        Move("linux-headers-6.8.0-1", None, "6.8.0-1.1"),
        Move("nvidia-old", "550.1-1", None),
        Move("nvidia-older", "540.1-1", None),
    ]


def test_unfinished_held_and_foreign_packages_are_told():
    rows = [
        "ii  bash amd64 5.2",
        "hi  libnccl2 amd64 2.28",
        "iF  cuda-nvcc-13-0 amd64 13.0",
        "iHR gcc amd64 12",
        "rc  old all 1",
        "ii  zlib1g i386 1.2",
    ]
    text = "".join(f"{row[:3]}\t" + "\t".join(row[4:].split()) + "\n" for row in rows) + "un \tgone\t\t\n"
    found = dpkg.parse_packages(text, "amd64")
    assert {name: package.trouble for name, package in found.items() if package.trouble} == {
        "cuda-nvcc-13-0": "half-configured",
        "gcc": "must be installed again",
    }
    assert [name for name, package in found.items() if package.held] == ["libnccl2"]
    assert [name for name, package in found.items() if not package.installed] == ["old"]
    assert "zlib1g:i386" in found and "gone" not in found


# -- keys


def test_a_keys_fingerprint_is_what_gpg_says():
    assert apt_key.fingerprints(apt_key.binary(KEY.encode(), "key.asc"), "key.asc") == [FINGERPRINT]


def test_binary_and_armored_keys_are_the_same():
    packets = apt_key.binary(KEY.encode(), "key.asc")
    assert apt_key.binary(packets, "key.gpg") == packets


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<html>not found</html>", "this is no OpenPGP key"),
        (b"", "this is no OpenPGP key"),
        (KEY.encode().replace(b"\nmDME", b"\n!!!!"), "armor is damaged"),
    ],
)
def test_what_is_no_key_is_refused_by_name(data, message):
    with pytest.raises(AerieError, match=f"key.asc.*{message}"):
        apt_key.binary(data, "key.asc")


def test_a_key_that_is_cut_off_is_refused():
    with pytest.raises(AerieError, match="cut off"):
        apt_key.fingerprints(apt_key.binary(KEY.encode(), "key.asc")[:20], "key.asc")


def test_a_key_that_nobody_pinned_is_refused_and_both_fingerprints_told():
    request = Request(Path("/nowhere"), {}, url=URL, key=KEY.encode(), fingerprints=("A" * 40,))
    with pytest.raises(AerieError, match=f"{FINGERPRINT}.*{'A' * 40}; nothing was changed"):
        packages.fetch_key(request, "", request.fingerprints)


# -- which repository


def test_a_distribution_has_its_own_repository_and_a_mirror_its_own_key():
    known = {
        "ubuntu2404": {
            "url": "https://example.org/ubuntu2404",
            "key_url": "https://example.org/ubuntu2404/3bf8.pub",
            "key_fingerprints": ["ab cd"],
        }
    }
    assert packages.repository_of(Request(Path("/x"), known), "ubuntu2404") == (
        "https://example.org/ubuntu2404/",
        "https://example.org/ubuntu2404/3bf8.pub",
        ("ABCD",),
    )
    assert packages.repository_of(Request(Path("/x"), known, url=URL), "ubuntu2404")[1] == f"{URL}3bf8.pub"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(Path("/x"), {"debian12": {"url": URL}}), "has none for ubuntu2404 .it has debian12"),
        (Request(Path("/x"), {}, url=URL), "no fingerprint is pinned"),
    ],
)
def test_a_repository_without_address_or_fingerprint_is_refused(request_, message):
    with pytest.raises(AerieError, match=message):
        packages.repository_of(request_, "ubuntu2404")


def test_headers_are_those_of_the_running_kernel_as_its_distribution_names_it(tmp_path):
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.0-88-generic\n")
    names = [wanted.name for wanted in Request(Path("/x"), {}).wants(packages.running_kernel(tmp_path))]
    assert names[:2] == ["linux-headers-6.8.0-88-generic", "nvidia-open"]


@pytest.mark.parametrize(
    ("text", "name"), [('ID=ubuntu\nVERSION_ID="24.04"\n', "ubuntu2404"), ("ID=debian\nVERSION_ID='13'\n", "debian13")]
)
def test_distributions_are_named_as_nvidia_names_them(tmp_path, text, name):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(text)
    assert packages.distribution(tmp_path) == name


def test_the_repository_is_written_as_deb822_with_its_own_key():
    flat, suited = Repository(URL, "/", (), b""), Repository(URL, "stable", ("main",), b"")
    assert flat.sources(Path("/k.gpg")) == f"Types: deb\nURIs: {URL}\nSuites: /\nSigned-By: /k.gpg\n"
    assert "Components: main\n" in suited.sources(Path("/k.gpg"))
    assert flat.pinned_origin == 'origin "mirror.example.org"'
    assert Repository("file:///srv/cuda/", "/", (), b"").pinned_origin == 'origin ""'


# -- what to have


def offers(*versions: str) -> list[tuple[str, str]]:
    return [(version, f"{URL}  Packages") for version in versions]


def want(version: str | None = None, **more: object) -> Want:
    return Want("libnccl2", version, "nvidia_cuda_nccl_version", **more)  # type: ignore[arg-type]


def test_without_a_version_what_is_installed_stays_else_the_newest_comes():
    assert packages.choose(want(), "2.27", offers("2.28", "2.27"), URL) == "2.27"
    assert packages.choose(want(), None, offers("2.9", "2.28"), URL) == "2.28"


def test_a_branch_gives_its_newest():
    assert packages.choose(want("2.27"), "2.28-1", offers("2.28-1", "2.27.10-1", "2.27.9-1"), URL) == "2.27.10-1"


def test_nccl_is_the_one_built_for_the_toolkits_cuda():
    several = offers("2.28.9-1+cuda13.1", "2.28.9-1+cuda13.0", "2.28.9-1+cuda12.9", "2.27.7-1+cuda13.0")
    assert packages.choose(want(cuda="13.0"), None, several, URL) == "2.28.9-1+cuda13.0"
    assert packages.choose(want("2.28.9", cuda="12.8"), None, several, URL) == "2.28.9-1+cuda12.9"
    assert packages.choose(want("2.28.9-1+cuda13.1", cuda="13.0"), None, several, URL) == "2.28.9-1+cuda13.1"


def test_nvidias_repository_comes_before_a_distributions():
    mixed = [("2.30", "http://archive.example.org  Packages"), *offers("2.28")]
    assert packages.choose(want(), None, mixed, URL) == "2.28"


def test_a_version_that_is_not_offered_is_refused_with_those_that_are():
    with pytest.raises(AerieError, match=r"nvidia_cuda_nccl_version: .*libnccl2 3.0; offered are 2.28, 2.27"):
        packages.choose(want("3.0"), None, offers("2.28", "2.27"), URL)


def test_missing_headers_are_refused_with_what_to_do():
    with pytest.raises(AerieError, match="boot the distribution's newest kernel"):
        packages.choose(Want("linux-headers-6.8", None, "nvidia_cuda_headers"), None, [], URL)


def test_a_container_wants_no_driver():
    names = [wanted.name for wanted in Request(Path("/x"), {}, manage_driver=False).wants("6.8")]
    assert names == ["cuda-toolkit-13-0", "libnccl2", "libnccl-dev"]


# -- what may move


def test_a_downgrade_is_refused_unless_it_is_allowed():
    moves = [Move("nvidia-open", "590.1-1", "580.1-1")]
    with pytest.raises(AerieError, match=r"nvidia-open 590.1-1 -> 580.1-1: this is a downgrade; nvidia_cuda_allow_downgrade"):
        packages.refuse(moves, lambda _: True, allow_downgrade=False)
    packages.refuse(moves, lambda _: True, allow_downgrade=True)


def test_every_package_that_would_move_unasked_is_told_at_once():
    moves = [Move("libc6", "2.39-0", "2.39-1"), Move("mesa", "1-1", None), Move("dkms", None, "3.0-1"), Move("nvidia-open", "1", "2")]
    with pytest.raises(AerieError) as refused:
        packages.refuse(moves, lambda move: move.name.startswith("nvidia"), allow_downgrade=False)
    assert "libc6 2.39-0 -> 2.39-1: it would change too" in str(refused.value)
    assert "mesa 1-1 -> (removed): it would be removed too" in str(refused.value)
    assert "dkms" not in str(refused.value)


def test_pieces_of_the_driver_are_those_of_its_version():
    driver = next(wanted for wanted in Request(Path("/x"), {}).wants("6.8") if wanted.name == "nvidia-open")
    assert packages.belongs("libnvidia-ml1", "580.105.08-2", driver, "580.105.08-1")
    assert not packages.belongs("nvidia-container-toolkit", "1.18.0-1", driver, "580.105.08-1")


@dataclass(frozen=True)
class Offering:
    """A stage that knows what each package is offered in."""

    offered: dict[str, list[str]]
    repository: Repository

    def offers(self, names: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
        return {name: offers(*self.offered.get(name, ())) for name in names}


def test_pieces_that_depend_on_the_driver_loosely_move_with_it():
    installed = {
        "nvidia-open": "580.95.05-1ubuntu1",
        "nvidia-modprobe": "580.95.05-0ubuntu1",
        "libnvidia-compute-580": "580.95.05-0ubuntu1",
        "nvidia-container-toolkit": "1.18.0-1",
        "cuda-toolkit-13-0": "13.0.1-1",
    }
    offered = {"nvidia-modprobe": ["580.105.08-0ubuntu1", "580.95.05-0ubuntu1"], "nvidia-container-toolkit": ["1.19.0-1"]}
    stage = Offering(offered, Repository(URL, "/", (), b""))
    wants = Request(Path("/x"), {}).wants("6.8")
    made = Plan(Request(Path("/x"), {}), Driver(True, None, None), {}, Manifest(), wants)
    made.versions = {"nvidia-open": "580.105.08-1ubuntu1", "cuda-toolkit-13-0": "13.0.2-1"}
    # what the new version has no more, apt takes care of
    assert packages.left_behind(made, stage, installed) == {"nvidia-modprobe": "580.105.08-0ubuntu1"}  # type: ignore[arg-type]
    assert packages.left_behind(made, stage, {}) == {}  # type: ignore[arg-type]
    made.versions["nvidia-open"] = installed["nvidia-open"]
    assert packages.left_behind(made, stage, installed) == {}  # type: ignore[arg-type]


def test_a_piece_comes_from_nvidia_where_a_distribution_builds_the_same_version():
    mixed = [("580.95.05-0ubuntu0.24.04.1", "http://archive.example.org  Packages"), *offers("580.95.05-0ubuntu1", "580.105.08-0ubuntu1")]
    assert packages.of_upstream(mixed, "580.95.05-1ubuntu1", URL) == "580.95.05-0ubuntu1"
    assert packages.of_upstream(mixed[:1], "580.95.05-1ubuntu1", URL) == "580.95.05-0ubuntu0.24.04.1"
    assert packages.of_upstream(mixed, "590.48.01-1", URL) is None


# -- a driver and a boot


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(True, "580.95", "580.105"), "580.105 is installed, and 580.95 is loaded"),
        (Driver(True, None, "580.105"), "580.105 is installed, and none is loaded"),
        (Driver(True, "580.105", None), "580.105 is loaded, and no longer installed"),
        (Driver(True, "580.105", "580.105"), None),
        (Driver(False, "580.95", None), None),
    ],
)
def test_a_boot_is_needed_where_the_loaded_driver_is_not_the_installed_one(driver, reason):
    assert driver.reboot_reason is None if reason is None else reason in str(driver.reboot_reason)


def test_open_and_proprietary_drivers_tell_their_version(tmp_path):
    place = tmp_path / "proc/driver/nvidia"
    place.mkdir(parents=True)
    assert packages.loaded_driver(tmp_path) is None
    for line in (
        "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
        "NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue",
    ):
        (place / "version").write_text(f"NVRM version: {line}\n")
        assert packages.loaded_driver(tmp_path) == "580.159.04"


# -- the manifest


def test_a_manifest_remembers_what_was_brought(tmp_path):
    path = tmp_path / "manifest.json"
    assert Manifest.read(path) == Manifest()
    Manifest().with_added(packages=["b", "a"]).with_added(packages=["a", "c"], holds=["a"]).write(path)
    assert Manifest.read(path) == Manifest(packages=("a", "b", "c"), holds=("a",))


def test_a_damaged_manifest_is_refused_by_name(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("{")
    with pytest.raises(AerieError, match=r"manifest\.json"):
        Manifest.read(path)


def test_lists_of_a_repository_are_told_by_apts_own_names():
    assert Repository("http://198.51.100.1:8080/cuda_x/y/", "/", (), b"").lists_prefix == "198.51.100.1:8080_cuda%5fx_y_"


def test_pins_name_the_pieces_of_the_driver_by_upstream_version():
    wants = Request(Path("/x"), {}).wants("6.8")
    pins = packages.pins(wants, {"nvidia-open": "580.105.08-1", "libnccl2": "2.28.9-1+cuda13.0", "linux-headers-6.8": "6.8-1"})
    assert pins["nvidia-open"] == "580.105.08-1"
    assert [version for names, version in pins.items() if "libcuda1" in names] == ["580.105.08-*"]
    assert "linux-headers-6.8" not in pins
    text = apt.preferences(Repository(URL, "/", (), b""), pins, 995)
    assert "Package: libnccl2\nPin: version 2.28.9-1+cuda13.0\nPin-Priority: 995\n" in text


# -- the module


def test_every_value_returned_is_documented(tmp_path):
    plan = packages.Plan(Request(tmp_path, {}), Driver(True, None, None), {}, Manifest(), [])
    assert plan.changed is False
    assert set(plan.describe()) - {"changed", "diff"} == set(yaml.safe_load(nvidia_packages.RETURN))


def test_a_container_keeps_its_driver_unless_it_is_no_container():
    options = yaml.safe_load(nvidia_packages.DOCUMENTATION)["options"]
    params = {name: option.get("default") for name, option in options.items()} | {"root": "/x", "toolkit_package": "cuda-toolkit-13-0"}
    managed = {
        (kind, wish): nvidia_packages.request_of(params | {"container": kind, "manage_driver": wish}).manage_driver
        for kind in (None, "docker")
        for wish in ("auto", "false")
    }
    assert managed == {(None, "auto"): True, (None, "false"): False, ("docker", "auto"): False, ("docker", "false"): False}


def test_whether_a_unit_is_enabled_is_asked_of_the_files_and_not_of_what_the_manager_remembers(tmp_path, monkeypatch):
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\n"
        'case "$1 $2" in\n'
        "is-enabled*) echo enabled ;;\n"
        '"show --property=ActiveState") echo active ;;\n'
        "*) printf 'UnitFileState=disabled\\nActiveState=active\\n' ;;\n"
        "esac\n"
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert packages.unit_state("nvidia-persistenced.service") == {"UnitFileState": "enabled", "ActiveState": "active"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert packages.unit_state("nvidia-persistenced.service") == {"UnitFileState": "", "ActiveState": ""}
