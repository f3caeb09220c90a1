"""A host that lies: what it may answer, a results tree to guard, and actions that are given such answers."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

PROJECT = Path(__file__).parents[2]
HOST, OTHER, RUN = "gpu-01", "gpu-02", "20260601T220000Z"

ESCAPE = "\x1b]0;owned\x07\x1b[31mred\x9b1m"
TEMPLATES = (
    "{{ lookup('ansible.builtin.pipe', 'touch CANARY') }}",
    "{% for i in range(9) %}{{ i }}{% endfor %}",
    "{# comment #}",
    "#jinja2: variable_start_string:'[%'",
    "{{ 7 * 7 }}",
)
TEXTS = (
    *TEMPLATES,
    ESCAPE,
    "line\nansible_python_interpreter: /tmp/evil\n# ",
    "'\"; touch CANARY; \"'",
    "!!python/object/apply:os.system ['touch CANARY']",
    "&anchor *anchor <<: - ? : |",
    "\u202ereversed\u2066 \u200b\ufeff",
    "byte \udcff and \ud800",
    "x" * 5000,
    "",
    "<script>alert(1)</script>",
    "../../../../etc/passwd",
    "nul\0nul",
)


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


WRONG = (None, True, 0, -1, 1.5, 10**30, float("nan"), float("inf"), [], {}, [[]], {"a": {"b": 1}}, nested(200), *TEXTS)
"""Values for any place of an answer."""
PATHS = (
    "", ".", "..", "/", "/etc/cron.d/evil", "../x", "a/../../x", "./x", "a//b", "a/./b", "a\0b", "~root/x", "-rf", ".hidden/x", "a/.hidden",
    "a\\b", "a b/c", "é/x", "x" * 300, "/".join("abcdefghijklmnop"), "a\nb", ESCAPE, "{{ 7 * 7 }}", "nul\0", "\udcff", "a/b/", "CON:",
)  # fmt: skip
OWN = (
    "capture/gpu-02.yml", "calibration/gpu-02.yml", "calibration/gpu-01.yml", "nccl/gpu-02.yml", "preflight/gpu-02.json", "report.html",
    "profile.html", "ledger.sqlite", "ledger.sqlite-wal", f"demo/{RUN}/{OTHER}/cell/record.json", f"profile/{RUN}/{OTHER}/arm/launch.json",
    f"calibration/{RUN}/{OTHER}/launch.json", f"nccl/{RUN}/{OTHER}/search/result.json", "provision/x.json", ".superseded/x",
)  # fmt: skip
"""Files of the controller, and of another host, that no manifest may name."""


def mutations(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested lists and mappings, the whole first."""
    yield where
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from mutations(inner, (*where, key))


def replaced(value: Any, where: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of ``value`` with ``new`` at one place."""
    if not where:
        return new
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[where[0]] = replaced(copy[where[0]], where[1:], new)
    return copy


def entry(path: Any, content: bytes = b"evil") -> dict[str, Any]:
    return {"path": path, "place": path, "bytes": len(content), "sha256": sha256(content).hexdigest()}


def archive(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write an archive as an honest host packs it, of any names."""
    with tarfile.open(path, "w:gz", compresslevel=1) as stream:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            stream.addfile(about, io.BytesIO(content))
    return path


def results(directory: Path) -> Path:
    """Make a results tree with a sentinel at every place that no host may touch."""
    for name in OWN:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"sentinel {name}\n")
    return directory


def state(directory: Path) -> dict[str, str]:
    return {path.relative_to(directory).as_posix(): path.read_text(errors="replace") for path in directory.rglob("*") if path.is_file()}


def plugin_of(name: str) -> ModuleType:
    """Return an action plugin's file as a module; modules of library/ have the same names, and are others."""
    known = f"action_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, PROJECT / "plugins/action" / f"{name}.py")
        assert spec and spec.loader
        sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


def action(name: str, arguments: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any]], check: bool = False) -> Any:
    """Return an action plugin of Aerie whose module is ``answer``; what that packs, it writes to the archive's path."""
    plugin = plugin_of(name).ActionModule
    shell = SimpleNamespace(tmpdir="/tmp/remote", join_path=lambda *parts: "/".join(parts))
    packed: dict[str, bytes] = {}

    def fetch_file(remote: str, local: str) -> None:
        Path(local).write_bytes(packed[remote])

    task = SimpleNamespace(args=arguments, check_mode=check, diff=False, async_val=0, action=name, no_log=False)
    connection = SimpleNamespace(_shell=shell, fetch_file=fetch_file, transport="local")
    made = plugin(task, connection, SimpleNamespace(), DataLoader(), SimpleNamespace(template=lambda value: value))

    def execute(module_args: dict[str, Any], task_vars: Any = None, **_: Any) -> dict[str, Any]:
        found = answer(module_args)
        if module_args.get("archive"):
            packed[module_args["archive"]] = found.pop("archive_bytes", b"")
        return found

    made._execute_module = execute
    made._remove_tmp_path = lambda *_, **__: None
    return made


def run(made: Any, host: str = HOST) -> dict[str, Any]:
    result: dict[str, Any] = made.run(None, {"inventory_hostname": host, "ansible_host": host})
    json.dumps(result, default=str)
    return result


RAW = (
    b"", b"{", b"not json", b"\xff\xfe\x00", b"\0" * 1000, b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"NaN", b"[Infinity]", b"1e999",
    b'"\\ud800"', b'{"\\udfff": 1}', b"1" + b"0" * 400, b'{"a": 1} trailing', b"{'a': 1}", b" " * (17 << 20),
)  # fmt: skip
"""Whole files that are no JSON, or none within bounds."""


def load(text: str, directory: Path) -> dict[str, Any]:
    """Read a file as ``-e @file`` does, with Ansible's own loader, and template all of it."""
    path = directory / "variables.yml"
    path.write_text(text)
    loader = DataLoader()
    values = loader.load_from_file(str(path), cache="none", trusted_as_template=True)
    evaluated = Templar(loader=loader, variables={**values, "trap": "sprung"}).template(values)
    assert same(evaluated, values), "something in the file was evaluated"
    assert same(_plain(text), values)
    assert all(line.isprintable() for line in text.split("\n"))
    result: dict[str, Any] = values
    return result


def same(one: Any, other: Any) -> bool:
    """Say whether two values are the same, also where they are no numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    kinds = [next(kind for kind in (bool, int, float, str, type(None)) if isinstance(value, kind)) for value in (one, other)]
    return kinds[0] is kinds[1] and bool(one == other)


def _plain(text: str) -> Any:
    from aerie_controller import generated_yaml

    return generated_yaml.load(text)
