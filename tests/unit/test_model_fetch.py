"""A model that a host fetches is in its place only when it is whole, and what was received once is not fetched again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.aerie import processes
from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.releases import model_fetch, model_identity
from ansible.module_utils.aerie.releases.model_fetch import Plan, Remote, SourceError, Wanted

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def safetensors(size: int, fill: int = 0) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes([fill]) * size


FILES = {"config.json": json.dumps(CONFIG).encode(), "a.safetensors": safetensors(3000), "b.safetensors": safetensors(5000)}
BYTES = sum(map(len, FILES.values()))


@dataclass
class Shop:
    """A source that has files in memory, tells hashes ahead or when asked, and may fail after some bytes."""

    files: dict[str, bytes]
    ahead: bool = True
    fails_after: list[int] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    sent: int = 0
    pulls: list[list[str]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    source: str = "rsync"
    blobs: bool = True

    def wanted(self, directory: Path, identity: str | None = None, **origin: Any) -> Wanted:
        remotes = tuple(Remote(name, len(data), self.digest(data) if self.ahead else None) for name, data in sorted(self.files.items()))
        config = json.loads(self.files.get("config.json", b"{}"))
        origin = {"source": self.source, "from": "gpu-01:/m", **origin}
        return Wanted("tiny", directory, origin, remotes, config, identity=identity)

    def digest(self, data: bytes) -> str:
        if len(data) > 100 or not self.blobs:
            return "sha256:" + hashlib.sha256(data).hexdigest()
        return "blob:" + hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def pull(self, folder: Path, files: Sequence[Remote], tick: Callable[[], None]) -> int:
        self.before()
        self.pulls.append([file.name for file in files])
        left = self.fails_after.pop(0) if self.fails_after else BYTES * 2
        received = 0
        for file in files:
            path, data = folder / file.name, self.files[file.name]
            if file.name in self.damage:
                self.damage.remove(file.name)
                data = data[:-1] + b"!"
            start = path.stat().st_size if path.exists() else 0
            piece = data[start : start + left]
            with path.open("ab") as stream:
                stream.write(piece)
            left -= len(piece)
            received += len(piece)
            self.sent += len(piece)
            tick()
            if left <= 0:
                raise SourceError("the connection went away", again=True)
        return received

    def digests(self, files: Sequence[Remote], tick: Callable[[], None]) -> Mapping[str, str]:  # noqa: ARG002 - a source may take its time
        if self.source == "hub":
            return {file.name: file.digest for file in files if file.digest}
        return {file.name: "sha256:" + hashlib.sha256(self.files[file.name]).hexdigest() for file in files}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "TRY_AGAIN_SECONDS", 0.0)


@pytest.fixture
def bring(tmp_path: Path):
    """Fetch a shop's model to the same place as ever; return what it took."""

    def call(shop: Shop, renew: Callable[[], None] = lambda: None, **origin: Any) -> dict[str, Any]:
        return model_fetch.fetch(shop.wanted(tmp_path / "models/tiny", **origin), shop, tmp_path / "cache", Progress(None), renew)

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "models/tiny"


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


def partial(place: Path) -> Path:
    return place.with_name("tiny.partial")


@pytest.mark.parametrize("ahead", [True, False])
def test_a_model_arrives_whole_and_is_known_without_being_hashed_again(bring, place, tmp_path, ahead):
    shop = Shop(FILES, ahead)
    taken = bring(shop)
    assert taken["received_bytes"] == BYTES
    assert content(place) == FILES
    assert not partial(place).exists() and model_identity.problems(place) == []
    hashed: list[str] = []
    model_identity.read(place, tmp_path / "cache", hashed.append)
    assert hashed == []
    model = model_fetch.whole(place, shop.wanted(place).origin, tmp_path / "cache")
    assert model is not None and model.identity == model_identity.read(place).identity
    assert bring(Shop(FILES, ahead))["received_bytes"] == 0


