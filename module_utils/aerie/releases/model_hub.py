"""Models from a hub at a pinned commit. Standard library only: this runs on hosts; only :data:`PROGRAM` runs in the hub environment.

What a commit holds is asked for by two plain requests, so that a check can say it before anything is installed. The files are fetched
by huggingface_hub, in an environment of its own made from a lock. Its ``hf_hub_download`` begins anew after a kill (a temporary file
of each process), so its ``http_get`` is called here with a file and the size to go on from: the lock holds the version that has it so.
Source: huggingface_hub 2.4.0, ``file_download.py`` and ``hf_api.py``.
"""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.aerie.errors import AerieError
from ansible.module_utils.aerie.files import canonical_hash
from ansible.module_utils.aerie.jobs import Progress
from ansible.module_utils.aerie.paths import HostPaths
from ansible.module_utils.aerie.releases import environment, model_identity
from ansible.module_utils.aerie.releases.model_fetch import Remote, SourceError, Wanted, run_child
from ansible.module_utils.aerie.words import tail

ENVIRONMENT_GIB = 0.2
ANSWER_SECONDS = 20
STREAMS = 4
REFUSED = 3

PROGRAM = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

asked = json.load(sys.stdin)
token = os.environ.get("HF_TOKEN") or False
constants.DOWNLOAD_CHUNK_SIZE = 1 << 20  # what a kill loses of each file


def fetch(name, size):
    path = os.path.join(asked["folder"], name)
    with open(path, "ab") as stream:
        there = os.fstat(stream.fileno()).st_size
        if there >= size:
            return
        url = hf_hub_url(asked["repository"], name, revision=asked["revision"], endpoint=asked["endpoint"])
        found = get_hf_file_metadata(url, token=token, endpoint=asked["endpoint"])
        headers = build_hf_headers(token=token) | {"Accept-Encoding": "identity"}
        if urlsplit(found.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)
        http_get(found.location, stream, resume_size=there, headers=headers, expected_size=size, displayed_filename=name)


try:
    with ThreadPoolExecutor(asked["streams"]) as pool:
        for done in [pool.submit(fetch, *one) for one in asked["files"]]:
            done.result()
