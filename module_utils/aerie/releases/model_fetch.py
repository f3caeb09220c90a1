"""Models that a host fetches itself: what is missing, the fetching, the checks, and the step that puts a whole model in place.

A model grows in ``<directory>.partial``, and becomes ``<directory>`` by one rename when every file has the size and hash that its
source told. Where there is a directory already, only files that differ are fetched, and the directory is marked as partial while they
are moved in. A run that is killed leaves its bytes; the next one goes on from them. Standard library only: this runs on hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ansible.module_utils.aerie import locks
from ansible.module_utils.aerie.errors import AerieError, raise_all
from ansible.module_utils.aerie.files import fsync_dir, read_json, write_json
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.releases import model_identity
from ansible.module_utils.aerie.releases.model_catalog import PARTIAL
from ansible.module_utils.aerie.releases.model_identity import FETCHING, File, Model
from ansible.module_utils.aerie.words import listing

ALONE_SECONDS = 24 * 3600.0
"""How long to wait for another run that fetches the same model."""
RECORD = ".aerie-model.json"
"""What a whole model was fetched from, in its directory."""
TRIES = 5
"""How often a source may fail one after the other without a byte having come."""
TRY_AGAIN_SECONDS = 3.0
TICK_SECONDS = 0.5
TELL_SECONDS = 1.0
RENEW_SECONDS = 60.0
SPARE_BYTES = 64 << 20
HASHERS = 4
PR_SET_PDEATHSIG = 1
SHA256 = "sha256:"
OTHER_SOURCE = {"rsync": "name a source that has it", "hub": "name its commit"}
"""What to do where a source has another model than the one asked for."""


@dataclass(frozen=True)
class Remote:
    """One file at its source; ``digest`` is ``sha256:…`` or git's own ``blob:…``, where the source tells one ahead."""

    name: str
    size: int
    digest: str | None = None
    modified_ns: int | None = None


@dataclass(frozen=True)
class Wanted:
    """A model as its source has it now, and where it goes; ``origin`` is what must be equal for it to be the same model.

    ``identity`` is the content that it must have, wherever it comes from; None takes any.
    """

    name: str
    directory: Path
    origin: Mapping[str, Any]
    files: tuple[Remote, ...]
    config: Mapping[str, Any]
    weights: bool = True
    identity: str | None = None

    @property
    def partial(self) -> Path:
        return self.directory.with_name(self.directory.name + PARTIAL)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def problems(self) -> list[str]:
        """Return why this could not be served, as far as its list of files and configuration can tell."""
        names = [file.name for file in self.files]
        where = f"{self.origin['source']} {self.origin.get('from') or self.origin.get('repository')}"
        if "config.json" not in names:
            return [f"{where} has no config.json: is it the model's own directory?"]
        if self.weights and not any(name.endswith(model_identity.WEIGHTS) for name in names):
            return [f"{where} has no weight files ({listing(model_identity.WEIGHTS, last='or')})"]
        found = self.identity_told()
        return self.other_model(where, found) if found else []

    def identity_told(self, known: Mapping[str, str] | None = None) -> str | None:
        """Return the identity that the model will have, or None where not every file's sha256 was told, here or by ``known``."""
        digests = {file.name: (known or {}).get(file.name) or file.digest or "" for file in self.files}
        if not all(digest.startswith(SHA256) for digest in digests.values()):
            return None
        files = tuple(File(file.name, file.size, digests[file.name].removeprefix(SHA256)) for file in self.files)
        return Model(self.directory, files, self.config).identity

    def other_model(self, where: object, found: str) -> list[str]:
        """Return the problem that what was found at ``where`` is not the model that is asked for."""
        return model_identity.other_model(where, found, self.identity, OTHER_SOURCE[self.origin["source"]])


