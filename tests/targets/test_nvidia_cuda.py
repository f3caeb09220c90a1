"""nvidia_cuda brings exactly what was asked for, moves nothing else, holds it, and leaves no trace when it goes.

Two are bare GPU hosts of fakes (tests/targets/fakes), a Debian and an Ubuntu 24.04; the third is a container of an Ubuntu 24.04. Each test
goes on from the state that the one before left, as a host's life does.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import host as fake_host
from fakes import repository, scenarios

from booted_hosts import BootedHosts, Host
from runs import PROJECT, Run, playbook

ROOT = "/opt/aerie"
OLD = {"driver": "580.95.05-1", "toolkit": "13.0.1-1", "nccl": "2.27.7-1+cuda13.0"}
NEW = {"driver": "580.105.08-1", "toolkit": "13.0.2-1", "nccl": "2.28.3-1+cuda13.0"}
OUR_FILES = ("/etc/apt/sources.list.d/nvidia-cuda.sources", "/etc/apt/keyrings/nvidia-cuda.gpg", "/etc/apt/preferences.d/nvidia-cuda")
MODULE_CALLS = 6

PLAY = """---
# What a person runs for CUDA alone.
- name: CUDA
  hosts: gpu_hosts
  gather_facts: false
  roles: [nvidia_cuda]
  post_tasks:
    - name: Keep the answer for the test
      ansible.builtin.copy:
        dest: "{{ answers }}/{{ inventory_hostname }}.json"
        content: "{{ __nvidia_cuda | to_json }}"
        mode: "0644"
      delegate_to: localhost
      become: false
      check_mode: false
      diff: false
      changed_when: false
    - name: Give the host back
      ansible.builtin.include_role:
        name: aerie
        tasks_from: release
"""

# What is on the host: every file and link, but for what any run of apt or Ansible writes.
TREE = r"""
import hashlib, json, os, sys
skip = {"/proc", "/sys", "/dev", "/run", "/tmp", "/var/tmp", "/var/log", "/var/cache", "/var/lib/dpkg", "/var/lib/systemd"}
skip |= {"/root", "/opt/aerie", "/var/lib/fake-host", "/var/lib/apt/extended_states", "/var/lib/apt/periodic"}
skip |= {"/var/lib/apt/lists/partial", "/var/lib/apt/lists/lock"}
found = {}
for directory, names, files in os.walk("/"):
    names[:] = [name for name in names if os.path.join(directory, name) not in skip]
    for name in [*names, *files]:
        path = os.path.join(directory, name)
        if path in skip:
            continue
        if os.path.islink(path):
            found[path] = os.readlink(path)
        elif os.path.isfile(path):
            with open(path, "rb") as stream:
                found[path] = hashlib.file_digest(stream, "sha256").hexdigest()
        else:
            found[path] = "directory"
json.dump(found, sys.stdout)
"""

# The core itself, without Ansible around it: what it plans, and does when told to.
CORE = r"""
import json, sys
sys.path.insert(0, "/run/aerie-core")
from pathlib import Path
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.host import packages, packages_apply
asked = json.loads(sys.argv[1])
check, absent, apply = (asked.pop(name, False) for name in ("check", "absent", "apply"))
request = packages.Request(root=Path("/opt/aerie"), **asked)
try:
    plan = packages.plan_removal(request) if absent else packages.plan(request, check=check)
    try:
        answer = plan.describe()
        if apply:
            packages_apply.apply(plan, lambda message: None)
        print(json.dumps(answer))
    finally:
        plan.close()
except AerieError as error:
    print(json.dumps({"refused": str(error)}))
"""


@dataclass(frozen=True)
class Distribution:
    """What is other on a bare host of another distribution; NVIDIA splits and names its driver by the distribution's customs."""

    kernel: str
    repository: str
    revision: str
    module: str
    library: str

    def chosen(self, versions: dict[str, str]) -> dict[str, str]:
        """The same with the driver as this distribution's repository has it."""
        return versions | {"driver": f"{versions['driver'].partition('-')[0]}-{self.revision}"}


