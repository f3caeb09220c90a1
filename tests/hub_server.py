"""A hub for tests: the few answers of the real one's API that a client of models needs, with an account of every byte that it sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LFS_BYTES = 1 << 16
CHUNK = 1 << 16


@dataclass
class Hub:
    """Repositories by name: files by commit, commits by branch. Files of :data:`LFS_BYTES` and more are in LFS, as weights are."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    token: str | None = None
    pause_seconds: float = 0.0
    """How long each chunk of a file takes."""
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    seen_by_storage: list[str | None] = field(default_factory=list)
    """The Authorization header of each request to the storage that files are redirected to."""
    url: str = ""

    def publish(self, repository: str, files: dict[str, bytes]) -> str:
        """Add a commit, which the branch main is then; return it."""
        commit = hashlib.sha1(repr(sorted(files)).encode() + b"".join(files.values())).hexdigest()
        self.commits.setdefault(repository, {})[commit] = files
        self.branches.setdefault(repository, {})["main"] = commit
        return commit

    def file_of(self, digest: str) -> bytes:
        return next(
            data
            for commits in self.commits.values()
            for files in commits.values()
            for data in files.values()
            if hashlib.sha256(data).hexdigest() == digest
        )


def facts(commit: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = []
    for name, data in files.items():
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
        if len(data) >= LFS_BYTES:
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        siblings.append(entry)
    return {"sha": commit, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            self.hub.seen_by_storage.append(self.headers.get("Authorization"))
            return self.send_file(path, self.hub.file_of(match[1]), {}, body=body)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.send(401, b"", {"X-Error-Code": "GatedRepo"})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", path):
            commit = self.hub.branches.get(match[1], {}).get(match[2], match[2])
            files = self.hub.commits.get(match[1], {}).get(commit)
            return self.send(404, b"") if files is None else self.send(200, json.dumps(facts(commit, files)).encode())
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
            data = self.hub.commits.get(match[1], {}).get(match[2], {}).get(match[3])
            if data is None:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            digest = hashlib.sha256(data).hexdigest()
            headers = {"X-Repo-Commit": match[2], "ETag": f'"{digest}"'}
            if len(data) < LFS_BYTES:
                return self.send_file(path, data, headers, body=body)
            storage = f"http://127.0.0.1:{urlsplit(self.hub.url).port}/storage/{digest}"
            return self.send(302, b"", headers | {"Location": storage, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))})
        return self.send(404, b"")

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_file(self, path: str, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for place in range(start, len(data) if body else start, CHUNK):
                chunk = data[place : place + CHUNK]
                self.wfile.write(chunk)
                self.hub.sent[path] += len(chunk)
                time.sleep(self.hub.pause_seconds)


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on this machine. Its name is localhost, and that of the storage that it redirects to is not."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://localhost:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
