"""A loopback server that answers the requests of `huggingface_hub`, and processes that download from it: the hub's
libraries read their environment when they are imported."""

import hashlib
import io
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from lmtrain.config.schema import DataConfig
from lmtrain.data.corpus import make_corpus
from lmtrain.errors import LmtrainError
from lmtrain.system.messages import log_level

TOKEN = "hf_canaryTOKEN"


@dataclass
class Repository:
    """A dataset on the server: its files, at one commit; the status of requests for them if it is an error, and the
    hub's code of it."""

    files: dict[str, bytes]
    commit: str = "1" * 40
    error: int | None = None
    code: str = ""


class Hub(ThreadingHTTPServer):
    """The server; `repositories` may change while it runs, and `requests` lists the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub on a free port of the loopback interface."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        parts = unquote(urlsplit(self.path).path).strip("/").removeprefix("api/").split("/")
        name, action, revision, path = "/".join(parts[1:3]), parts[3], parts[4], "/".join(parts[5:])
        repository = self.server.repositories.get(name)
        if repository is None:
            self._send(404, code="RepoNotFound")
        elif revision not in ("main", repository.commit):
            self._send(404, code="RevisionNotFound")
        elif action == "revision":
            self._send(200, json.dumps({"id": name, "sha": repository.commit, "siblings": []}).encode())
        elif action == "tree":
            sizes = {path: len(content) for path, content in repository.files.items()}
            entries = [{"type": "file", "path": path, "size": sizes[path], "oid": "0" * 40} for path in sizes]
            self._send(200, json.dumps(entries).encode())
        elif repository.error is not None:
            self._send(repository.error, code=repository.code)
        elif path not in repository.files:
            self._send(404, code="EntryNotFound")
        else:
            self._send(200, repository.files[path], commit=repository.commit)

    do_HEAD = do_GET  # noqa: N815 -- the base class calls it so

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, content: bytes = b"", *, code: str = "", commit: str = "") -> None:
        self.send_response(status)
        headers = {"X-Error-Code": code, "X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def prepare(environment: dict[str, str]) -> None:
    """Start a process: its environment, and no pauses between the retries of the hub's client."""
    os.environ.update(environment)
    patch("time.sleep").start()


def attempt(fields: dict[str, Any], broken: tuple[str, Exception] | None) -> tuple[Any, str]:
    """In that process: the manifest that a download gives, or the message that it fails with; and what stderr had."""
    fault = patch(broken[0], side_effect=broken[1]) if broken else nullcontext()
    with redirect_stderr(io.StringIO()) as stderr, log_level(logging.WARNING), fault:
        try:
            return make_corpus(DataConfig(**fields)).manifest, stderr.getvalue()
        except LmtrainError as error:
            return str(error), stderr.getvalue()


@dataclass
class Client:
    """Downloads in another process into `dir`; `broken` names a function that raises instead."""

    pool: ProcessPoolExecutor
    dir: Path

    def __call__(
        self, source: str, *, again: bool = True, broken: tuple[str, Exception] | None = None, **fields: Any
    ) -> Any:
        """The corpus's manifest, or the message that the download fails with; `again`: without the corpora so far."""
        if again and self.dir.exists():
            shutil.rmtree(self.dir)
        asked = {"source": source, "dir": self.dir, **fields}
        result, stderr = self.pool.submit(attempt, asked, broken).result()
        assert stderr == ""
        if isinstance(result, str):
            assert not [part for part in ("\n", TOKEN, "://") if part in result]
            assert not list(self.dir.glob(".tmp-*"))
        return result
