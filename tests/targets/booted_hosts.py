#!/usr/bin/env python3
"""Boot Debian hosts with systemd and a real sshd on this machine, without containers, images to download or hypervisors.

    booted_hosts.py up [N]          boot gpu1 … gpuN (default 2); what an earlier run left is removed first
    booted_hosts.py status          say which hosts run
    booted_hosts.py ssh gpu1 [CMD]  log in, or run a command
    booted_hosts.py run CMD…        run a command in the hosts' network, such as ansible-playbook
    booted_hosts.py down            power off and leave nothing behind

A host is `systemd-nspawn --boot` on an overlay over one shared root file system (made once by mmdebstrap), with a network name
space and a control group of its own. Hosts have addresses 198.51.100.11, .12, … (TEST-NET-2) on a bridge whose own address is
198.51.100.1; they have no other way out, so what they install is served from there. The bridge has
a network name space of its own, which the controller enters. So the machine's network is left alone,
and each clone of the project can have its hosts, at the same addresses. Needs root and the Debian
packages in `NEEDS`, which it installs where they are missing. Standard library only. `AERIE_TARGETS`
names another directory than the project's .cache/targets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).resolve().parents[2]
NEEDS = {  # command that shows it is there: Debian package
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "ssh": "openssh-client",
    "ip": "iproute2",
}
SUITE = "bookworm"  # its Python is 3.11, which the CPU profile's lock is for
INCLUDE = ("ca-certificates", "dbus", "iproute2", "openssh-server", "python3", "python3-venv", "sudo", "systemd", "systemd-sysv")
NETWORK = ipaddress.ip_network("198.51.100.0/24")
CONTROLLER = str(NETWORK[1])
USER = "ops"  # may become root by sudo without a password; root itself may log in too
CUSTOMIZE = (
    'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
    f'chroot "$1" useradd --create-home --shell /bin/bash {USER}',
    f'echo "{USER} ALL=(ALL) NOPASSWD: ALL" > "$1"/etc/sudoers.d/{USER}',
)
BRIDGE = "aerie0"
CLONE_NEWNET = 0x40000000  # setns(2)
MACHINE = Path("/run/aerie-test-hosts")
"""What the sets of hosts on this machine share: a lock while any is up, and the limit to restore."""
INOTIFY_LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_NEEDED = 1024
"""A host has seven instances, and Linux lets root have 128: too few for two sets. inotify(7)"""
OWN_NETWORK = Path("/proc/thread-self/ns/net")
REBOOTED = 133  # exit status of systemd-nspawn --keep-unit when the host asked to be booted again
BOOT_SECONDS = 240  # two clones may boot nineteen each on two cores
POWEROFF_SECONDS = 20


class HostsError(Exception):
    """What stands in the way of test hosts, and what to do."""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    directory: Path
    namespace: str
    """The name of its network, control groups and machine. No other host here has the same."""

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def console(self) -> Path:
        return self.directory / "console.log"


def run(*argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if check and done.returncode != 0:
        raise HostsError(f"{' '.join(map(str, argv))}: exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done


def control_groups(name: str) -> list[Path]:
    """The host's group in each hierarchy that systemd uses: two where cgroup v1 and v2 are mixed, else one."""
    base = Path("/sys/fs/cgroup")
    mixed = [base / part for part in ("systemd", "unified") if (base / part).is_dir()]
    return [hierarchy / name for hierarchy in mixed or [base]]


_machine_network: int | None = None
"""The network in which this process began, once it has left it."""