DISTRIBUTIONS = {
    "debian": Distribution(repository.KERNEL, "cuda/", "1", "nvidia-kernel-open-dkms", "libcuda1"),
    "ubuntu": Distribution(scenarios.UBUNTU_KERNEL, "ubuntu2404/", "1ubuntu1", "nvidia-dkms-580-open", "libnvidia-compute-580"),
}
on_each = pytest.mark.parametrize("system", DISTRIBUTIONS)


@dataclass(frozen=True)
class Site:
    """Three hosts, the repositories that they install from, and how to work on them."""

    fleet: BootedHosts
    bare: Host
    ubuntu: Host
    container: Host
    url: str
    keys: dict[str, str]
    directory: Path

    @property
    def hosts(self) -> dict[str, Host]:
        """The bare hosts by their distribution."""
        return {"debian": self.bare, "ubuntu": self.ubuntu}

    def on(self, host: Host, command: str, *, check: bool = True) -> str:
        done = self.fleet.ssh(host, command)
        assert not check or done.returncode == 0, f"{host.name}: {command}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def python(self, host: Host, program: str, *arguments: str) -> Any:
        argv = ["ssh", "-F", str(self.fleet.ssh_config), host.address, "python3", "-", *(f"'{argument}'" for argument in arguments)]
        done = subprocess.run(argv, input=program, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def tree(self, host: Host) -> dict[str, str]:
        tree: dict[str, str] = self.python(host, TREE)
        return tree

    def versions(self, host: Host) -> dict[str, str]:
        text = self.on(host, "dpkg-query --show --showformat '${db:Status-Abbrev} ${Package} ${Version}\\n'")
        return {name: version for state, name, version in (line.split() for line in text.splitlines()) if state[1] == "i"}

    def held(self, host: Host) -> set[str]:
        return set(self.on(host, "apt-mark showhold").split())

    def plan(self, host: Host, **asked: Any) -> dict[str, Any]:
        """What the core plans on a host, or why it refuses; nothing is done without `apply`."""
        url = f"{self.url}{'cuda/' if host == self.bare else 'ubuntu2404/'}"
        repository_there = {"url": url, "key_url": f"{url}fake-cuda.asc", "fingerprints": [self.keys["cuda"]]}
        answer: dict[str, Any] = self.python(host, CORE, json.dumps({"repositories": {}} | repository_there | asked))
        return answer

    def answer(self, host: Host) -> dict[str, Any]:
        """What the role registered in the last run."""
        answer: dict[str, Any] = json.loads((self.directory / f"answers/{host.name}.json").read_text())
        return answer


@pytest.fixture(scope="module")
def site(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    fleet, hosts = pool.fleet, pool.take(3)
    directory = tmp_path_factory.mktemp("cuda")
    (directory / "answers").mkdir()
    keys = repository.make(directory / "repository")
    server = repository.server(directory / "repository")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = Site(fleet, *hosts, f"http://{repository.CONTROLLER}:{server.server_port}/", keys, directory)
    key = (directory / "repository/system/fake-system.asc").read_text()
    core = BytesIO()
    with tarfile.open(fileobj=core, mode="w") as archive:
        archive.add(
            PROJECT / "module_utils/aerie", "ansible/module_utils/aerie", filter=lambda item: None if "__pycache__" in item.name else item
        )
    for host, scenario in ((site.bare, "workstation"), (site.ubuntu, "ubuntu"), (site.container, "container")):
        fake_host.prepare(fleet.ssh_config, host.address, site.url, key, scenarios.named(scenario))
        argv = ["ssh", "-F", str(fleet.ssh_config), host.address, "mkdir -p /run/aerie-core && tar -x --no-same-owner -C /run/aerie-core"]
        subprocess.run(argv, input=core.getvalue(), check=True, timeout=60)
    site.on(site.bare, "modprobe -r nvidia; apt-get -qq --allow-downgrades install --yes fake-bystander=1.0")
    site.on(site.ubuntu, "modprobe -r nvidia")
    for host in (site.ubuntu, site.container):
        text = 'ID=ubuntu\\nVERSION_ID="24.04"\\nPRETTY_NAME="Ubuntu 24.04 LTS"\\n'
        site.on(host, f"rm /etc/os-release && printf '{text}' > /etc/os-release")
    yield site
    for host in hosts:
        site.on(host, "rm -rf /etc/fake-host")
        site.plan(host, absent=True, apply=True)
    for host in site.hosts.values():
        site.on(host, "modprobe -r nvidia")
    for host in (site.ubuntu, site.container):
        site.on(host, "rm /etc/os-release && ln -s ../usr/lib/os-release /etc/os-release")
    server.shutdown()


@pytest.fixture(scope="module")
def run(site: Site) -> Callable[..., Run]:
    """Run the role on the hosts with variables over the inventory's. The Ubuntus' repository is known by its distribution only."""
    cuda, ubuntu = f"{site.url}cuda/", f"{site.url}ubuntu2404/"
    wanted = {
        "nvidia_cuda_toolkit_version": OLD["toolkit"],
        "nvidia_cuda_nccl_version": OLD["nccl"],
    }
    ours = {
        "nvidia_cuda_driver_version": OLD["driver"],
        "nvidia_cuda_repository_url": cuda,
        "nvidia_cuda_repository_key_url": f"{cuda}fake-cuda.asc",
        "nvidia_cuda_repository_key_fingerprint": site.keys["cuda"],
    }
    known = {"ubuntu2404": {"url": ubuntu, "key_url": f"{ubuntu}fake-cuda.asc", "key_fingerprints": [site.keys["cuda"]]}}
    hosts = {
        site.bare.name: {"ansible_host": site.bare.address, "ansible_user": "root", **ours},
        **{
            host.name: {
                "ansible_host": host.address,
                "ansible_user": "ops",
                "ansible_become": True,
                "nvidia_cuda_driver_version": DISTRIBUTIONS["ubuntu"].chosen(OLD)["driver"],
                "nvidia_cuda_repositories": known,
            }
            for host in (site.ubuntu, site.container)
        },
    }
    variables = {
        "aerie_root": ROOT,
        "aerie_profile": "cuda",
        "aerie_results": str(site.directory / "results"),
        "answers": str(site.directory / "answers"),
        "ansible_ssh_common_args": f"-F '{site.fleet.ssh_config}'",
        "sglang_server_instances": {},
        "sglang_server_arms": {},
        **wanted,
    }
    inventory = site.directory / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts, "vars": variables}}))
    play = site.directory / "cuda.yml"
    play.write_text(PLAY)
    return partial(playbook, "-i", inventory, play, scratch=site.directory)


