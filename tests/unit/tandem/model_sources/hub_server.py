"""A fake Hugging Face hub with the API calls that fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """The files of each revision. `refusal` is what the hub answers in place of them: its X-Error-Code."""

    revisions: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    refusal: str | None = None


@dataclass
class Hub:
    """A running hub: its address, and the paths of files that were asked for."""

    address: str
    fetched: list[str]


@contextmanager
def serving(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    """Serve the repositories on a free port."""
    fetched: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "fetched": fetched})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", fetched)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    repositories: Mapping[str, Repository]
    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Say nothing."""

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "models", owner, name, "revision", revision]:
                files = self._files(f"{owner}/{name}", revision)
                if files is not None:
                    self._send_json({"id": f"{owner}/{name}", "sha": _commit(revision), "siblings": []})
            case ["api", "models", owner, name, "tree", revision]:
                files = self._files(f"{owner}/{name}", revision)
                if files is not None:
                    self._send_json([_entry(path, content) for path, content in files.items()])
            case [owner, name, "resolve", revision, *path]:
                files = self._files(f"{owner}/{name}", revision)
                if files is not None:
                    self._send_file("/".join(path), files["/".join(path)], revision)
            case _:
                self._refuse(404, "RepoNotFound")

    def _files(self, model_id: str, revision: str) -> Mapping[str, bytes] | None:
        """The files of a revision; None after a refusal was sent."""
        repository = self.repositories.get(model_id)
        if repository is None:
            self._refuse(404, "RepoNotFound")
            return None
        if repository.refusal is not None:
            self._refuse(403, repository.refusal)
            return None
        for name, files in repository.revisions.items():
            if revision in (name, _commit(name)):
                return files
        self._refuse(404, "RevisionNotFound")
        return None

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: str, content: bytes, commit: str) -> None:
        if self.command == "GET":
            self.fetched.append(path)
        # The library asks for files by commit.
        self._send(content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

    def _send(self, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _commit(revision: str) -> str:
    """Forty hexadecimal digits, as a commit has."""
    return _digest(revision.encode())


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}
