#!/usr/bin/env python3
"""Make three signed apt repositories of fake packages for test hosts, and give hosts the fakes.

    repository.py DIR              make DIR/cuda and DIR/ubuntu2404 (NVIDIA's, for Debian and for Ubuntu: flat, suite /), DIR/system (the
                                   distribution's), DIR/keys.json
    repository.py DIR serve [PORT] the same, then serve DIR at http://198.51.100.1:PORT/ until stopped (default 8080)

    host.py says how a host becomes a bare GPU host of a scenario.

DIR/keys.json has the fingerprint of each key; the keys are fake-cuda.asc in DIR/cuda and DIR/ubuntu2404 (NVIDIA signs both with one key),
DIR/system/fake-system.asc and DIR/other.asc (which signed nothing). Driver, toolkit and NCCL come in several versions, see PACKAGES. Needs
root only where gpg has to be installed; dpkg-deb and Python do the rest. Standard library only.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path

from scenarios import UBUNTU_KERNEL

HERE = Path(__file__).resolve().parent
CONTROLLER = "198.51.100.1"
KERNEL = os.uname().release  # test hosts run this machine's
TOOL, BOOT = "usr/lib/fake-host/tool.py", "usr/lib/fake-host/boot.py"
FAIL = "/etc/fake-host/fail"  # while it names a package, that package's configuration fails


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    depends: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    conffiles: tuple[str, ...] = ()
    architecture: str = "amd64"


def script(text: str) -> str:
    return f"#!/bin/sh\nset -e\n{text}\n"


def checked(name: str, then: str = "") -> str:
    """A postinst that fails while the test host says so, as one does whose disk was full or whose build failed."""
    return script(f'if grep -qsx {name} {FAIL}; then echo "{name}: fails as {FAIL} says" >&2; exit 1; fi\n{then}')


def tool(name: str) -> dict[str, str]:
    return {name: f"/{TOOL}"}


# A kernel module is built where its source and the kernel's headers are there, whichever came last.
BUILD = r"""
for source in /usr/src/nvidia-[0-9]*; do
  for headers in /usr/src/linux-headers-*; do
    [ -d "$source" ] && [ -e "$headers/.config" ] || continue
    mkdir -p "/var/lib/dkms/nvidia/${source#/usr/src/nvidia-}/${headers#/usr/src/linux-headers-}"
  done
done"""
UNBUILD = "rm -rf /var/lib/dkms/nvidia/{version}; rmdir --ignore-fail-on-non-empty /var/lib/dkms/nvidia /var/lib/dkms 2>/dev/null || true"
SYSTEMD = "[ ! -d /run/systemd/system ] || systemctl daemon-reload"
PERSISTENCED = """[Unit]
Description=NVIDIA Persistence Daemon (fake)

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/nvidia-persistenced --verbose

[Install]
WantedBy=multi-user.target
"""
BOOT_UNIT = """[Unit]
Description=What firmware, kernel and driver do at boot (fake)
DefaultDependencies=no
After=local-fs.target
Before=sysinit.target systemd-sysctl.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/lib/fake-host/boot.py