@pytest.fixture(scope="module")
def bare_trees(site: Site) -> dict[str, dict[str, str]]:
    return {system: site.tree(host) for system, host in site.hosts.items()}


@pytest.fixture(scope="module")
def bare_tree(bare_trees: dict[str, dict[str, str]]) -> dict[str, str]:
    return bare_trees["debian"]


@pytest.fixture(scope="module")
def bare_versions(site: Site) -> dict[str, dict[str, str]]:
    return {system: site.versions(host) for system, host in site.hosts.items()}


@pytest.fixture(scope="module")
def foretold(run, site, bare_trees) -> dict[str, dict[str, Any]]:
    """What a check of the bare hosts foretells."""
    run("--check", "--diff").require_success()
    return {host.name: site.answer(host) for host in (*site.hosts.values(), site.container)}


@pytest.fixture(scope="module")
def installed(run, site, foretold, bare_versions) -> Run:
    return run().require_success()


@pytest.fixture(scope="module")
def upgraded(run, site, installed) -> Run:
    for host in site.hosts.values():
        site.on(host, "modprobe nvidia")  # the old driver runs
    variables = {
        "nvidia_cuda_driver_version": "580.105",
        "nvidia_cuda_toolkit_version": NEW["toolkit"],
        "nvidia_cuda_nccl_version": NEW["nccl"],
    }
    return run(variables=variables).require_success()


@pytest.fixture(scope="module")
def reverted(run, site, upgraded) -> dict[str, tuple[set[str], set[str]]]:
    """By distribution, the packages that were to go as a plan foretold, and all that were there; then they were taken away."""
    told = {}
    for system, host in site.hosts.items():
        gone = {move["name"] for move in site.plan(host, absent=True)["moves"] if move["after"] is None}
        told[system] = gone, set(site.versions(host))
    run(variables={"nvidia_cuda_state": "absent"}).require_success()
    return told


def chosen(versions: dict[str, str]) -> dict[str, str | None]:
    return {"driver": versions.get("nvidia-open"), "toolkit": versions.get("cuda-toolkit-13-0"), "nccl": versions.get("libnccl2")}


