"""Models from another host over SSH, by rsync. Standard library only: this runs on hosts.

The host that fetches logs in to the source with a key that it has (``identity_file``) or by an agent that was forwarded; no key is
copied. Files grow in place, so that whatever was received when a run was killed is used by the next one.
Sources: rsync(1) for options and exit statuses, ssh(1), sha256sum(1).
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.releases import model_identity
from ansible.module_utils.aerie.releases.model_catalog import Place
from ansible.module_utils.aerie.releases.model_fetch import Remote, SourceError, Wanted, run_child
from ansible.module_utils.aerie.words import listing, tail

INSTALL = "install it (Debian and Ubuntu: apt-get install rsync)"
CONNECT_SECONDS = 10
STALLED_SECONDS = 60
ALIAS = "aerie-model-source"
NO_DIRECTORY, NO_RSYNC = 66, 67
SSH_FAILED = 255
# Exit statuses of rsync after which the same call may succeed: protocol and socket errors, interruptions, time-outs, SSH's own.
PASSING = (10, 12, 20, 23, 24, 30, 35, SSH_FAILED)
SUM_FILES = ("SHA256SUMS", "SHA256SUM", "sha256sums.txt", "*.sha256")
_SUM = re.compile(r"^([0-9a-f]{64})[ \t]+\*?(?:\./)?([^/\n]+)$", re.MULTILINE)
_RECEIVED = re.compile(r"^Total bytes received: ([\d,.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Address:
    """How a source is reached: by name from here, or by a port of this host that the controller's connection leads on from."""

    host: str
    user: str | None = None
    port: int | None = None
    tunnel: int | None = None

    @property
    def login(self) -> str:
        return f"{self.user}@{self.host}" if self.user else self.host


