"""A host with an environment that was really made, by pip from wheels of our own; made once for each test session."""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment
from ansible.module_utils.aerie.releases.environment import Interpreter, Source, Spec

sys.path.insert(0, str(Path(__file__).parent))
import fake_wheels

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
STAND_IN = {"pretend/__init__.py": "__aerie_stand_in__ = True\nvalue = 7\n", "pretend/deep/part.py": "x = 1\n"}


@dataclass(frozen=True)
class Installed:
    """What was installed and where."""

    paths: HostPaths
    spec: Spec
    interpreter: Interpreter
    source: Source
    plan: environment.Plan


def make_spec(wheels: Path, *, torch: dict[str, str] = fake_wheels.TORCH_CPU, profile: str = "cpu") -> Spec:
    """Write the wheels and return the spec that installs them."""
    fake_wheels.make(wheels, "torch", "1.9.1", torch)
    library = fake_wheels.make(wheels, "small_library", "1.0", fake_wheels.LIBRARY)
    supervisor = fake_wheels.make(wheels, "supervisor", "4.3.0", fake_wheels.SUPERVISOR)
    sglang = fake_wheels.make(wheels, "sglang", "1.2.3", fake_wheels.SGLANG)
    return Spec(
        version="1.2.3",
        profile=profile,
        lock_text=fake_wheels.lock(library),
        torch="1.9.1",
        torch_in_lock=False,
        sglang_sha256={MINOR: fake_wheels.sha256(sglang)},
        disk_gib=0.01,
        stand_ins=STAND_IN if profile == "cpu" else {},
        supervisor_lock_text=fake_wheels.lock(supervisor),
    )


@functools.cache
def host() -> Installed:
    """Return the host; tests may read it, and make releases of their own below another root."""
    root = Path(tempfile.mkdtemp(prefix="aerie-installed-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    spec = make_spec(root / "wheels")
    interpreter = environment.find_interpreter(sys.executable)
    paths, source = HostPaths(root / "host"), Source(wheels=str(root / "wheels"))
    plan = environment.plan(paths, spec, interpreter, supervisor=True)
    environment.apply(paths, spec, interpreter, source, Progress(None), supervisor=True)
    return Installed(paths, spec, interpreter, source, plan)