# -- a bare host


@on_each
def test_a_check_of_a_bare_host_foretells_every_package_and_writes_nothing(system, foretold, site, bare_trees):
    host, its = site.hosts[system], DISTRIBUTIONS[system]
    moves = {move["name"]: move["after"] for move in foretold[host.name]["moves"]}
    assert chosen(moves) == its.chosen(OLD)
    assert {"cuda-nvcc-13-0", its.module, its.library, repository.headers_of(its.kernel)} <= set(moves)
    assert foretold[host.name]["complete"] is True
    assert site.tree(host) == bare_trees[system]


def test_a_check_without_the_repository_foretells_what_it_can(site, bare_tree):
    answer = site.plan(site.bare, check=True, url="http://198.51.100.1:9/", key_url="http://198.51.100.1:9/key.asc", driver_version="580")
    assert answer["complete"] is False
    assert {"name": "nvidia-open", "before": None, "after": "580"} in answer["moves"]
    assert "can't fetch the repository's key" in answer["warnings"][0]


def test_a_key_with_another_fingerprint_is_refused_before_anything_is_written(site, bare_tree):
    refused = site.plan(site.bare, key_url=f"{site.url}other.asc")["refused"]
    assert site.keys["other"] in refused and site.keys["cuda"] in refused and "nothing was changed" in refused
    assert site.tree(site.bare) == bare_tree


def test_a_repository_that_the_pinned_key_did_not_sign_is_refused(site, bare_tree):
    refused = site.plan(site.bare, key_url=f"{site.url}other.asc", fingerprints=[site.keys["other"]])["refused"]
    assert "apt can't use this repository; nothing was changed" in refused and "NO_PUBKEY" in refused
    assert site.tree(site.bare) == bare_tree


def test_a_version_that_nobody_offers_is_refused_with_those_that_are(site, bare_tree):
    refused = site.plan(site.bare, driver_version="570")["refused"]
    assert "nvidia-open 570" in refused and NEW["driver"] in refused


# -- installation


@on_each
def test_what_is_installed_is_what_was_foretold(system, installed, foretold, site, bare_versions):
    host = site.hosts[system]
    after = site.versions(host)
    moved = {name: version for name, version in after.items() if bare_versions[system].get(name) != version}
    assert moved == {move["name"]: move["after"] for move in foretold[host.name]["moves"]}
    assert chosen(after) == DISTRIBUTIONS[system].chosen(OLD)


@on_each
def test_the_repositorys_key_and_pins_are_in_place(system, installed, site):
    host, its = site.hosts[system], DISTRIBUTIONS[system]
    assert f"URIs: {site.url}{its.repository}" in site.on(host, f"cat {OUR_FILES[0]}")
    policy = site.on(host, "apt-cache policy nvidia-open cuda-toolkit-13-0")
    assert f"Candidate: {its.chosen(OLD)['driver']}" in policy and f"Candidate: {OLD['toolkit']}" in policy


@on_each
def test_the_driver_is_built_for_the_running_kernel_and_the_persistence_daemon_enabled(system, installed, site):
    host = site.hosts[system]
    assert (
        site.on(host, "ls /var/lib/dkms/nvidia/580.95.05")
        == DISTRIBUTIONS[system].kernel
        == site.on(host, "cat /proc/sys/kernel/osrelease")
    )
    assert site.on(host, "systemctl is-enabled nvidia-persistenced") == "enabled"


@on_each
def test_a_driver_that_is_not_loaded_yet_asks_for_a_boot(system, installed, site):
    answer = site.answer(site.hosts[system])
    assert (answer["reboot_required"], answer["driver"]["loaded"], answer["driver"]["installed"]) == (True, None, "580.95.05")


def test_a_second_run_changes_nothing_with_few_calls(installed, site, run):
    again = run().require_success()
    assert [numbers["changed"] for numbers in again.stats.values()] == [0, 0, 0]
    for host in (site.bare.name, site.ubuntu.name, site.container.name):
        assert again.calls[host].count("nvidia_packages") == 1
        assert len(again.calls[host]) <= MODULE_CALLS, again.calls[host]


# -- upgrade, downgrade, holds