[Install]
WantedBy=sysinit.target
"""


def driver(version: str, revision: str = "1", **fields: str) -> list[Package]:
    """NVIDIA's open driver as its own repositories split it."""
    full = f"{version}-{revision}"
    same = f"(= {full})"
    return [
        Package("nvidia-open", full, f"nvidia-kernel-open-dkms {same}, nvidia-driver-cuda {same}", fields=dict(fields)),
        Package(
            "nvidia-kernel-open-dkms",
            full,
            f"nvidia-modprobe {same}",
            files={f"usr/src/nvidia-{version}/dkms.conf": f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\n'},
            scripts={"postinst": checked("nvidia-kernel-open-dkms", BUILD), "prerm": script(UNBUILD.format(version=version))},
        ),
        Package(
            "nvidia-driver-cuda",
            full,
            f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-persistenced {same}",
            links=tool("usr/bin/nvidia-smi"),
        ),
        Package(
            "libcuda1", full, files={f"usr/lib/x86_64-linux-gnu/libcuda.so.{version}": "fake\n"}, scripts={"postinst": script("ldconfig")}
        ),
        Package("libnvidia-ml1", full, files={"usr/share/fake-host/driver-version": f"{version}\n"}),
        Package(
            "nvidia-modprobe",
            full,
            files={"etc/modprobe.d/nvidia-modprobe.conf": "# nvidia-modprobe\nalias char-major-195* nvidia\n"},
            conffiles=("/etc/modprobe.d/nvidia-modprobe.conf",),
        ),
        Package(
            "nvidia-persistenced",
            full,
            files={"usr/lib/systemd/system/nvidia-persistenced.service": PERSISTENCED},
            links=tool("usr/bin/nvidia-persistenced"),
            scripts={
                "postinst": script(SYSTEMD),
                "prerm": script(
                    '[ "$1" != remove ] || [ ! -d /run/systemd/system ] || systemctl disable --now --quiet nvidia-persistenced.service'
                ),
            },
        ),
    ]


def ubuntu_driver(version: str) -> list[Package]:
    """The same as NVIDIA's repository for Ubuntu splits it up to branch 580: the branch in the names, loose dependencies, two revisions.

    Source: NVIDIA's driver installation guide, r590, the table of renamed packages.
    """
    branch, at_least = version.partition(".")[0], f"(>= {version})"
    debian = {package.name: package for package in driver(version)}
    library = debian["libcuda1"].files | debian["libnvidia-ml1"].files

    def like(name: str, depends: str = "", called: str = "", revision: str = "0ubuntu1", **more: dict[str, str]) -> Package:
        return replace(debian[name], name=called or name, version=f"{version}-{revision}", depends=depends, **more)

    return [
        like("nvidia-open", f"nvidia-open-{branch} {at_least}", revision="1ubuntu1"),
        like("nvidia-open", f"nvidia-driver-{branch}-open {at_least}", f"nvidia-open-{branch}", "1ubuntu1"),
        like("nvidia-open", f"nvidia-dkms-{branch}-open {at_least}, nvidia-utils-{branch} {at_least}", f"nvidia-driver-{branch}-open"),
        like("nvidia-kernel-open-dkms", "nvidia-modprobe", f"nvidia-dkms-{branch}-open"),
        like("nvidia-driver-cuda", f"libnvidia-compute-{branch} {at_least}", f"nvidia-utils-{branch}"),
        like("libcuda1", "", f"libnvidia-compute-{branch}", files=library),
        like("nvidia-modprobe"),
        like("nvidia-persistenced", revision="1ubuntu1"),
    ]


def toolkit(version: str, component: str) -> list[Package]:
    """CUDA toolkit 13.0: one package that wants the others at their own versions."""
    says = f'"Cuda compilation tools, release 13.0, V{component}"'
    compiler = {
        "usr/local/cuda-13.0/bin/nvcc": f'#!/bin/sh\necho "nvcc: NVIDIA (R) Cuda compiler driver"\necho {says}\n',
        "usr/local/cuda-13.0/bin/ptxas": f'#!/bin/sh\necho "ptxas: NVIDIA (R) Ptx optimizing assembler"\necho {says}\n',
    }
    alternative = "update-alternatives --quiet --install /usr/local/cuda cuda /usr/local/cuda-13.0 130"
    return [
        Package(
            "cuda-toolkit-13-0",
            f"{version}-1",
            f"cuda-nvcc-13-0 (>= {component}), cuda-cudart-13-0 (>= {component}), cuda-toolkit-13-0-config-common",
        ),
        Package("cuda-nvcc-13-0", f"{component}-1", files=compiler, scripts={"postinst": checked("cuda-nvcc-13-0")}),
        Package(
            "cuda-cudart-13-0",
            f"{component}-1",
            files={f"usr/local/cuda-13.0/targets/x86_64-linux/lib/libcudart.so.{component}": "fake\n"},
        ),
        Package(
            "cuda-toolkit-13-0-config-common",
            f"{component}-1",
            files={"etc/ld.so.conf.d/000_cuda.conf": "/usr/local/cuda/targets/x86_64-linux/lib\n"},
            conffiles=("/etc/ld.so.conf.d/000_cuda.conf",),
            scripts={
                "postinst": script(f"{alternative}\nldconfig"),
                "prerm": script('[ "$1" != remove ] || update-alternatives --quiet --remove cuda /usr/local/cuda-13.0'),
            },
            architecture="all",
        ),
    ]


def nccl(version: str) -> list[Package]:
    full, short = f"{version}-1+cuda13.0", ".".join(version.split(".")[:2])
    return [
        Package("libnccl2", full, files={f"usr/lib/x86_64-linux-gnu/libnccl.so.{version}": f"fake {short}\n"}),
        Package("libnccl-dev", full, f"libnccl2 (= {full})", files={"usr/include/nccl.h": f"/* NCCL {version} */\n"}),
    ]


def headers(kernel: str, version: str, common: str = "") -> list[Package]:
    """What a kernel's modules are built with; Ubuntu has a part of it in a package that is `common` to its flavours."""
    files = {f"usr/src/linux-headers-{kernel}/{name}": "# fake\n" for name in (".config", "Makefile")}
    shared = [Package(common, version, files={f"usr/src/{common}/Makefile": "# fake\n"}, architecture="all")] if common else []
    return [Package(headers_of(kernel), version, common, files=files, scripts={"postinst": script(BUILD)}), *shared]


def headers_of(kernel: str) -> str:
    """The package's name, which has no capital letters."""
    return f"linux-headers-{kernel.lower().replace('_', '-')}"


BESIDES = [
    *toolkit("13.0.1", "13.0.88"),
    *toolkit("13.0.2", "13.0.96"),
    *nccl("2.27.7"),
    *nccl("2.28.3"),
    *nccl("2.28.9"),
    Package("cuda-keyring", "1.1-1", architecture="all"),
]
CUDA = [
    *driver("580.95.05"),
    *driver("580.105.08"),
    *driver("590.48.01", Breaks="fake-bystander (<< 2.0)"),  # takes a package that is not NVIDIA's along
    *BESIDES,
]
UBUNTU = [*ubuntu_driver("580.95.05"), *ubuntu_driver("580.105.08"), *BESIDES]
SYSTEM = [
    Package(
        "kmod",
        "30-1",
        "fake-host",
        links={**tool("usr/sbin/modprobe"), **tool("usr/sbin/rmmod"), **tool("usr/sbin/modinfo"), **tool("usr/bin/lsmod")},
    ),
    Package("pciutils", "1:3.9.0-4", "fake-host", links={**tool("usr/bin/lspci"), **tool("usr/bin/setpci")}),
    Package(
        "grub2-common",
        "2.06-13",
        "fake-host",
        files={"etc/default/grub": 'GRUB_DEFAULT=0\nGRUB_TIMEOUT=5\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX=""\n'},
        conffiles=("/etc/default/grub",),
        links=tool("usr/sbin/update-grub"),
        scripts={"postinst": script("[ -e /boot/grub/grub.cfg ] || update-grub")},
    ),
    Package("initramfs-tools", "0.142", "fake-host", links=tool("usr/sbin/update-initramfs")),
    Package(
        "fake-host",
        "1",
        files={
            TOOL: (HERE / "tool.py").read_text(),
            BOOT: (HERE / "boot.py").read_text(),
            "usr/lib/systemd/system/fake-host.service": BOOT_UNIT,
        },
        scripts={"postinst": script("systemctl daemon-reload; systemctl enable --quiet fake-host.service")},
    ),
    *headers(KERNEL, "6.1-1"),
    *headers(UBUNTU_KERNEL, "6.8.0-88.89", common=f"linux-headers-{UBUNTU_KERNEL.removesuffix('-generic')}"),
    # Ubuntu's own builds have the names of NVIDIA's, and may be newer
    Package("libnvidia-compute-580", "580.95.05-0ubuntu0.24.04.1", files={"usr/share/fake-host/driver-version": "580.95.05\n"}),
    Package("libnvidia-compute-580", "580.178.04-0ubuntu0.24.04.1", files={"usr/share/fake-host/driver-version": "580.178.04\n"}),
    Package("fake-bystander", "1.0", files={"usr/share/fake-bystander/version": "1.0\n"}),
    Package("fake-bystander", "2.0", files={"usr/share/fake-bystander/version": "2.0\n"}),
]
PACKAGES = {"cuda": CUDA, "ubuntu2404": UBUNTU, "system": SYSTEM}
SIGNED_BY = {"cuda": "cuda", "ubuntu2404": "cuda", "system": "system"}


def run(*argv: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, argv))}: exit status {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


def require_tools() -> None:
    if shutil.which("gpg") is None:
        apt = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=600", "-qq")
        run(*apt, "update")
        run(*apt, "install", "--yes", "--no-install-recommends", "gnupg")


def build(package: Package, pool: Path, scratch: Path) -> Path:
    """Make one .deb; the same package gives the same bytes."""
    tree = Path(tempfile.mkdtemp(dir=scratch))
    tree.chmod(0o755)
    control = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": package.architecture,
        "Maintainer": "Aerie's tests <tests@example.org>",
        **({"Depends": package.depends} if package.depends else {}),
        **package.fields,
        "Description": f"fake {package.name}",
    }
    parts = {"DEBIAN/control": "".join(f"{name}: {value}\n" for name, value in control.items()), **package.files}
    parts |= {f"DEBIAN/{name}": text for name, text in package.scripts.items()}
    if package.conffiles:
        parts["DEBIAN/conffiles"] = "".join(f"{path}\n" for path in package.conffiles)
    for name, text in parts.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    for name, target in package.links.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    file = pool / f"{package.name}_{package.version.replace(':', '%3a')}_{package.architecture}.deb"
    run("dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, file, environment=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"})
    return file


