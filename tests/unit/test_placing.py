"""Where a host's files go is the controller's decision, whatever a host lists: for each action that fetches.

Inputs tried: 4 actions, each with every path of ``hostile.PATHS`` and ``hostile.OWN`` at every place that names a path, and every
value of ``hostile.WRONG`` at every place of the answer. Each test counts its own.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import resource
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import hostile
import pytest
from ansible.module_utils.aerie import untrusted
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.measuring import collection, placing
from hostile import HOST, OTHER, RUN

from aerie_controller import fetching, terminal

CONTENT = b"evil"
NAMES = dict.fromkeys(("experiment", "run_id", "host", "cell"), "")


def records(**changes: Any) -> list[dict[str, Any]]:
    return [{"experiment": "demo", "run_id": RUN, "host": HOST, "cell": "c1"} | changes]


COMPONENT = r"[A-Za-z0-9][\w.-]*"
EXPERIMENT = rf"(?!({'|'.join(placing.OWN_NAMES)})/){COMPONENT}"
SERVED = {"root": "/opt/aerie", "instance": "main", "run_id": RUN, "arm": {"name": "arm"}}
FETCHING: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "collect_results": ({"root": "/opt/aerie"}, (RUN, "c1"), f"{EXPERIMENT}/{COMPONENT}/{HOST}/{COMPONENT}/{COMPONENT}$"),
    "sglang_profile": (SERVED, (RUN, "arm"), rf"profile/{RUN}/{HOST}/(arm|\.superseded/arm\.\d+)/"),
    "sglang_calibrate": (SERVED, (RUN,), rf"calibration/{RUN}/({HOST}|\.superseded/{HOST}\.\d+)/"),
    "nccl_tune": ({"root": "/opt/aerie", "run_id": RUN}, (RUN,), f"nccl/{RUN}/{HOST}/"),
}
"""Each action's arguments, what its honest paths begin with, and what the path of everything that it writes begins with."""


@pytest.fixture(autouse=True)
def warnings(monkeypatch) -> list[str]:
    """Collect what a person would be warned of."""
    found: list[str] = []
    monkeypatch.setattr(terminal, "warn", lambda text: found.append(str(text)))
    return found


def fetch(name: str, dest: Path, scratch: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """Run a fetching action over ``answer``; its host packs whatever it was asked for, with the same content."""

    def host(asked: dict[str, Any]) -> dict[str, Any]:
        if "archive" not in asked:
            return dict(answer)
        packed = hostile.archive(scratch / "packed.tar.gz", dict.fromkeys(asked["wanted"], CONTENT))
        return {"archive_bytes": packed.read_bytes()}

    return hostile.run(hostile.action(name, {"dest": str(dest), **FETCHING[name][0]}, host))


def answers(name: str) -> Iterator[dict[str, Any]]:
    """Yield what a lying host may answer."""
    prefix = "/".join(FETCHING[name][1])
    honest = {"changed": True, "files": [hostile.entry(f"{prefix}/a.json")], "records": records(), "written": [], "problems": []}
    for path in (*hostile.PATHS, *hostile.OWN):
        for listed in (path, f"{prefix}/{path}", f"{path}/a.json", f"{RUN}/{path}/a.json"):
            yield honest | {"files": [hostile.entry(listed)]}
        for key in NAMES:
            yield honest | {"files": [hostile.entry(f"{RUN}/c1/a.json")], "records": records(**{key: path})}
            yield honest | {
                "files": [hostile.entry(f"{path}/c1/a.json"), hostile.entry(f"{RUN}/{path}/a.json")],
                "records": records(**{key: path}),
            }
    for reserved in (*placing.OWN_NAMES, "Calibration", "report.html", "ledger.sqlite", "x.yml"):
        yield honest | {"records": records(experiment=reserved)}
    yield honest | {"records": records(host=OTHER)}
    yield honest | {"files": [hostile.entry(f"{RUN}/c1/a"), hostile.entry(f"{RUN}/c1/a/b")]}
    yield honest | {"files": [hostile.entry(f"{prefix}/a.json")] * 2}
    yield honest | {"files": [hostile.entry(f"{prefix}/f{n}") for n in range(placing.DEFAULT_FILES + 1)]}
    yield honest | {"files": [hostile.entry(f"{prefix}/a") | {"bytes": 1 << 60}]}
    for where in hostile.mutations({"files": honest["files"], "records": honest["records"]}):
        for value in hostile.WRONG:
            changed = hostile.replaced({"files": honest["files"], "records": honest["records"]}, where, value)
            yield honest | (changed if isinstance(changed, dict) else {"files": changed, "records": changed})


@pytest.mark.parametrize("name", FETCHING)
def test_no_answer_of_a_host_changes_anything_outside_its_own_directory(name, tmp_path, record_property):
    """About 700 answers for each action: paths, reserved names, names of another host, wrong types at every place."""
    dest = hostile.results(tmp_path / "results")
    outside = tmp_path / "outside"
    outside.mkdir()
    before, allowed = hostile.state(dest), FETCHING[name][2]
    count = 0
    for answer in answers(name):
        result = fetch(name, dest, tmp_path, answer)
        count += 1
        assert "Traceback" not in json.dumps(result, default=str)
    after = hostile.state(dest)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert [path for path in changed if not re.match(allowed, path)] == []
    assert not changed & before.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "packed.tar.gz", "results"]
    assert list(outside.iterdir()) == [] and not [path for path in dest.iterdir() if path.name.startswith(".collect-")]
    assert count > 500
    print(f"{name}: {count} answers")
    record_property("counted manifests of hostile hosts", count)


