"""A process that cannot start prints one sentence and exits within seconds, not with code 0."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import run_here
from tests.end_to_end.models import random_model, save_model
from tests.end_to_end.processes import TANDEM, Nursery, run, service
from tests.paths import DEMO_DRAFT

pytestmark = pytest.mark.slow


def refusal(code: int, package: str, *options: str) -> str:
    """Run a service that must end with this exit code, and return its one sentence."""
    with service(package, *options, "--log-level", "error") as process:
        assert process.wait() == code
        return sentence_of(process.stderr)


def sentence_of(written: str) -> str:
    """Return the only line, which must be an error's sentence."""
    (line,) = written.splitlines()
    assert line.startswith("error: ")
    return line


def without_weights(folder: Path) -> Path:
    shutil.copytree(DEMO_DRAFT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def nothing_there(folder: Path) -> Path:
    return folder / "nowhere"


def pickle_only(folder: Path) -> Path:
    model = without_weights(folder / "model")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return model


def truncated(folder: Path) -> Path:
    model = without_weights(folder / "model")
    weights = (DEMO_DRAFT / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return model


def many_layers(folder: Path) -> Path:
    shutil.copytree(DEMO_DRAFT, folder / "model")
    set_config(folder / "model", num_hidden_layers=10**7)
    return folder / "model"


def no_numbers(folder: Path) -> Path:
    """Only a computation shows it."""
    shutil.copytree(DEMO_DRAFT, folder / "model")
    set_config(folder / "model", rms_norm_eps=-1e9)
    return folder / "model"


def set_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (nothing_there, "nothing is there"),
        (pickle_only, "only as pickle (pytorch_model.bin)"),
        (truncated, "is damaged"),
        (many_layers, "num_hidden_layers is '10000000'"),
    ],
)
def test_a_folder_without_a_model_is_refused(
    make: Callable[[Path], Path], expected: str, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    sentence = refusal(1, "target_service", "--model", str(folder))
    assert expected in sentence
    assert str(folder) in sentence


@pytest.mark.parametrize("package", ["target_service", "draft_service"])
def test_a_model_with_non_finite_logits_is_refused(package: str, tmp_path: Path) -> None:
    sentence = refusal(1, package, "--model", str(no_numbers(tmp_path)), "--threads", "1")
    assert "are not finite numbers" in sentence


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
def test_a_port_in_use_is_reported(command: tuple[str, ...], used_port: int) -> None:
    sentence = refusal(2, *command, "--port", str(used_port))
    assert f"cannot listen on 127.0.0.1:{used_port}" in sentence


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--no-such-option", "1"), "no-such-option"),
        (("--port", "99999"), "port is 99999"),
        (("--drain-timeout-seconds", "soon"), "is 'soon'"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ("target", "--model", str(DEMO_DRAFT)),
        ("coordinator", "--target-address", "127.0.0.1:1"),
    ],
    ids=lambda command: command[0],
)
def test_an_invalid_option_is_refused(
    command: tuple[str, ...], options: tuple[str, ...], expected: str
) -> None:
    result = run_here("serve", *command, *options)
    assert result.returncode == 2
    assert expected in sentence_of(result.stderr)


def test_a_target_that_does_not_answer_ends_the_start() -> None:
    address = "127.0.0.1:1"
    sentence = refusal(1, "coordinator", "--target-address", address, "--start-timeout-seconds", "0.5")
    assert f"the target service at {address} was not ready within 0.5 s" in sentence


def test_a_draft_with_another_vocabulary_is_refused(
    services: Nursery, target_address: str, tmp_path: Path
) -> None:
    """The error names every rule that the pair breaks."""
    folder = save_model(
        random_model(1, vocab_size=2056, num_hidden_layers=1, max_position_embeddings=512), tmp_path
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    draft = services.started("draft_service", folder)
    options = (
        "--target-address",
        target_address,
        "--draft-address",
        draft.address,
        "--vocabulary-mapping",
        "off",
    )
    sentence = refusal(2, "coordinator", *options)
    draft.kill()
    assert "another tokenizer" in sentence
    assert "vocabulary_mapping is off" in sentence
    assert "max_length is 512 for the draft" in sentence


def test_a_cluster_with_an_empty_model_folder_ends(tmp_path: Path) -> None:
    """Each failing child prints its reason, and then `tandem up` reports the end of the others."""
    models = ("--target", str(tmp_path), "--draft", str(DEMO_DRAFT))
    result = run(TANDEM, "up", *models, "--port", "0", "--threads", "1", "--log-level", "error")
    assert result.returncode != 0
    why, end = result.stderr.splitlines()
    assert why.startswith("error: ")
    assert "has no config.json" in why
    assert end.startswith("error: the target service ended with exit code 1")


def test_broken_rules_of_the_configuration_end_the_start() -> None:
    options = ("--target-address", "127.0.0.1:1", "--num-speculative-tokens", "0", "--max-num-steps", "4")
    sentence = refusal(2, "coordinator", *options)
    assert "num_speculative_tokens is 0" in sentence
    assert "max_num_steps is 4" in sentence


def test_broken_rules_of_the_models_end_the_start(target_address: str) -> None:
    options = ("--target-address", target_address, "--method", "ngram", "--max-length", "48")
    sentence = refusal(2, "coordinator", *options)
    assert "speculative_method is ngram; it needs a draft service" in sentence
    assert "max_length is 48 for the coordinator" in sentence
