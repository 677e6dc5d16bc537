"""What cannot be started says so in one sentence and ends, within seconds and not with exit code 0."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.models import random_model, save_model
from tests.end_to_end.processes import TANDEM, address_of, model_service, run
from tests.paths import DEMO_DRAFT

pytestmark = pytest.mark.slow

END_SECONDS = 40.0
"""Bound on an end, interpreter start and a noisy machine included. What has to load torch first takes longer."""


def refusal(*command: str, seconds: float = END_SECONDS) -> str:
    """The one sentence of a command that must fail."""
    return sentence_of(run(*command, "--log-level", "error", seconds=seconds))


def sentence_of(result: subprocess.CompletedProcess[str]) -> str:
    """The only line on stderr, which must be an error's sentence."""
    assert result.returncode != 0
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def without_weights(folder: Path) -> Path:
    shutil.copytree(DEMO_DRAFT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def nothing_there(folder: Path) -> Path:
    return folder / "nowhere"


def a_file(folder: Path) -> Path:
    path = folder / "file"
    path.touch()
    return path


def no_config(folder: Path) -> Path:
    return folder


def no_weights(folder: Path) -> Path:
    return without_weights(folder / "model")


def pickle_only(folder: Path) -> Path:
    model = without_weights(folder / "model")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return model


def truncated(folder: Path) -> Path:
    model = without_weights(folder / "model")
    weights = (DEMO_DRAFT / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return model


def not_safetensors(folder: Path) -> Path:
    model = without_weights(folder / "model")
    (model / "model.safetensors").write_bytes(b"no tensor is safe here")
    return model


def no_tokenizer(folder: Path) -> Path:
    shutil.copytree(DEMO_DRAFT, folder / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    return folder / "model"


def broken_config(folder: Path) -> Path:
    model = without_weights(folder / "model")
    (model / "config.json").write_text("{", encoding="utf-8")
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (nothing_there, "nothing is there"),
        (a_file, "a file is there"),
        (no_config, "has no config.json"),
        (no_weights, "has no weights"),
        (pickle_only, "only as pickle (pytorch_model.bin)"),
        (truncated, "is truncated"),
        (not_safetensors, "is truncated or not safetensors"),
        (no_tokenizer, "has no tokenizer.json"),
        (broken_config, "does not parse"),
    ],
)
def test_a_folder_that_holds_no_model(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    sentence = refusal(sys.executable, "-m", "target_service", "--port", "0", "--model", str(folder))
    assert said in sentence
    assert str(folder) in sentence


def test_the_draft_service_checks_its_folder_too(tmp_path: Path) -> None:
    folder = pickle_only(tmp_path)
    assert "only as pickle" in refusal(
        sys.executable, "-m", "draft_service", "--port", "0", "--model", str(folder)
    )


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "command",
    [
        ("target_service", "--model", str(DEMO_DRAFT)),
        ("draft_service", "--model", str(DEMO_DRAFT)),
        ("coordinator", "--target-address", "127.0.0.1:1"),
    ],
    ids=lambda command: command[0],
)
def test_a_port_in_use(command: tuple[str, ...], used_port: int) -> None:
    sentence = refusal(sys.executable, "-m", *command, "--port", str(used_port))
    assert f"cannot listen on 127.0.0.1:{used_port}" in sentence


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--no-such-option", "1"), "no-such-option"),
        (("--port", "99999"), "port is '99999'"),
        (("--drain-timeout-seconds", "soon"), "is 'soon'"),
    ],
)
@pytest.mark.parametrize(
    "service",
    [
        ("target_service", "--model", str(DEMO_DRAFT)),
        ("coordinator", "--target-address", "127.0.0.1:1"),
    ],
    ids=lambda service: service[0],
)
def test_an_option_that_is_wrong(service: tuple[str, ...], options: tuple[str, ...], said: str) -> None:
    assert said in refusal(sys.executable, "-m", *service, *options)


def test_a_service_that_does_not_exist() -> None:
    sentence = sentence_of(run(TANDEM, "serve", "nothing"))
    assert "'nothing'" in sentence


def test_a_target_that_does_not_answer() -> None:
    address = "127.0.0.1:1"
    options = ("--port", "0", "--target-address", address, "--start-timeout-seconds", "2")
    sentence = refusal(sys.executable, "-m", "coordinator", *options)
    assert f"the target service at {address} was not ready within 2 s" in sentence


def test_a_draft_of_another_vocabulary(target_address: str, tmp_path: Path) -> None:
    """Every rule that the pair breaks is told at once."""
    folder = save_model(
        random_model(1, vocab_size=2056, num_hidden_layers=1, max_position_embeddings=512), tmp_path
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with model_service("draft_service", folder) as draft:
        options = ("--port", "0", "--target-address", target_address, "--draft-address", address_of(draft))
        sentence = refusal(sys.executable, "-m", "coordinator", *options)
    assert "a vocabulary of 2056 tokens" in sentence
    assert "another tokenizer" in sentence
    assert "max_length is 512 for the draft" in sentence


def test_a_cluster_whose_model_is_not_there(tmp_path: Path) -> None:
    """Each child that fails says why, and then `tandem up` what became of the rest."""
    models = ("--target", str(tmp_path / "nowhere"), "--draft", str(DEMO_DRAFT))
    result = run(TANDEM, "up", *models, "--port", "0", "--threads", "1", "--log-level", "error")
    assert result.returncode != 0
    why, end = result.stderr.splitlines()
    assert why.startswith("error: ")
    assert "nothing is there" in why
    assert end.startswith("error: the target service ended with exit code 2")