@pytest.mark.parametrize("name", FETCHING)
def test_an_honest_answer_is_brought_to_the_place_that_the_controller_chooses(name, tmp_path):
    prefix, allowed = "/".join(FETCHING[name][1]), FETCHING[name][2]
    answer = {"changed": True, "files": [hostile.entry(f"{prefix}/a.json")], "records": records(), "written": []}
    dest = tmp_path / "results"
    result = fetch(name, dest, tmp_path, answer)
    (place,) = result["fetched"]
    assert re.match(allowed, place) and (dest / place).read_bytes() == CONTENT
    assert [one["place"] for one in result["files"]] == [place]
    assert fetch(name, dest, tmp_path, answer)["fetched"] == []


def test_a_bad_cell_is_a_problem_and_the_good_one_comes(tmp_path):
    answer = {
        "changed": True,
        "files": [hostile.entry(f"{RUN}/c1/a.json"), hostile.entry(f"{RUN}/c2/a.json")],
        "records": [*records(), *records(cell="c2", host=OTHER)],
        "problems": ["r9/c9: its definition.json is not JSON"],
    }
    result = fetch("collect_results", tmp_path / "results", tmp_path, answer)
    assert result["fetched"] == [f"demo/{RUN}/{HOST}/c1/a.json"] and not result.get("failed")
    assert any(OTHER in problem for problem in result["problems"]) and answer["problems"][0] in result["problems"]


def test_a_cell_whose_files_say_that_they_are_another_hosts_is_not_placed(tmp_path):
    dest = tmp_path / "results"
    for file in ("record.json", "definition.json"):
        content = json.dumps(records(host=OTHER)[0]).encode()
        entries = placing.of_cells([hostile.entry(f"{RUN}/c1/{file}", content)], records(), HOST, None).entries
        packed = hostile.archive(tmp_path / "a.tar.gz", {f"{RUN}/c1/{file}": content})
        (problem,) = collection.unpack(packed, entries, dest, collection.cell_agrees)
        assert OTHER in problem and list(dest.iterdir()) == []


@pytest.mark.parametrize("host", ["", ".", "..", ".x", "a/b", "/etc", "a\0b"])
def test_a_name_of_the_inventory_that_can_not_name_a_directory_is_refused(host):
    with pytest.raises(AerieError, match="can't name a directory"):
        placing.of_run([], placing.NCCL, RUN, host)


# ---- archives ----


def one(size: int, content: bytes | None = None) -> tuple[placing.Entry, ...]:
    digest = sha256(content).hexdigest() if content is not None else "0" * 64
    return placing.of_run([{"path": f"{RUN}/a", "bytes": size, "sha256": digest}], placing.NCCL, RUN, HOST).entries