@on_each
def test_an_upgrade_moves_all_pieces_together(system, upgraded, site, bare_versions):
    host, its = site.hosts[system], DISTRIBUTIONS[system]
    after = site.versions(host)
    assert chosen(after) == its.chosen(NEW)
    pieces = {name: version for name, version in after.items() if name.startswith(("nvidia", "libnvidia", "libcuda"))}
    assert {its.module, its.library, "nvidia-persistenced"} <= set(pieces)
    assert {version.partition("-")[0] for version in pieces.values()} == {"580.105.08"}
    assert set(pieces) <= site.held(host)
    assert after.get("fake-bystander") == bare_versions[system].get("fake-bystander")
    reason = site.answer(host)["reboot_reason"]
    assert reason == "the NVIDIA driver 580.105.08 is installed, and 580.95.05 is loaded"


def test_a_distributions_own_build_of_the_driver_is_not_mixed_in(upgraded, site):
    """Ubuntu has libnvidia-compute-580 too: the version that is installed in a revision of its own, and a newer one."""
    offered = site.on(site.ubuntu, "apt-cache madison libnvidia-compute-580")
    assert "580.178.04-0ubuntu0.24.04.1" in offered and "580.95.05-0ubuntu0.24.04.1" in offered
    assert site.versions(site.ubuntu)["libnvidia-compute-580"] == "580.105.08-0ubuntu1"
    assert "Inst " not in site.on(site.ubuntu, "apt-get --simulate dist-upgrade")


def test_a_downgrade_is_refused_unless_allowed(upgraded, site):
    refused = site.plan(site.bare, driver_version=OLD["driver"])["refused"]
    assert f"nvidia-open {NEW['driver']} -> {OLD['driver']}: this is a downgrade; nvidia_cuda_allow_downgrade: true allows it" in refused
    allowed = site.plan(site.bare, driver_version=OLD["driver"], allow_downgrade=True)
    assert {move["name"]: move["after"] for move in allowed["moves"]}["libcuda1"] == OLD["driver"]


def test_a_version_that_would_take_other_packages_along_is_refused(upgraded, site):
    refused = site.plan(site.bare, driver_version="590")["refused"]
    assert "fake-bystander 1.0 -> 2.0" in refused and "nvidia_cuda_may_move" in refused
    allowed = site.plan(site.bare, driver_version="590", may_move=["fake-bystander"])
    assert {move["name"]: move["after"] for move in allowed["moves"]}["fake-bystander"] == "2.0"


def test_an_upgrade_of_the_host_leaves_what_is_held(upgraded, site):
    before = site.versions(site.bare)
    site.on(site.bare, "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq --yes upgrade")
    after = site.versions(site.bare)
    assert {name for name in after if after[name] != before.get(name)} == {"fake-bystander"}
    assert {"nvidia-open", "libcuda1", "cuda-nvcc-13-0", "libnccl2"} <= site.held(site.bare)


def test_holds_hold_without_the_pins_too(upgraded, site):
    site.on(site.bare, f"mv {OUR_FILES[2]} /run/pins")
    try:
        assert "Inst " not in site.on(site.bare, "apt-get --simulate upgrade")
    finally:
        site.on(site.bare, f"mv /run/pins {OUR_FILES[2]}")


# -- repair


def test_a_half_installed_package_is_repaired(upgraded, site, run):
    fail = "mkdir -p /etc/fake-host && echo cuda-nvcc-13-0 > /etc/fake-host/fail"
    site.on(site.bare, f"{fail}; apt-get -qq --yes --allow-change-held-packages install --reinstall cuda-nvcc-13-0", check=False)
    assert "cuda-nvcc-13-0" not in site.versions(site.bare)
    foretold = site.plan(site.bare, check=True)
    assert foretold["changed"] and foretold["repaired"] == {"cuda-nvcc-13-0": "half-configured"}
    refused = site.plan(site.bare, apply=True)["refused"]
    assert "cuda-nvcc-13-0: fails as /etc/fake-host/fail says" in refused
    site.on(site.bare, "rm -r /etc/fake-host")
    run("--limit", site.bare.name, variables={f"nvidia_cuda_{name}_version": None for name in chosen({})}).require_success()
    assert chosen(site.versions(site.bare)) == NEW
    assert site.answer(site.bare)["repaired"] == {"cuda-nvcc-13-0": "half-configured"}
    assert "cuda-nvcc-13-0" in site.held(site.bare)