def _enter_network(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@contextlib.contextmanager
def _network_restored() -> Iterator[int]:
    """Bring this thread back to its network when the block ends; yield an open descriptor of it."""
    before = os.open(OWN_NETWORK, os.O_RDONLY)
    try:
        yield before
    finally:
        if OWN_NETWORK.stat().st_ino != os.fstat(before).st_ino:
            _enter_network(before)
        os.close(before)


@contextlib.contextmanager
def machine_network() -> Iterator[None]:
    """Let this thread, and what it starts, be in the machine's own network until the block ends."""
    with _network_restored():
        if _machine_network is not None:
            _enter_network(_machine_network)
        yield


def mounts_below(directory: Path) -> list[str]:
    """Mount points in `directory`, deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]) for line in lines]
    return sorted((point for point in points if point.startswith(f"{directory}/")), key=len, reverse=True)


class BootedHosts:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.state = self.directory / "state"
        self.namespace = f"aerie-{hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:8]}"
        self.lock = self.directory / "lock"
        wanted = hashlib.sha256(f"{SUITE} {INCLUDE} {CUSTOMIZE}".encode()).hexdigest()[:12]
        self.base = self.directory / f"base-{SUITE}-{wanted}"
        self.key = self.state / "id"
        self.ssh_config = self.state / "ssh_config"

    def host(self, number: int) -> Host:
        name = f"gpu{number}"
        return Host(name, str(NETWORK[10 + number]), self.state / name, f"{self.namespace}-{name}")

    def hosts(self) -> list[Host]:
        """Hosts of which anything is left in the state directory."""
        numbers = (int(path.name.removeprefix("gpu")) for path in self.state.glob("gpu*"))
        return [self.host(number) for number in sorted(numbers)]

    # -- before the first boot

    def require(self) -> None:
        missing = [package for command, package in NEEDS.items() if shutil.which(command) is None]
        if os.geteuid() != 0:
            also = f" It also needs: apt-get install {' '.join(missing)}." if missing else ""
            raise HostsError(f"Booting test hosts needs root (mounts, name spaces, control groups): run it as root or by sudo.{also}")
        if missing:
            if shutil.which("apt-get") is None:
                raise HostsError(f"Test hosts need {', '.join(missing)} (Debian's package names); install them by this system's own means.")
            print(f"installing {' '.join(missing)}", flush=True)
            apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=600", "-qq")
            run(*apt, "update")
            run(*apt, "install", "--yes", "--no-install-recommends", *missing)

    def make_base(self) -> None:
        if self.base.is_dir():
            return
        candidates = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
        named = os.environ.get("AERIE_TARGETS_SOURCES")
        sources = Path(named) if named else next((path for path in candidates if path.is_file()), None)
        if sources is None:
            raise HostsError(f"No apt sources of Debian {SUITE} here: name a sources file in AERIE_TARGETS_SOURCES.")
        partial = self.base.with_name(f"{self.base.name}.partial")
        for outdated in self.directory.glob("base-*"):
            shutil.rmtree(outdated)
        self.directory.mkdir(parents=True, exist_ok=True)
        print(f"making the hosts' root file system in {self.base} (once, about a minute)", flush=True)
        hooks = [f"--customize-hook={hook}" for hook in CUSTOMIZE]
        options = ("--quiet", "--variant=minbase", "--format=directory", f"--include={','.join(INCLUDE)}")
        run("mmdebstrap", *options, *hooks, SUITE, partial, sources)
        partial.rename(self.base)

    # -- up

    def up(self, count: int, owner: int | None = None) -> list[Host]:
        """Boot `count` hosts and wait for their sshd. With `owner`, they power off when that process ends, however it ends."""
        self.require()
        self.make_base()
        locks = [self._take_lock(), self._raise_limit()]
        try:
            self._remove_leftovers()
            self._write_ssh_files()
            self._make_network()
            hosts = [self.host(number) for number in range(1, count + 1)]
            for host in hosts:
                self._prepare(host)
                self._boot(host, locks, owner)
            with self.network():
                for host in hosts:
                    self._wait_for_sshd(host)
        except BaseException:
            self._remove_leftovers()
            raise
        finally:
            for lock in locks:
                lock.close()  # the keepers hold it on
            self._restore_limit()
        return hosts

    def _take_lock(self) -> IO[str]:
        """One set of hosts a directory. An earlier set is powered off first."""
        lock = self.lock.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._remove_leftovers()
            fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def _raise_limit(self) -> IO[str]:
        """Allow as many inotify instances as two sets need. The lock returned keeps it so."""
        MACHINE.mkdir(exist_ok=True)
        lock = (MACHINE / "lock").open("a+")
        fcntl.flock(lock, fcntl.LOCK_SH)
        before = INOTIFY_LIMIT.read_text()
        # In a container the setting may be read-only.
        with contextlib.suppress(OSError):
            if int(before) < INOTIFY_NEEDED:
                INOTIFY_LIMIT.write_text(str(INOTIFY_NEEDED))
                (MACHINE / "inotify").write_text(before)
        return lock

    def _restore_limit(self) -> None:
        """Restore the machine's limit, unless hosts are up, of this set or another."""
        with contextlib.suppress(FileNotFoundError, BlockingIOError), (MACHINE / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            before = (MACHINE / "inotify").read_text()
            INOTIFY_LIMIT.write_text(before)
            (MACHINE / "inotify").unlink()

    def _write_ssh_files(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        if not self.key.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key, "-C", "aerie test hosts")
        known = self.state / "known_hosts"
        host_key = (self.base / "etc/ssh/ssh_host_ed25519_key.pub").read_text().split()[:2]
        known.write_text(f"{CONTROLLER.rpartition('.')[0]}.* {' '.join(host_key)}\n")
        self.ssh_config.write_text(
            f'Host {CONTROLLER.rpartition(".")[0]}.*\n  User root\n  IdentityFile "{self.key}"\n  IdentitiesOnly yes\n'
            f'  UserKnownHostsFile "{known}"\n  StrictHostKeyChecking yes\n  HostKeyAlgorithms ssh-ed25519\n  LogLevel ERROR\n'
        )

    def _make_network(self) -> None:
        run("ip", "netns", "add", self.namespace)
        ip = ("ip", "-n", self.namespace)
        run(*ip, "link", "set", "lo", "up")
        run(*ip, "link", "add", BRIDGE, "type", "bridge")
        run(*ip, "address", "add", f"{CONTROLLER}/{NETWORK.prefixlen}", "dev", BRIDGE)
        run(*ip, "link", "set", BRIDGE, "up")

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Let this thread, and what it starts, be the controller in the hosts' network.

        That lasts until the block ends. Nothing else can be reached from there.
        """
        global _machine_network
        with _network_restored() as before:
            if _machine_network is None:
                _machine_network = os.dup(before)
            namespace = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
            try:
                _enter_network(namespace)
            finally:
                os.close(namespace)
            yield

    def _prepare(self, host: Host) -> None:
        for part in ("upper", "work", "root"):
            (host.directory / part).mkdir(parents=True)
        layers = f"lowerdir={self.base},upperdir={host.directory / 'upper'},workdir={host.directory / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", layers, host.root)
        for home in (host.root / "root", host.root / "home" / USER):
            keys = home / ".ssh"
            keys.mkdir(mode=0o700, exist_ok=True)
            shutil.copyfile(f"{self.key}.pub", keys / "authorized_keys")
            for path in (keys, keys / "authorized_keys"):
                os.chown(path, home.stat().st_uid, home.stat().st_gid)
        (host.root / "etc/hostname").write_text(f"{host.name}\n")
        (host.root / "etc/hosts").write_text(f"127.0.0.1 localhost {host.name}\n{CONTROLLER} controller\n")
        # pip takes wheels over plain HTTP only from a place that the host's administrator trusts
        (host.root / "etc/pip.conf").write_text(f"[global]\ntrusted-host = {CONTROLLER}\n")
        for group in control_groups(host.namespace):
            group.mkdir(exist_ok=True)
        run("ip", "netns", "add", host.namespace)
        ip = ("ip", "-n", self.namespace)
        peer = ("peer", "name", "eth0", "netns", host.namespace)
        run(*ip, "link", "add", host.name, "type", "veth", *peer)
        run(*ip, "link", "set", host.name, "master", BRIDGE, "up")
        run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        run("ip", "-n", host.namespace, "address", "add", f"{host.address}/{NETWORK.prefixlen}", "dev", "eth0")
        run("ip", "-n", host.namespace, "link", "set", "eth0", "up")

    def _boot(self, host: Host, locks: list[IO[str]], owner: int | None) -> None:
        argv = [sys.executable, __file__, "keep", host.namespace, str(owner or 0)]
        with host.console.open("w") as console:
            keeper = subprocess.Popen(
                argv,
                env=os.environ | {"AERIE_TARGETS": str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                pass_fds=[lock.fileno() for lock in locks],
            )
        (host.directory / "pid").write_text(f"{keeper.pid}\n")

    def _wait_for_sshd(self, host: Host) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while self.ssh(host, "true").returncode != 0:
            if time.monotonic() > deadline:
                tail = host.console.read_text(errors="replace")[-2000:]
                raise HostsError(f"{host.name} did not answer by SSH in {BOOT_SECONDS} s. Its console ends:\n{tail}")
            time.sleep(0.2)

    def ssh(self, host: Host, *command: str) -> subprocess.CompletedProcess[str]:
        return run("ssh", "-F", self.ssh_config, "-o", "ConnectTimeout=3", host.address, *command, check=False)

    # -- the keeper of one host

    def keep(self, host: Host, owner: int) -> int:
        """Run the host until it powers off; boot it again when it reboots; power it off on SIGTERM or when the owner is gone."""
        for group in control_groups(host.namespace):
            (group / "cgroup.procs").write_text(str(os.getpid()))
        stop = False

        def on_term(*_: object) -> None:
            nonlocal stop
            stop = True

        signal.signal(signal.SIGTERM, on_term)
        status = REBOOTED
        while status == REBOOTED and not stop:
            argv = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"]
            argv += ["--console=pipe", f"--machine={host.namespace}", f"--hostname={host.name}"]
            child = subprocess.Popen([*argv, f"--network-namespace-path=/run/netns/{host.namespace}", "-D", str(host.root)])
            asked = False
            while True:
                try:
                    status = child.wait(timeout=0.3)
                    break
                except subprocess.TimeoutExpired:
                    stop = stop or (owner > 0 and not Path(f"/proc/{owner}").exists())
                if stop and not asked:
                    child.terminate()  # systemd-nspawn turns it into a clean power-off
                    asked = True
        return 0 if stop or status == 0 else 1

    # -- down

    def down(self) -> None:
        if os.geteuid() != 0:
            raise HostsError("Test hosts belong to root: run it as root or by sudo.")
        self._remove_leftovers()
        self._restore_limit()

    def _remove_leftovers(self) -> None:
        hosts = self.hosts()
        for host in hosts:
            self._signal_keeper(host, signal.SIGTERM)
        deadline = time.monotonic() + POWEROFF_SECONDS
        while time.monotonic() < deadline and any(self._keeper(host) for host in hosts):
            time.sleep(0.1)
        for host in hosts:
            self._kill_group(host.namespace)
        for point in mounts_below(self.state):
            run("umount", "--lazy", point)
        for host in hosts:
            shutil.rmtree(host.directory, ignore_errors=False)
        listed = run("ip", "netns", "list", check=False).stdout.split() if shutil.which("ip") else []
        for namespace in listed:
            if namespace == self.namespace or namespace.startswith(f"{self.namespace}-"):
                self._kill_group(namespace)
                run("ip", "netns", "delete", namespace)  # and what is in it

    def _keeper(self, host: Host) -> int | None:
        """Pid of the host's keeper, if it runs."""
        try:
            pid = int((host.directory / "pid").read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        return pid if b"keep" in words and host.namespace.encode() in words else None

    def _signal_keeper(self, host: Host, number: signal.Signals) -> None:
        pid = self._keeper(host)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill_group(self, name: str) -> None:
        """Whatever still runs in the host's control groups, then the groups."""
        for group in control_groups(name):
            if not group.is_dir():
                continue
            for _ in range(100):
                pids = {int(pid) for procs in group.rglob("cgroup.procs") for pid in self._pids(procs)}
                if not pids:
                    break
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            for below in sorted((path for path in group.rglob("*") if path.is_dir()), key=lambda path: len(path.parts), reverse=True):
                below.rmdir()
            group.rmdir()

    @staticmethod
    def _pids(procs: Path) -> list[str]:
        try:
            return procs.read_text().split()
        except OSError:  # the group went away meanwhile
            return []

    def status(self) -> str:
        lines = [f"{host.name}  {host.address}  {'runs' if self._keeper(host) else 'is down'}" for host in self.hosts()]
        return "\n".join(lines) or "no test hosts"


def main(arguments: list[str]) -> int:
    fleet = BootedHosts(Path(os.environ.get("AERIE_TARGETS", PROJECT / ".cache/targets")))
    match arguments:
        case ["up"] | ["up", _]:
            fleet.up(int(arguments[1]) if len(arguments) > 1 else 2)
            print(fleet.status())
        case ["down"]:
            fleet.down()
        case ["status"]:
            print(fleet.status())
        case ["ssh", name, *command]:
            host = fleet.host(int(name.removeprefix("gpu")))
            with fleet.network():
                os.execvp("ssh", ["ssh", "-F", str(fleet.ssh_config), host.address, *command])
        case ["run", program, *rest]:
            with fleet.network():
                os.execvp(program, [program, *rest])
        case ["keep", namespace, owner]:
            return fleet.keep(fleet.host(int(namespace.rpartition("gpu")[2])), int(owner))
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HostsError as error:
        sys.exit(f"booted_hosts: {error}")