except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(3)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(1)
"""


@dataclass(frozen=True)
class Hub:
    """One model's source: a repository of a hub at a commit."""

    endpoint: str
    repository: str
    revision: str
    exclude: tuple[str, ...] = ()
    token: str | None = None
    python: Path | None = None

    @staticmethod
    def origin(entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return what makes it this model; by which endpoint it came is no part of that."""
        exclude = sorted(entry.get("exclude") or ())
        return {"source": "hub", "repository": entry["repository"], "revision": str(entry["revision"]), "exclude": exclude}

    def wanted(self, name: str, entry: Mapping[str, Any], directory: Path) -> Wanted:
        """Ask the hub what the commit holds; raise when that can't be had."""
        facts = json.loads(self._get(f"/api/models/{self.repository}/revision/{self.revision}?blobs=true"))
        if facts.get("sha") != self.revision:
            raise AerieError(f"{self.repository}: the hub answers for commit {facts.get('sha')}, and {self.revision} was asked for")
        files = tuple(sorted(served(_remotes(facts), self.exclude), key=lambda file: file.name))
        config: Any = {}
        if any(file.name == "config.json" for file in files):
            try:
                config = json.loads(self._get(f"/{self.repository}/resolve/{self.revision}/config.json"))
            except ValueError as error:
                raise AerieError(f"{self.repository}@{self.revision[:12]}: config.json can't be read as JSON: {error}") from error
        return Wanted(name, directory, self.origin(entry), files, config, entry.get("weights", True), entry.get("identity"))

    def pull(self, folder: Path, files: Sequence[Remote], tick: Callable[[], None]) -> int:
        assert self.python is not None
        before = sum((folder / file.name).stat().st_size for file in files if (folder / file.name).is_file())
        with tempfile.TemporaryDirectory(prefix="aerie-hub-") as scratch:
            asked = {
                "folder": str(folder),
                "repository": self.repository,
                "revision": self.revision,
                "endpoint": self.endpoint,
                "streams": STREAMS,
                "files": [[file.name, file.size] for file in files],
            }
            output = Path(scratch) / "output"
            argv = [str(self.python), "-I", "-c", PROGRAM]
            status = run_child(argv, tick, output=output, given=json.dumps(asked).encode(), environ=self._environ(scratch))
            said = output.read_text(errors="replace")
        if status:
            message = f"{self.repository} could not be fetched from {self.endpoint}:\n{tail(said, 5)}"
            raise SourceError(message, again=status != REFUSED)
        return sum((folder / file.name).stat().st_size for file in files) - before

    def digests(self, files: Sequence[Remote], tick: Callable[[], None]) -> Mapping[str, str]:  # noqa: ARG002 - a hub needs no time for it
        return {file.name: file.digest for file in files if file.digest}

    def _environ(self, scratch: str) -> dict[str, str]:
        """Return the environment of the library: nothing of it lies outside of ``scratch``, nothing is sent but requests for files."""
        kept = {name: value for name, value in environment.clean_environ().items() if not name.startswith(("HF_", "HUGGING"))}
        wanted = {
            "HF_HOME": scratch,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_XET": "1",  # its downloads begin anew after a kill
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        }
        return kept | wanted | ({"HF_TOKEN": self.token} if self.token else {})

    def _get(self, path: str) -> bytes:
        return ask(self.endpoint, path, self.repository, self.token)


LARGEST_ANSWER = 64 << 20
"""In bytes: a hub's list of a repository's files, or a model's configuration."""


def ask(endpoint: str, path: str, repository: str, token: str | None = None, seconds: float = ANSWER_SECONDS) -> bytes:
    """Return what a hub answers; raise with what to do. The token goes to the endpoint only, never on to where it redirects."""
    request = urllib.request.Request(endpoint.rstrip("/") + path)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            content: bytes = answer.read(LARGEST_ANSWER + 1)
    except urllib.error.HTTPError as error:
        cures = {
            401: "it is private or gated, or is not there: check the name, and set sglang_models_hub_token to a token that may read it",
            403: "the token may not read it: accept its terms on the hub, or use another sglang_models_hub_token",
            404: "there is no such repository, commit or file: check repository and revision",
        }
        cure = cures.get(error.code, "try again later, or set sglang_models_hub_endpoint to a mirror")
        raise AerieError(f"{repository}: {endpoint} answers {error.code} {error.reason}: {cure}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AerieError(
            f"{repository}: {endpoint} does not answer from this host ({reason}): let it through, set sglang_models_hub_endpoint to a "
            "mirror, or bring the model with source rsync or controller"
        ) from error
    if len(content) > LARGEST_ANSWER:
        raise AerieError(f"{repository}: {endpoint} answers with more than {LARGEST_ANSWER:,} bytes: check sglang_models_hub_endpoint")
    return content


def resolve(endpoint: str, repository: str, revision: str, token: str | None = None) -> str | None:
    """Return the commit that a branch or tag is now, or None where the hub does not say."""
    try:
        facts = json.loads(
            ask(endpoint, f"/api/models/{repository}/revision/{urllib.parse.quote(revision, safe='')}", repository, token, 5)
        )
        sha = facts.get("sha")
        return sha if isinstance(sha, str) else None
    except (AerieError, ValueError, AttributeError):
        return None


def resolver(settings: Mapping[str, Any]) -> Callable[[str, str], str | None]:
    """Return what asks the hub of ``settings`` for commits; it knows none where they name no hub and the environment neither."""
    endpoint, token = settings.get("sglang_models_hub_endpoint") or os.environ.get("HF_ENDPOINT"), settings.get("sglang_models_hub_token")
    return lambda repository, revision: resolve(str(endpoint), repository, revision, token) if endpoint else None


def _remotes(facts: Mapping[str, Any]) -> list[Remote]:
    files = []
    for entry in facts.get("siblings") or ():
        lfs = entry.get("lfs")
        size = lfs["size"] if lfs else entry["size"]
        files.append(Remote(entry["rfilename"], int(size), f"sha256:{lfs['sha256']}" if lfs else f"blob:{entry['blobId']}"))
    return files


def served(files: Sequence[Remote], exclude: Sequence[str] = ()) -> list[Remote]:
    """Return the files that a server reads: those directly in the repository; where there are safetensors, no other weights."""
    kept = [
        file
        for file in files
        if "/" not in file.name
        and not file.name.startswith(".")
        and Path(file.name).suffix in model_identity.SUFFIXES
        and not any(fnmatch.fnmatch(file.name, pattern) for pattern in exclude)
    ]
    if any(file.name.endswith(".safetensors") for file in kept):
        others = tuple(suffix for suffix in model_identity.WEIGHTS if suffix != ".safetensors")
        kept = [file for file in kept if not file.name.endswith((*others, *(f"{suffix}.index.json" for suffix in others)))]
    return kept


def environment_path(paths: HostPaths, lock_text: str, interpreter: environment.Interpreter) -> Path:
    """Return where the hub environment is, or will be."""
    return paths.environments / f"hub-{canonical_hash({'lock': lock_text, 'python': interpreter.minor})[:12]}"


def make_environment(
    paths: HostPaths, path: Path, lock_text: str, interpreter: environment.Interpreter, source: environment.Source, progress: Progress
) -> None:
    """Make the hub environment where it is missing. Two runs at once don't meet."""
    with environment.alone(paths, progress):
        if not environment.is_whole(path):
            environment.check_disk(paths.root, ENVIRONMENT_GIB)
            check = ["-c", "import huggingface_hub; print(huggingface_hub.__version__)"]
            environment.make_tool(path, lock_text, interpreter, source, progress, name="huggingface_hub", check=check)


def default_endpoint(candidates: Sequence[Path]) -> str | None:
    """Return the endpoint that this host is configured for, or else the library's own; None where no Python of the host has it."""
    if given := os.environ.get("HF_ENDPOINT"):
        return given.rstrip("/")
    for python in candidates:
        if python.exists():
            answer = environment.run([str(python), "-c", "from huggingface_hub.constants import ENDPOINT; print(ENDPOINT)"])
            if answer.returncode == 0 and answer.stdout.strip():
                return answer.stdout.split()[-1]
    return None
