#!/usr/bin/env python3
"""Make a booted host a bare GPU host: fake kernel tools, boot unit and hardware, and no NVIDIA package yet.

    host.py SSH_CONFIG ADDRESS REPOSITORY_URL [SCENARIO [GPUS]]     scenarios: workstation (default) server max-q sick container ubuntu

REPOSITORY_URL is where `repository.py DIR serve` serves DIR. Run again, it puts another scenario on the host. It installs kmod, pciutils,
grub2-common, initramfs-tools and fake-host from the fake distribution's repository, writes /var/lib/fake-host/recording.json and lets the
boot unit do its work; no reboot is needed. Then nvidia-smi and the driver come with NVIDIA's fake packages, /proc/cmdline with
update-grub and a reboot, and every call of a fake tool is a line of /var/lib/fake-host/calls.log. Standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import scenarios
from scenarios import Scenario

TOOLS = ("kmod", "pciutils", "grub2-common", "initramfs-tools", "fake-host")
SETUP = r"""
set -e
install -d -m 755 /etc/apt/keyrings /var/lib/fake-host
cat > /etc/apt/keyrings/fake-system.asc <<'KEY'
{key}KEY
cat > /etc/apt/sources.list.d/fake-system.sources <<'SOURCES'
Types: deb
URIs: {url}system/
Suites: /
Signed-By: /etc/apt/keyrings/fake-system.asc
SOURCES
cat > /var/lib/fake-host/recording.json <<'RECORDING'
{recording}
RECORDING
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o Acquire::http::Timeout=10 update
apt-get -qq install --yes --no-install-recommends {tools} > /dev/null
{more}
systemctl restart fake-host.service
"""
# A container gets its driver's tools from the container's host, by no package.
CONTAINER = "[ -e /usr/bin/nvidia-smi ] || ln -s /usr/lib/fake-host/tool.py /usr/bin/nvidia-smi"


def program(url: str, system_key: str, scenario: Scenario) -> str:
    """The shell program that does it, run as root on the host. `url` ends with a slash."""
    recording = json.dumps(scenarios.recording(scenario))
    more = CONTAINER if scenario.container else ""
    return SETUP.format(url=url, key=system_key, recording=recording, tools=" ".join(TOOLS), more=more)


def prepare(ssh_config: Path, address: str, url: str, system_key: str, scenario: Scenario) -> None:
    argv = ["ssh", "-F", str(ssh_config), f"root@{address}", "sh", "-s"]
    done = subprocess.run(argv, input=program(url, system_key, scenario), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{address}: {(done.stderr or done.stdout).strip()[-2000:]}")


def main(arguments: list[str]) -> int:
    if not 3 <= len(arguments) <= 5:
        print(__doc__)
        return 2
    import urllib.request

    config, address, url = Path(arguments[0]), arguments[1], arguments[2].rstrip("/") + "/"
    scenario = scenarios.named(arguments[3] if len(arguments) > 3 else "workstation", int(arguments[4]) if len(arguments) > 4 else None)
    with urllib.request.urlopen(f"{url}system/fake-system.asc", timeout=10) as answer:
        key = answer.read().decode()
    prepare(config, address, url, key, scenario)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