@dataclass(frozen=True)
class Plan:
    """What of a model has to be fetched: whole files by name, and the bytes of them that are not there from an earlier run."""

    wanted: Wanted
    files: tuple[Remote, ...]
    there_bytes: int

    @property
    def missing_bytes(self) -> int:
        return sum(file.size for file in self.files) - self.there_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return what a module says of it."""
        origin = self.wanted.origin
        source = origin["from"] if origin["source"] == "rsync" else f"{origin['repository']}@{origin['revision']}"
        return {
            "from": source,
            "to": str(self.wanted.directory),
            "files": [file.name for file in self.files],
            "bytes": self.missing_bytes,
            "there_bytes": self.there_bytes,
        }


class SourceError(AerieError):
    """A source failed; ``again`` says whether the same request may succeed a moment later."""

    def __init__(self, message: str, *, again: bool) -> None:
        super().__init__(message)
        self.again = again


class Source(Protocol):
    """Where a model comes from."""

    def pull(self, folder: Path, files: Sequence[Remote], tick: Callable[[], None]) -> int:
        """Bring ``files`` into ``folder``, going on from what is there; return the bytes that were received; raise SourceError."""

    def digests(self, files: Sequence[Remote], tick: Callable[[], None]) -> Mapping[str, str]:
        """Return every file's digest as its source has it."""


def whole(directory: Path, origin: Mapping[str, Any], cache: Path) -> Model | None:
    """Return the model in ``directory`` when it was fetched to its end from ``origin`` and is as it was; it is not hashed again."""
    if (directory / FETCHING).exists():
        return None
    try:
        record = read_json(directory / RECORD)
        if record["origin"] != dict(origin):
            return None
        model = model_identity.read(directory, cache)
        return model if [vars(file) for file in sorted(model.files, key=lambda file: file.name)] == record["files"] else None
    except (OSError, ValueError, KeyError):
        return None


def up_to_date(wanted: Wanted, cache: Path) -> Model | None:
    """Return the model that is in place when its source, asked again, has no other."""
    model = whole(wanted.directory, wanted.origin, cache)
    same = model is not None and {file.name for file in model.files} == {file.name for file in wanted.files}
    return model if same and not any(_lacking(wanted, cache)) else None


def plan(wanted: Wanted, cache: Path) -> Plan:
    """Return what has to be fetched. Reads only; raise when the directory holds files that are not of this model."""
    if wanted.directory.exists() and not wanted.directory.is_dir():
        raise AerieError(f"{wanted.directory} is no directory: the model is to be put there")
    _refuse_strange(wanted)
    files = tuple(_lacking(wanted, cache))
    return Plan(wanted, files, _there(wanted, files))


def check_room(plans: Iterable[Plan]) -> None:
    """Raise when what is still missing, of all models together, does not fit on a file system that they go to."""
    needs: dict[int, list[Plan]] = {}
    for one in plans:
        needs.setdefault(_existing(one.wanted.directory).stat().st_dev, []).append(one)
    for group in needs.values():
        directory = group[0].wanted.directory.parent
        needed, free = sum(one.missing_bytes for one in group), shutil.disk_usage(_existing(directory)).free
        if needed and free < needed + SPARE_BYTES:
            names = listing(one.wanted.name for one in group)
            raise AerieError(
                f"{directory} is on a file system with {size_text(free)} free, and {size_text(needed)} of {names} are still missing: "
                "free some, or give the model a path on a larger one"
            )