def tar(path: Path, *members: tarfile.TarInfo, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:gz", format=form) as stream:
        for member in members:
            stream.addfile(member, io.BytesIO(b"\0" * member.size) if member.isreg() else None)
    return path


def member(name: str = f"{RUN}/a", kind: bytes = tarfile.REGTYPE, size: int = 4, **about: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, size
    for key, value in about.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "members",
    [
        [member(kind=kind, size=0, linkname="/etc/passwd")]
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
    ]
    + [
        [],
        [member(size=3)],
        [member(size=5)],
        [member("/etc/passwd")],
        [member("../../etc/passwd")],
        [member("other")],
        [member(), member()],
        [member(size=1 << 26)],
        [member(pax_headers={"comment": "x" * (1 << 20)})],
        [member(pax_headers={"size": "99999999999999999999"})],
        [member(pax_headers={"path": "../evil"})],
        [member(pax_headers={"GNU.sparse.size": "4", "GNU.sparse.map": "0,4"})],
    ],
    ids=itertools.count(),
)
def test_an_archive_that_is_not_what_was_listed_places_nothing(tmp_path, members):
    dest = hostile.results(tmp_path / "results")
    before = hostile.state(dest)
    packed = tar(tmp_path / "a.tar.gz", *members)
    try:
        problems = collection.unpack(packed, one(4), dest)
    except untrusted.Malformed as error:
        problems = (str(error),)
    assert problems and hostile.state(dest) == before


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b" + b"\xff" * 50, b"\0" * 2048])
def test_what_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(AerieError, match="archive of the host"):
        collection.unpack(tmp_path / "a.tar.gz", one(4), tmp_path / "results")


class Zeros(io.RawIOBase):
    """Zeros without end."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


BOMB = """
import resource, sys, tarfile
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv[3])
from ansible.module_utils.aerie.measuring import collection, placing
entries = placing.of_run([{"path": "r/a", "bytes": int(sys.argv[2]), "sha256": "0" * 64}], "nccl", "r", "h").entries
resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))
try:
    print(collection.unpack(Path(sys.argv[1]), entries, Path(sys.argv[1]).parent / "results"))
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("kind", "listed"), [(tarfile.REGTYPE, 1), (tarfile.REGTYPE, 1 << 30), (tarfile.XHDTYPE, 1 << 30)])
def test_a_gibibyte_in_a_few_megabytes_does_not_fill_the_memory(tmp_path, kind, listed):
    """An archive of 1 GiB of zeros, told as 1 byte or truly, or as the header of a member, in 400 MiB of memory."""
    packed = tmp_path / "a.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=1) as stream:
        stream.addfile(member("r/a", kind, 1 << 30), Zeros())
    argv = [sys.executable, "-c", BOMB, str(packed), str(listed), str(hostile.PROJECT / "module_utils")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = listed == 1 or kind == tarfile.XHDTYPE
    assert ("refused: the archive" in done.stdout) == refused
    assert ("arrived damaged" in done.stdout) != refused


def test_what_is_fetched_can_not_grow_beyond_its_bound(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 1000)
    with path.open("ab", buffering=0) as stream, fetching.files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        stream.write(b"x")
    assert path.stat().st_size == 1000
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == limits


@pytest.mark.parametrize("limits", [{"gib": 0}, {"gib": -1}, {"files": 0}, {"gib": "x"}, {"other": 1}, [1], "16", {"gib": float("nan")}])
def test_limits_that_are_none_are_refused_before_the_host_is_asked(tmp_path, limits):
    made = hostile.action("collect_results", {"root": "/r", "dest": str(tmp_path), "fetch_limits": limits}, lambda _: 1 / 0)
    assert "fetch_limits" in hostile.run(made)["msg"]


def test_limits_are_raised_by_a_setting():
    entries = one(20 << 30)
    with pytest.raises(AerieError, match="aerie_fetch_limit_gib"):
        placing.require_room(entries, placing.Limits())
    assert placing.require_room(entries, placing.Limits(gib=32)) == 20 << 30
    with pytest.raises(AerieError, match="aerie_fetch_limit_files"):
        placing.require_room(entries * 3, placing.Limits(gib=100, files=2))
