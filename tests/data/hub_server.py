"""A loopback server that speaks as much of the Hugging Face hub's HTTP interface as downloading a data set takes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A data set on the server, at one commit, and what is wrong with it."""

    files: dict[str, bytes]
    commit: str = "1" * 40
    branches: tuple[str, ...] = ("main",)
    licence: str | None = "cc0-1.0"
    refuses: int | None = None
    """Status with which the files, not the page, are refused: 401 and 403 are what a gated data set answers."""
    breaks: int = 0
    """How many answers with data break off half-way."""
    announced: dict[str, bytes] = field(default_factory=dict)
    """Files whose size and hash are those of other content."""

    etag: str | None = None
    """Said of every file in place of its hash."""
    says_bytes: int | None = None
    """Said of every file in place of its size, where the data set is described."""
    says_commit: str | None = None
    """Said in place of the commit, beside every file."""

    def entry(self, path: str) -> dict[str, Any]:
        content = self.announced.get(path, self.files[path])
        oid = hashlib.sha1(content).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
        if path.endswith(".parquet"):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def entries(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in self.files if path.startswith(prefix)]
        files = [self.entry(path) for path in inside if recursive or "/" not in path[len(prefix) :]]
        names = {path[: path.index("/", len(prefix))] for path in inside if "/" in path[len(prefix) :]}
        folders = [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(names)]
        return [*folders, *files]

    def page(self, name: str) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path in self.files:
            entry = self.entry(path)
            lfs = {"sha256": entry["lfs"]["oid"], "size": entry["size"], "pointerSize": 130} if "lfs" in entry else None
            siblings.append(
                {"rfilename": path, "size": self.says_bytes or entry["size"], "blobId": entry["oid"], "lfs": lfs}
            )
        card = {"license": self.licence} if self.licence else {}
        return {
            "_id": "0",
            "id": name,
            "sha": self.commit,
            "private": False,
            "gated": self.refuses is not None,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": card,
            "siblings": siblings,
        }


class Hub(ThreadingHTTPServer):
    """The server; `repositories` may change while it runs, and `requests` lists what was asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub on a free port of the loopback interface."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        url = urlsplit(self.path)
        self.server.requests.append(f"{self.command} {self.path}")
        parts = [part for part in unquote(url.path).split("/") if part]
        is_api = parts[:1] == ["api"]
        parts = parts[1:] if is_api else parts
        name = "/".join(parts[1:3])
        action, revision = (parts[3], parts[4]) if len(parts) > 4 else ("", "main")
        path = "/".join(parts[5:])
        repository = self.server.repositories.get(name)
        if parts[:1] != ["datasets"] or repository is None:
            self._refuse(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        elif revision != repository.commit and revision not in repository.branches:
            self._refuse(404, "RevisionNotFound", repository)
        elif not is_api:
            self._file(repository, path)
        elif action == "tree":
            if path and not repository.entries(path, True):
                self._refuse(404, "EntryNotFound", repository)
            else:
                self._json(repository.entries(path, "recursive=true" in url.query.lower()))
        elif action == "paths-info":
            wanted = json.loads(body)["paths"]
            self._json([repository.entry(path) for path in wanted if path in repository.files])
        else:
            self._json(repository.page(name))

    def _file(self, repository: Repository, path: str) -> None:
        if repository.refuses is not None:
            self._refuse(repository.refuses, "GatedRepo" if repository.refuses in (401, 403) else "", repository)
            return
        if path not in repository.files:
            self._refuse(404, "EntryNotFound", repository)
            return
        content, entry = repository.files[path], repository.entry(path)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", repository.says_commit or repository.commit)
        self.send_header("ETag", f'"{repository.etag or entry.get("lfs", entry)["oid"]}"')
        if "lfs" in entry:
            self.send_header("X-Linked-Size", str(entry["size"]))
            self.send_header("X-Linked-Etag", f'"{repository.etag or entry["lfs"]["oid"]}"')
        self.send_header("Accept-Ranges", "bytes")
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.breaks and path.endswith(".parquet"):
            repository.breaks -= 1
            self.wfile.write(content[first : len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content[first:])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str, repository: Repository | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if repository is not None:
            self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