def fetch(wanted: Wanted, source: Source, cache: Path, progress: Progress, renew: Callable[[], None]) -> dict[str, Any]:
    """Bring one model and put it in place; return what it took. Two runs at once don't meet: the second finds it done."""
    started = time.monotonic()
    with _alone(wanted, progress):
        if (there := up_to_date(wanted, cache)) is not None:
            _require_identity(wanted, wanted.directory, there.identity)
            return {"received_bytes": 0, "seconds": 0.0}
        _refuse_strange(wanted)
        meter = _Meter(wanted, progress, renew)
        known: dict[str, str] = {file.name: file.digest for file in wanted.files if file.digest}
        if (wanted.directory.is_dir() or wanted.identity) and len(known) < len(wanted.files):
            progress.update(f"{wanted.name}: comparing with the source")
            known |= source.digests(wanted.files, meter.renew_only)
        if (told := wanted.identity_told(known)) is not None:
            _require_identity(wanted, f"what the source has for {wanted.directory}", told)
        wanted.partial.mkdir(parents=True, exist_ok=True)
        _keep_what_fits(wanted)
        lacking = tuple(_lacking(wanted, cache, known))
        received = 0
        for last in (False, True):
            received += _pull(wanted, source, lacking, meter)
            if any(file.name not in known for file in lacking):
                known |= source.digests(lacking, meter.renew_only)
            hashes, wrong = _verify(wanted, lacking, known, meter)
            if not wrong:
                break
            for name in wrong:
                (wanted.partial / name).unlink()
            if last:
                raise AerieError(
                    f"{listing(wrong)} of {wanted.name} came with another content than the source says, twice: "
                    "the source changes meanwhile, or its list of hashes is wrong; what was right is kept"
                )
            progress.update(f"{wanted.name}: {listing(wrong)} came damaged, fetching again")
        _place(wanted, lacking, hashes, cache)
    return {"received_bytes": received, "seconds": round(time.monotonic() - started, 1)}


def size_text(count: float) -> str:
    """Return a number of bytes for a person."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def run_child(
    argv: Sequence[str], tick: Callable[[], None], *, output: Path, given: bytes = b"", environ: Mapping[str, str] | None = None
) -> int:
    """Run a program with lowered priority until it ends, its output in a file; it is ended when ``tick`` raises."""
    command = [*_gently(), *argv]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(environ or os.environ),
            preexec_fn=_end_with_parent,
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
            while True:
                try:
                    return process.wait(timeout=TICK_SECONDS)
                except subprocess.TimeoutExpired:
                    tick()
        except BaseException:
            process.terminate()
            process.wait()
            raise


def _end_with_parent() -> None:
    """Let a child end when this process is killed: an orphan would write into what the next run goes on with. Source: prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _gently() -> list[str]:
    """Serving goes first: fetching takes the processor and the disk when nobody else does."""
    return ["nice", "-n", "10", *(["ionice", "-c", "2", "-n", "7"] if shutil.which("ionice") else [])]


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _refuse_strange(wanted: Wanted) -> None:
    if not wanted.directory.is_dir():
        return
    ours = {file.name for file in wanted.files} | set(_recorded(wanted.directory))
    strange = sorted({path.name for path in model_identity.list_files(wanted.directory)} - ours)
    if strange:
        raise AerieError(
            f"{wanted.directory} holds {listing(strange)}, which its source has not and nobody fetched: remove it, or give the model "
            "another path"
        )


def _recorded(directory: Path) -> dict[str, str]:
    """Return the hashes of the files that were fetched into ``directory``, by name."""
    for name in (RECORD, FETCHING):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return {entry["name"]: entry["sha256"] for entry in read_json(directory / name)["files"]}
    return {}


def _lacking(wanted: Wanted, cache: Path, known: Mapping[str, str] | None = None) -> Iterator[Remote]:
    """Yield the files that are not in the model's directory as they must be."""
    directory = wanted.directory
    there: dict[str, str] = {}
    if directory.is_dir() and any(_same_size(directory, file) for file in wanted.files):
        there = {path.name: "" for path in model_identity.list_files(directory)}
        if (directory / "config.json").is_file():
            with contextlib.suppress(ValueError):
                there = {file.name: file.sha256 for file in model_identity.read(directory, cache).files}
    for file in wanted.files:
        digest = file.digest or (known or {}).get(file.name)
        if file.name not in there or not _same_size(directory, file):
            yield file
        elif digest is None:
            if known is not None or (directory / file.name).stat().st_mtime_ns != file.modified_ns:
                yield file
        elif digest.startswith(SHA256):
            if digest != f"{SHA256}{there[file.name]}":
                yield file
        elif _hashes(directory / file.name)[1] != digest:
            yield file


def _same_size(directory: Path, file: Remote) -> bool:
    path = directory / file.name
    return path.is_file() and path.stat().st_size == file.size