def index_entry(file: Path, root: Path) -> str:
    control = run("dpkg-deb", "--field", file).rstrip("\n")
    data = file.read_bytes()
    return f"{control}\nFilename: ./{file.relative_to(root)}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"


def make_key(home: Path, name: str) -> str:
    """A new signing key; its fingerprint."""
    environment = os.environ | {"GNUPGHOME": str(home)}
    user = f"{name} <{name}@example.org>"
    run("gpg", "-q", "--batch", "--passphrase", "", "--quick-gen-key", user, "ed25519", "sign", "never", environment=environment)
    listing = run("gpg", "--batch", "--with-colons", "--list-keys", f"{name}@example.org", environment=environment)
    return next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))


def publish(root: Path, name: str, packages: Iterable[Package], home: Path, scratch: Path) -> None:
    """A flat repository at `root`, its Release signed by its key."""
    pool = root / "pool"
    pool.mkdir(parents=True)
    with ThreadPoolExecutor(4) as workers:
        files = list(workers.map(lambda package: build(package, pool, scratch), packages))
        entries = list(workers.map(lambda file: index_entry(file, root), files))
    index = "\n".join(entries).encode()
    (root / "Packages").write_bytes(index)
    (root / "Packages.gz").write_bytes(gzip.compress(index, mtime=0))
    key = SIGNED_BY[name]
    label = {"cuda": "NVIDIA CUDA", "system": "System"}[key]
    sums = "".join(
        f" {hashlib.sha256((root / part).read_bytes()).hexdigest()} {(root / part).stat().st_size} {part}\n"
        for part in ("Packages", "Packages.gz")
    )
    (root / "Release").write_text(
        f"Origin: fake-{key}\nLabel: {label}\nSuite: stable\nArchitectures: amd64 all\nDate: {formatdate(usegmt=True)}\nSHA256:\n{sums}"
    )
    environment = os.environ | {"GNUPGHOME": str(home)}
    signer = ("gpg", "-q", "--batch", "--yes", "--local-user", f"fake-{key}@example.org")
    run(*signer, "--clearsign", "-o", root / "InRelease", root / "Release", environment=environment)
    run(*signer, "--armor", "--detach-sign", "-o", root / "Release.gpg", root / "Release", environment=environment)
    (root / f"fake-{key}.asc").write_text(run("gpg", "--batch", "--armor", "--export", f"fake-{key}@example.org", environment=environment))


