"""A Hugging Face id where a folder is expected, against a hub of the test's own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ModelFolderError
from tandem.model_sources.find import find_model
from tandem.model_sources.hub import is_model_id, model_name
from tests.paths import ROOT
from tests.unit.tandem.model_sources.hub_server import Hub, Repository, serving

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
    "acme/model": Repository(
        {"main": CHECKPOINT | NOT_WANTED, "v1": CHECKPOINT | {"model.safetensors": b"older weights"}}
    ),
    "acme/gated": Repository(refusal="GatedRepo"),
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
    with serving(REPOSITORIES) as hub:
        yield hub


def ask(address: str, home: Path, *questions: tuple[str, str | None], **environment: str) -> list[Any]:
    ran = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        cwd=ROOT,
        env=os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
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
    kept, missing = ask(hub.address, tmp_path, ("acme/model", None), ("acme/other", None), HF_HUB_OFFLINE="1")
    assert kept == main
    assert missing.startswith("ServiceUnavailableError: the hub cannot be reached (or HF_HUB_OFFLINE is set)")


def test_a_service_fetches_by_id_or_fails_with_one_sentence(hub: Hub, tmp_path: Path) -> None:
    command = (sys.executable, "-P", "-m", "target_service", "--port", "0", "--log-level", "error")
    ran = subprocess.run(
        [*command, "--model", "acme/model", "--revision", "v9"],
        cwd=tmp_path,
        env=os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1  # as any model folder that cannot be served
    assert ran.stderr.splitlines() == [
        "error: the model acme/model has no revision v9; it must be a branch, a tag or a commit of it"
    ]


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