# -- a container, of another distribution


def test_a_container_gets_no_kernel_module_headers_or_daemon(upgraded, foretold, site):
    after = site.versions(site.container)
    assert {name for name in after if name.startswith(("nvidia", "libcuda", "libnvidia", "linux-headers"))} == set()
    assert (after["cuda-toolkit-13-0"], after["libnccl2"]) == (NEW["toolkit"], NEW["nccl"])
    answer = site.answer(site.container)
    assert answer["driver"] == {"managed": False, "loaded": "580.105.08", "installed": None}
    assert answer["reboot_required"] is False
    assert foretold[site.container.name]["complete"] is True


def test_a_containers_user_space_is_checked_against_the_loaded_driver(upgraded, site):
    assert "refused" not in site.plan(site.container, manage_driver=False)
    version = "/proc/driver/nvidia/version"
    site.on(site.container, f"sed -i s/580.105.08/570.86.10/ {version}")
    try:
        refused = site.plan(site.container, manage_driver=False)["refused"]
        assert "CUDA 13.0 needs the NVIDIA driver 580.65.06 or later, and 570.86.10 is loaded" in refused
    finally:
        site.on(site.container, f"sed -i s/570.86.10/580.105.08/ {version}")


# -- and away


@on_each
def test_a_revert_leaves_no_trace(system, reverted, site, bare_trees, bare_versions):
    host, (gone, before) = site.hosts[system], reverted[system]
    assert gone == before - set(bare_versions[system])
    if host == site.bare:  # an earlier test upgraded the host
        assert site.versions(host)["fake-bystander"] == "2.0"
        site.on(host, "apt-get -qq --yes --allow-downgrades install fake-bystander=1.0")
    assert site.versions(host) == bare_versions[system]
    assert site.held(host) == set()
    assert site.tree(host) == bare_trees[system]
    assert site.plan(host, absent=True)["changed"] is False


# -- hosts that somebody worked on before


def test_a_package_that_was_unpacked_without_what_it_needs_is_repaired(site, bare_tree):
    fetch = f"import urllib.request as u; u.urlretrieve('{site.url}cuda/pool/cuda-toolkit-13-0_13.0.2-1_amd64.deb', '/run/toolkit.deb')"
    site.on(site.bare, f'python3 -c "{fetch}"; dpkg --install /run/toolkit.deb', check=False)
    assert "cuda-toolkit-13-0" not in site.versions(site.bare)
    done = site.plan(site.bare, driver_version="580", apply=True)
    assert done["repaired"] == {"cuda-toolkit-13-0": "unpacked, not configured"}
    assert {"cuda-toolkit-13-0", "cuda-nvcc-13-0", "nvidia-open"} <= set(site.versions(site.bare))
    again = site.plan(site.bare, driver_version="580")
    assert again["changed"] is False, (again["units"], again["held"], again["complete"], again["diff"])
    site.plan(site.bare, absent=True, apply=True)
    assert site.tree(site.bare) == bare_tree


def test_a_source_that_names_the_repository_already_is_used_if_its_key_is_the_pinned_one(site):
    source, keyring = "/etc/apt/sources.list.d/cuda-debian12.list", "/usr/share/keyrings/cuda.asc"
    fetch = f"import urllib.request as u; u.urlretrieve('{site.url}cuda/fake-cuda.asc', '{keyring}')"
    site.on(site.bare, f"python3 -c \"{fetch}\"; echo 'deb [signed-by={keyring}] {site.url}cuda/ /' > {source}")
    try:
        refused = site.plan(site.bare, fingerprints=[site.keys["other"]])["refused"]
        assert f"{source} already names {site.url}cuda/, signed by {keyring} ({site.keys['cuda']})" in refused
        assert site.plan(site.bare, driver_version="580", apply=True)["changed"] is True
        assert "nvidia-cuda.sources" not in site.on(site.bare, "ls /etc/apt/sources.list.d")
        assert "libcuda1" in site.held(site.bare)
        assert site.plan(site.bare)["changed"] is False
    finally:
        site.plan(site.bare, absent=True, apply=True)
        site.on(site.bare, f"rm {source} {keyring}")
