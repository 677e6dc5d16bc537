"""A process that cannot start prints one sentence and exits within seconds, not with code 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.processes import TANDEM, run, service

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


def test_a_target_that_does_not_answer_ends_the_start() -> None:
    address = "127.0.0.1:1"
    sentence = refusal(1, "coordinator", "--target-address", address, "--start-timeout-seconds", "0.5")
    assert f"the target service at {address} was not ready within 0.5 s" in sentence


def test_a_cluster_with_an_empty_model_folder_ends(tmp_path: Path) -> None:
    """Each failing child prints its reason, and then `tandem up` reports the end of the others."""
    models = ("--target", str(tmp_path), "--draft", "suffix")
    result = run(TANDEM, "up", *models, "--port", "0", "--threads", "1", "--log-level", "error")
    assert result.returncode != 0
    why, end = result.stderr.splitlines()
    assert why.startswith("error: ")
    assert "has no config.json" in why
    assert end.startswith("error: the target service ended with exit code 1")


def test_broken_rules_of_the_models_end_the_start(target_address: str) -> None:
    options = ("--target-address", target_address, "--method", "ngram", "--max-length", "48")
    sentence = refusal(2, "coordinator", *options)
    assert "speculative_method is ngram; it needs a draft service" in sentence
    assert "max_length is 48 for the coordinator" in sentence