def make(directory: Path) -> dict[str, str]:
    """Make all of it anew in `directory`; returns fingerprints by key: cuda, system, other."""
    require_tools()
    for part in PACKAGES:
        shutil.rmtree(directory / part, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "gpg"
        home.mkdir(mode=0o700)
        try:
            keys = {name: make_key(home, f"fake-{name}") for name in dict.fromkeys((*SIGNED_BY.values(), "other"))}
            for name, packages in PACKAGES.items():
                publish(directory / name, name, packages, home, Path(scratch))
            environment = os.environ | {"GNUPGHOME": str(home)}
            (directory / "other.asc").write_text(
                run("gpg", "--batch", "--armor", "--export", "fake-other@example.org", environment=environment)
            )
        finally:
            subprocess.run(["gpgconf", "--kill", "all"], env=os.environ | {"GNUPGHOME": str(home)}, check=False)
    (directory / "keys.json").write_text(json.dumps(keys, indent=1))
    return keys


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def server(directory: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server of `directory` at the controller's address on the hosts' network."""
    return http.server.ThreadingHTTPServer((CONTROLLER, port), functools.partial(Handler, directory=str(directory)))


def main(arguments: list[str]) -> int:
    match arguments:
        case [directory]:
            make(Path(directory))
        case [directory, "serve", *port]:
            make(Path(directory))
            server(Path(directory), int(port[0]) if port else 8080).serve_forever()
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