def identity(files: Mapping[str, bytes]) -> str:
    """What docs/reference/models.md says that it is, worked out without the project's code."""
    entries = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in sorted(files.items())]
    return hashlib.sha256(json.dumps(entries, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


OTHER = "0" * 64


@pytest.mark.parametrize(("source", "ahead"), [("rsync", True), ("rsync", False), ("hub", True)])
def test_a_model_with_the_identity_that_is_asked_for_arrives_and_is_not_fetched_again(bring, source, ahead):
    assert bring(Shop(FILES, ahead, source=source), identity=identity(FILES))["received_bytes"] == BYTES
    again = Shop(FILES, ahead, source=source)
    assert bring(again, identity=identity(FILES))["received_bytes"] == 0 == again.sent
    assert bring(again)["received_bytes"] == 0  # nor when none is asked for


@pytest.mark.parametrize("ahead", [True, False])
def test_another_model_is_refused_before_a_byte_of_it_where_its_source_can_tell_all_hashes(bring, place, tmp_path, ahead):
    shop = Shop(FILES, ahead, blobs=False)
    with pytest.raises(AerieError) as caught:
        bring(shop, identity=OTHER)
    said = str(caught.value)
    assert f"its identity is {identity(FILES)[:12]}, and {OTHER[:12]} is asked for: name a source that has it" in said
    assert said.startswith("tiny: ") and str(place) in said and said.endswith(f"set identity to {identity(FILES)}")
    assert shop.pulls == [] and not place.exists() and not partial(place).exists()
    wanted = shop.wanted(place, identity=OTHER)
    assert bool(wanted.problems()) == ahead  # what a listing tells is told by a check too
    assert shop.wanted(place, identity=identity(FILES)).problems() == []


def test_another_model_of_a_hub_is_refused_before_it_is_in_place_and_what_came_is_kept(bring, place):
    with pytest.raises(AerieError, match=f"its identity is {identity(FILES)[:12]}, and {OTHER[:12]} is asked for: name its commit"):
        bring(Shop(FILES, source="hub"), identity=OTHER)
    assert not place.exists() and content(partial(place)) == FILES
    corrected = Shop(FILES, source="hub")
    assert bring(corrected, identity=identity(FILES))["received_bytes"] == 0
    assert content(place) == FILES and model_identity.problems(place) == []


def test_a_model_that_is_in_place_stays_as_it_is_when_another_one_is_asked_for(bring, place):
    bring(Shop(FILES, source="hub"))
    newer = FILES | {"a.safetensors": safetensors(3000, 1)}
    with pytest.raises(AerieError, match=f"its identity is {identity(newer)[:12]}, and {OTHER[:12]} is asked for"):
        bring(Shop(newer, source="hub"), identity=OTHER, revision=2)
    assert content(place) == FILES and model_identity.problems(place) == []
    with pytest.raises(AerieError, match=f"{place} is another model than the one asked for: its identity is {identity(FILES)[:12]}"):
        bring(Shop(FILES, source="hub"), identity=OTHER)


def test_a_run_that_ends_midway_leaves_its_bytes_and_the_next_one_goes_on(bring, place, tmp_path):
    shop = Shop(FILES)

    def lost() -> None:
        raise AerieError("this host was taken over")

    shop.before = lambda: None
    shop.fails_after = [4000]
    shop.before = lambda: lost() if shop.pulls else None
    with pytest.raises(AerieError, match="taken over"):
        bring(shop)
    assert not place.exists()
    assert sum(map(len, content(partial(place)).values())) == 4000
    planned = model_fetch.plan(shop.wanted(place), tmp_path / "cache")
    assert (planned.there_bytes, planned.missing_bytes) == (4000, BYTES - 4000)
    again = Shop(FILES)
    assert bring(again)["received_bytes"] == BYTES - 4000
    assert content(place) == FILES


def test_a_source_that_fails_for_a_moment_is_asked_again_as_long_as_anything_comes(bring, place):
    shop = Shop(FILES, fails_after=[1000] * 7)
    assert bring(shop)["received_bytes"] == BYTES == shop.sent
    assert content(place) == FILES


def test_a_source_that_gives_nothing_is_given_up_and_what_is_there_is_kept(bring, place):
    with pytest.raises(AerieError, match=r"connection went away\n1\.0 kB are kept in .*tiny\.partial; run again to go on"):
        bring(Shop(FILES, fails_after=[1000, *[0] * 9]))
    assert sum(map(len, content(partial(place)).values())) == 1000


def test_a_file_that_arrives_damaged_is_fetched_again_and_twice_is_refused(bring, place):
    shop = Shop(FILES, damage=["b.safetensors"])
    bring(shop)
    assert shop.pulls == [sorted(FILES), sorted(FILES)] and shop.sent == BYTES + len(FILES["b.safetensors"])
    assert content(place) == FILES
    shutil.rmtree(place)
    with pytest.raises(AerieError, match=r"b\.safetensors of tiny came with another content than the source says, twice"):
        bring(Shop(FILES, damage=["b.safetensors", "b.safetensors"]))
    assert not place.exists() and "b.safetensors" not in content(partial(place))


def test_what_is_no_whole_model_is_never_put_in_place(bring, place):
    broken = FILES | {"b.safetensors": FILES["b.safetensors"][:-7]}
    with pytest.raises(AerieError, match=r"what the source has is no whole model: .*must have"):
        bring(Shop(broken))
    assert not place.exists()


def test_of_a_model_that_is_there_only_what_differs_is_fetched(bring, place, tmp_path):
    bring(Shop(FILES))
    (place / "README.md").write_text("somebody's")
    newer = {name: data for name, data in FILES.items() if name != "a.safetensors"} | {"c.safetensors": safetensors(100, 1)}
    shop = Shop(newer)
    assert bring(shop, revision=2)["received_bytes"] == len(newer["c.safetensors"])
    assert content(place) == newer | {"README.md": b"somebody's"}
    assert model_identity.problems(place) == [] and not partial(place).exists()
    (place / "b.safetensors").write_bytes(safetensors(5000, 9))
    assert model_fetch.whole(place, shop.wanted(place, revision=2).origin, tmp_path / "cache") is None
    again = Shop(newer, ahead=False)
    bring(again, revision=2)
    assert again.pulls == [["b.safetensors"]]
    assert content(place)["b.safetensors"] == newer["b.safetensors"]


def test_a_source_that_changed_is_followed_when_it_is_asked_again(bring, place, tmp_path):
    bring(Shop(FILES))
    newer = {name: data for name, data in FILES.items() if name != "a.safetensors"} | {"config.json": b'{"hidden_size": 9}'}
    assert model_fetch.up_to_date(Shop(newer).wanted(place), tmp_path / "cache") is None
    bring(Shop(newer))
    assert content(place) == newer
    assert model_fetch.up_to_date(Shop(newer).wanted(place), tmp_path / "cache") is not None


def test_a_model_that_is_being_changed_in_place_is_not_served(bring, place, monkeypatch):
    bring(Shop(FILES))
    moved = model_fetch.Path.replace

    def die(path: Path, target: Path) -> Any:
        if path == partial(place) / "a.safetensors":
            raise KeyboardInterrupt
        return moved(path, target)

    newer = FILES | {"a.safetensors": safetensors(3000, 1)}
    with monkeypatch.context() as patched:
        patched.setattr(model_fetch.Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            bring(Shop(newer), revision=2)
    (problem,) = model_identity.problems(place)
    assert "is only partly fetched" in problem
    last = Shop(newer)
    bring(last, revision=2)
    assert last.sent == 0 and content(place) == newer and model_identity.problems(place) == []


def test_files_that_nobody_fetched_are_named_and_kept(bring, place, tmp_path):
    place.mkdir(parents=True)
    (place / "mine.safetensors").write_bytes(safetensors(8))
    shop = Shop(FILES)
    with pytest.raises(AerieError, match=r"holds mine\.safetensors, which its source has not and nobody fetched"):
        model_fetch.plan(shop.wanted(place), tmp_path / "cache")
    with pytest.raises(AerieError):
        bring(shop)
    assert content(place) == {"mine.safetensors": safetensors(8)}


def test_a_copy_that_was_made_by_hand_is_taken_as_it_is(bring, place, tmp_path):
    place.mkdir(parents=True)
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    shop = Shop(FILES)
    assert model_fetch.plan(shop.wanted(place), tmp_path / "cache").missing_bytes == 0
    assert bring(shop)["received_bytes"] == 0
    assert model_fetch.whole(place, shop.wanted(place).origin, tmp_path / "cache") is not None


def test_room_is_asked_for_what_is_missing_of_all_models_together(place, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    wanted = Shop(FILES).wanted(place)

    def plan(name: str, size: int, there: int) -> Plan:
        return Plan(replace(wanted, name=name), (Remote("x.safetensors", size),), there)

    model_fetch.check_room([plan("one", free // 3, 0), plan("two", free // 3, 0), plan("three", free * 9, free * 9)])
    with pytest.raises(AerieError, match=r"free, and [\d.]+ .B of one and two are still missing: free some"):
        model_fetch.check_room([plan("one", free * 2 // 3, 0), plan("two", free * 2 // 3, 0)])


def test_two_runs_at_once_fetch_once(bring, place):
    shops = [Shop(FILES), Shop(FILES)]
    gate = threading.Barrier(2)
    taken: list[dict[str, Any]] = []

    def run(shop: Shop) -> None:
        gate.wait()
        taken.append(bring(shop))

    threads = [threading.Thread(target=run, args=(shop,)) for shop in shops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one["received_bytes"] for one in taken) == [0, BYTES]
    assert content(place) == FILES


def test_a_program_that_fetches_ends_with_the_job_that_started_it(tmp_path):
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            model_fetch.run_child(["sleep", "60"], lambda: os.kill(os.getpid(), signal.SIGKILL), output=tmp_path / "said")
        os._exit(0)
    while not (started := [one for one in processes.scan() if one.ppid == child and one.argv[:1] == ("sleep",)]):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    os.waitpid(child, 0)
    assert processes.wait_gone(started, 10) == []


def test_what_an_earlier_run_left_of_another_model_is_not_mixed_in(bring, place):
    with pytest.raises(AerieError):
        bring(Shop(FILES, fails_after=[4000, *[0] * 9]))
    other = {name: data if name == "config.json" else data[::-1] for name, data in FILES.items()}
    other = other | {"a.safetensors": safetensors(3000, 7), "b.safetensors": safetensors(4000, 7)}
    shop = Shop(other)
    bring(shop, revision=2)
    assert content(place) == other


@pytest.mark.parametrize(
    ("done", "total", "rate", "text"),
    [
        (0, 4 * 10**9, 0, "0.0 kB of 4.0 GB"),
        (10**9, 4 * 10**9, 10**8, "1.0 GB of 4.0 GB, 100.0 MB/s, about 30 s left"),
        (10**9, 610 * 10**9, 10**8, "1.0 GB of 610.0 GB, 100.0 MB/s, about 1.7 h left"),
        (0, 2 * 10**12, 10**9, "0.0 kB of 2.0 TB, 1.0 GB/s, about 33 min left"),
    ],
)
def test_progress_is_told_for_a_person(done, total, rate, text):
    assert model_fetch.progress_text(done, total, rate) == text