def _there(wanted: Wanted, files: Sequence[Remote]) -> int:
    """Return how many bytes an earlier run left of ``files``; of what came from elsewhere nothing is promised."""
    if _origin_of(wanted.partial) != dict(wanted.origin):
        return 0
    return sum(min(file.size, (wanted.partial / file.name).stat().st_size) for file in files if (wanted.partial / file.name).is_file())


def _origin_of(partial: Path) -> Any:
    try:
        return read_json(partial / FETCHING)["origin"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_what_fits(wanted: Wanted) -> None:
    """Mark the growing directory; of what was left there from another origin, only whole files with the right hash stay."""
    partial = wanted.partial
    names = {file.name: file for file in wanted.files}
    foreign = _origin_of(partial) != dict(wanted.origin)
    for path in partial.iterdir():
        if path.name == FETCHING:
            continue
        file = names.get(path.name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif file is None or path.is_symlink() or path.stat().st_size > file.size or (foreign and not _as_told(path, file)):
            path.unlink()
    write_json(partial / FETCHING, {"origin": dict(wanted.origin)})


def _as_told(path: Path, file: Remote) -> bool:
    return file.digest is not None and path.stat().st_size == file.size and file.digest in _digests(path)


def _pull(wanted: Wanted, source: Source, files: Sequence[Remote], meter: _Meter) -> int:
    """Fetch until all is there; a source that fails for a moment is asked again, as long as anything comes."""
    received, failures = 0, 0
    meter.begin(files)
    while True:
        before = meter.done()
        try:
            return received + source.pull(wanted.partial, files, meter.tick)
        except SourceError as error:
            came = meter.done() - before
            received += max(came, 0)
            failures = 0 if came > 0 else failures + 1
            if not error.again or failures >= TRIES:
                raise AerieError(
                    f"{wanted.name}: {error}\n{size_text(meter.done())} are kept in {wanted.partial}; run again to go on"
                ) from error
            meter.say(f"{wanted.name}: {str(error).splitlines()[0]}; trying again")
            time.sleep(TRY_AGAIN_SECONDS)


def _verify(wanted: Wanted, files: Sequence[Remote], known: Mapping[str, str], meter: _Meter) -> tuple[dict[str, str], list[str]]:
    """Return the sha256 of each file and the names of those that are not what the source says."""
    hashes: dict[str, str] = {}
    wrong = []
    with ThreadPoolExecutor(min(HASHERS, os.cpu_count() or 1)) as pool:
        futures = {file.name: pool.submit(_digests, wanted.partial / file.name) for file in files}
        for number, file in enumerate(files, start=1):
            meter.say(f"{wanted.name}: checking {number} of {len(files)} files: {file.name}")
            digests = futures[file.name].result()
            meter.renew_only()
            hashes[file.name] = digests[0].removeprefix(SHA256)
            if known[file.name] not in digests or not _same_size(wanted.partial, file):
                wrong.append(file.name)
    return hashes, wrong


def _digests(path: Path) -> tuple[str, ...]:
    """Return a file's digests as a source may tell them, the sha256 first; what was hashed is on the disk."""
    sha256, blob = _hashes(path)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return f"{SHA256}{sha256}", blob


def _hashes(path: Path) -> tuple[str, str]:
    """Return the sha256 and git's blob id. Source: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects."""
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    small = path.stat().st_size < 64 << 20  # larger ones are in LFS, where git has only a pointer
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            sha256.update(chunk)
            if small:
                blob.update(chunk)
    return sha256.hexdigest(), f"blob:{blob.hexdigest()}"


def _require_identity(wanted: Wanted, where: object, found: str) -> None:
    raise_all(wanted.other_model(where, found), wanted.name)


def _place(wanted: Wanted, fetched: Sequence[Remote], hashes: Mapping[str, str], cache: Path) -> None:
    """Put what was fetched and checked in place, durably; what is there is whole, or is marked."""
    directory, partial = wanted.directory, wanted.partial
    names = {file.name for file in fetched}
    kept = {path.name: path for path in model_identity.list_files(directory)} if directory.is_dir() else {}
    kept = {name: path for name, path in kept.items() if name not in names and any(file.name == name for file in wanted.files)}
    files = sorted(
        [File(file.name, file.size, hashes.get(file.name) or _hashes(kept[file.name])[0]) for file in wanted.files],
        key=lambda file: file.name,
    )
    found = model_identity.content_problems(
        {path.name: path for path in (*kept.values(), *(partial / name for name in names))}, wanted.directory, weights=wanted.weights
    )
    if found:
        raise AerieError(f"{wanted.name}: what the source has is no whole model: {listing(found)}")
    model = Model(directory, tuple(files), wanted.config)
    _require_identity(wanted, f"what was fetched for {directory}, and is kept in {partial},", model.identity)
    record = {"origin": dict(wanted.origin), "identity": model.identity, "files": [vars(file) for file in files]}
    for file in fetched:
        (partial / file.name).chmod(0o644)
    if not directory.exists():
        partial.chmod(0o755)
        write_json(partial / RECORD, record)
        (partial / FETCHING).unlink()
        partial.rename(directory)
    else:
        before = _recorded(directory)
        write_json(
            directory / FETCHING, {"origin": dict(wanted.origin), "files": [{"name": name, "sha256": ""} for name in (*before, *names)]}
        )
        (directory / RECORD).unlink(missing_ok=True)
        for name in names:
            (partial / name).replace(directory / name)
        for name in before.keys() - {file.name for file in wanted.files}:
            (directory / name).unlink(missing_ok=True)
        fsync_dir(directory)
        write_json(directory / RECORD, record)
        (directory / FETCHING).unlink()
        shutil.rmtree(partial)
    fsync_dir(directory.parent)
    model_identity.remember(model, cache)


@contextlib.contextmanager
def _alone(wanted: Wanted, progress: Progress) -> Iterator[None]:
    """Hold one model's directory. The lock goes with the process that holds it."""
    with locks.held(
        wanted.directory.parent / f".{wanted.directory.name}.lock",
        ALONE_SECONDS,
        f"model {wanted.name}: another run is fetching it",
        lambda: progress.update(f"{wanted.name}: waiting, another run is fetching it"),
    ):
        yield


class _Meter:
    """Tells how far the fetching is, how fast, and how long it will take; renews the lease meanwhile."""

    def __init__(self, wanted: Wanted, progress: Progress, renew: Callable[[], None]) -> None:
        self._wanted, self._progress, self._renew = wanted, progress, renew
        self._renewed = time.monotonic()
        self._files: Sequence[Remote] = ()
        self._told = self._began = 0.0
        self._began_at = 0

    def begin(self, files: Sequence[Remote]) -> None:
        self._files = files
        self._began, self._began_at = time.monotonic(), self.done()
        self._tell()

    def done(self) -> int:
        """Return how many bytes are there of the files that are fetched."""
        total = 0
        for file in self._files:
            with contextlib.suppress(OSError):
                total += min(file.size, (self._wanted.partial / file.name).stat().st_size)
        return total

    def tick(self) -> None:
        self.renew_only()
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._tell()

    def renew_only(self) -> None:
        if time.monotonic() - self._renewed >= RENEW_SECONDS:
            self._renewed = time.monotonic()
            self._renew()

    def say(self, message: str) -> None:
        self._progress.update(message)

    def _tell(self) -> None:
        self._told = time.monotonic()
        total, done = sum(file.size for file in self._files), self.done()
        seconds = self._told - self._began
        rate = (done - self._began_at) / seconds if seconds > 0 else 0.0
        self._progress.update(f"{self._wanted.name}: {progress_text(done, total, rate)}", done, total)


def progress_text(done: int, total: int, rate: float) -> str:
    """Return ``1.2 GB of 4.0 GB, 100.0 MB/s, about 1 min left``."""
    text = f"{size_text(done)} of {size_text(total)}"
    if rate <= 0:
        return text
    left = (total - done) / rate
    return f"{text}, {size_text(rate)}/s, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