@dataclass(frozen=True)
class Rsync:
    """One model's source."""

    address: Address
    path: str
    identity_file: str | None = None
    host_key: str | None = None
    bandwidth_mib: float | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any], address: Mapping[str, Any] | None, bandwidth_mib: float | None) -> Rsync:
        """Return the source that a catalog's entry names; ``address`` is what the inventory says of a host of its own."""
        place = Place.of(entry["from"])
        assert place is not None
        given = dict(address or {})
        where = Address(
            given.get("host") or place.host, place.user or given.get("user"), entry.get("port") or given.get("port"), given.get("tunnel")
        )
        return cls(where, place.path, entry.get("identity_file"), entry.get("host_key"), bandwidth_mib)

    def unreachable(self) -> tuple[str, int] | None:
        """Return the name and port that nothing answers at from here, or None when the source can be reached."""
        if self.address.tunnel:
            return None
        asked = ["ssh", "-G", *(["-p", str(self.address.port)] if self.address.port else []), self.address.login]
        answer = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        found = dict(line.split(" ", 1) for line in answer.stdout.splitlines() if " " in line)
        if found.get("proxyjump", "none") != "none" or found.get("proxycommand", "none") != "none":
            return None  # SSH has a way of its own
        host, port = found.get("hostname", self.address.host), int(found.get("port", self.address.port or 22))
        try:
            socket.create_connection((host, port), CONNECT_SECONDS / 2).close()
        except OSError:
            return host, port
        return None

    def wanted(self, name: str, entry: Mapping[str, Any], directory: Path) -> Wanted:
        """Ask the source what it has; raise when that can't be had."""
        require()
        script = (
            f"cd -- {shlex.quote(self.path)} || exit {NO_DIRECTORY}; command -v rsync >/dev/null || exit {NO_RSYNC}; "
            "find -L . -maxdepth 1 -type f -printf '%s %T@ %f\\0'; printf '\\0'; cat config.json 2>/dev/null; printf '\\0\\0'; "
            f'for one in {" ".join(SUM_FILES)}; do cat -- "$one" 2>/dev/null; done; true'
        )
        found, config, sums = (*self._ask(script).split(b"\0\0", 2), b"", b"")[:3]
        listed = {match[2]: match[1] for match in _SUM.finditer(sums.decode(errors="replace"))}
        remotes = []
        for row in filter(None, found.split(b"\0")):
            size, modified, file = row.decode(errors="surrogateescape").split(" ", 2)
            if Path(file).suffix in model_identity.SUFFIXES and not file.startswith("."):
                if not re.fullmatch(r"[^\\\r\n]+", file):
                    raise AerieError(
                        f"{self.address.login}:{self.path} has a file with the name {file!r}, which can't be fetched: rename it"
                    )
                seconds, _, rest = modified.partition(".")
                stamp = int(seconds) * 10**9 + int(rest[:9].ljust(9, "0") or 0)
                remotes.append(Remote(file, int(size), f"sha256:{listed[file]}" if file in listed else None, stamp))
        try:
            value = json.loads(config or b"{}")
        except ValueError as error:
            raise AerieError(f"{self.address.login}:{self.path}/config.json can't be read as JSON: {error}") from error
        origin = {"source": "rsync", "from": entry["from"]}
        files = tuple(sorted(remotes, key=lambda file: file.name))
        return Wanted(name, directory, origin, files, value, entry.get("weights", True), entry.get("identity"))

    def pull(self, folder: Path, files: Sequence[Remote], tick: Callable[[], None]) -> int:
        if not files:
            return 0
        limit = [f"--bwlimit={max(round(self.bandwidth_mib * 1024), 1)}"] if self.bandwidth_mib else []
        with self._ssh() as ssh, tempfile.TemporaryDirectory(prefix="aerie-rsync-") as scratch:
            argv = [
                "rsync",
                "--times",
                "--copy-links",
                "--inplace",
                "--partial",
                "--protect-args",
                "--stats",
                f"--timeout={STALLED_SECONDS}",
            ]
            argv += [*limit, "--files-from=-", "--from0", "--rsh", shlex.join(ssh)]
            host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
            login = f"{self.address.user}@{host}" if self.address.user else host
            output = Path(scratch) / "output"
            names = b"".join(file.name.encode(errors="surrogateescape") + b"\0" for file in files)
            status = run_child([*argv, f"{login}:{self.path}/", f"{folder}/"], tick, output=output, given=names)
            said = output.read_text(errors="replace")
        if status:
            raise SourceError(self._failure(status, said, "rsync"), again=status in PASSING and not _denied(said))
        received = _RECEIVED.search(said)
        return int(re.sub(r"\D", "", received[1])) if received else 0

    def digests(self, files: Sequence[Remote], tick: Callable[[], None]) -> Mapping[str, str]:
        names = [file.name for file in files if not file.digest]
        known = {file.name: file.digest for file in files if file.digest}
        if not names:
            return known
        with self._ssh() as ssh, tempfile.TemporaryDirectory(prefix="aerie-rsync-") as scratch:
            output = Path(scratch) / "output"
            script = f"cd -- {shlex.quote(self.path)} && xargs -0 -n 1 -P 4 nice sha256sum -b --"
            given = b"".join(name.encode(errors="surrogateescape") + b"\0" for name in names)
            status = run_child([*ssh, self.address.login, script], tick, output=output, given=given)
            said = output.read_text(errors="surrogateescape")
        if status:
            raise AerieError(self._failure(status, said, "sha256sum"))
        known |= {found[2]: f"sha256:{found[1]}" for found in _SUM.finditer(said)}
        if missing := [name for name in names if name not in known]:
            raise AerieError(f"{self.address.login}:{self.path}: the source told no hash of {listing(missing)}:\n{tail(said, 5)}")
        return known

    @contextlib.contextmanager
    def _ssh(self) -> Iterator[list[str]]:
        """Yield the SSH command with its options; the name of the host follows."""
        address = self.address
        argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "StrictHostKeyChecking=yes"]
        argv += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
        if self.identity_file:
            argv += ["-i", self.identity_file, "-o", "IdentitiesOnly=yes"]
        if address.tunnel:
            argv += ["-o", "HostName=127.0.0.1", "-p", str(address.tunnel)]
        elif address.port:
            argv += ["-p", str(address.port)]
        with tempfile.TemporaryDirectory(prefix="aerie-rsync-") as folder:
            if self.host_key:
                known = Path(folder) / "known_hosts"
                known.write_text(f"{ALIAS} {self.host_key}\n")
                argv += ["-o", f"HostKeyAlias={ALIAS}", "-o", f"UserKnownHostsFile={known}", "-o", "GlobalKnownHostsFile=/dev/null"]
                argv += ["-o", f"HostKeyAlgorithms={_algorithms(self.host_key)}"]
            elif address.tunnel:
                argv += ["-o", f"HostKeyAlias={f'[{address.host}]:{address.port}' if address.port not in (None, 22) else address.host}"]
            yield argv

    def _ask(self, script: str) -> bytes:
        with self._ssh() as ssh:
            answer = subprocess.run([*ssh, self.address.login, script], capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if answer.returncode:
            raise AerieError(self._failure(answer.returncode, answer.stderr.decode(errors="replace"), "ssh"))
        return answer.stdout

    def _failure(self, status: int, said: str, program: str) -> str:
        where = f"{self.address.login}:{self.path}"
        if status == NO_DIRECTORY and program == "ssh":
            return f"{where}: there is no such directory on that host, or {self.address.user or 'its user'} may not enter it"
        if (status == NO_RSYNC and program == "ssh") or "rsync: command not found" in said or "rsync: not found" in said:
            return f"{self.address.host}, where the model is, has no rsync: {INSTALL}"
        if "Host key verification failed" in said or "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
            return (
                f"{where}: this host does not know that host's key, or another one answers: give the model host_key "
                "(the line in /etc/ssh/ssh_host_ed25519_key.pub there), or add the host to known_hosts here"
            )
        if _denied(said):
            return (
                f"{where}: that host refuses this host's key: give the model identity_file, the path of a private key on this host, "
                "or forward your agent (ansible_ssh_common_args: -o ForwardAgent=yes; it does not reach through ansible_become)"
            )
        return f"{where}: {program} ended with {status}:\n{tail(said, 5)}"


def _denied(said: str) -> bool:
    return "Permission denied (" in said or "Host key verification failed" in said or "Too many authentication failures" in said


def _algorithms(key: str) -> str:
    kind = key.split()[0]
    return "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind


def require() -> None:
    """Raise when this host can't fetch by rsync."""
    for program, cure in (("rsync", INSTALL), ("ssh", "install it (Debian and Ubuntu: apt-get install openssh-client)")):
        if shutil.which(program) is None:
            raise AerieError(f"this host has no {program}, which source rsync needs: {cure}")
