"""A coordinator that breaks a rule does not start: exit code 2, one sentence for each, no traceback."""

from __future__ import annotations

from tests.end_to_end.processes import service


def test_broken_rules_of_the_configuration_end_the_start() -> None:
    options = ("--target-address", "127.0.0.1:1", "--num-speculative-tokens", "0", "--max-num-steps", "4")
    with service("coordinator", *options) as process:
        assert process.wait(60) == 2
        assert process.stderr == (
            "error: num_speculative_tokens is 0; it must be between 1 and 128; max_num_steps is 4; it must be 1: each "
            "step of the target verifies a proposal, and its result decides on the next\n"
        )


def test_broken_rules_of_the_models_end_the_start(target_address: str) -> None:
    options = ("--target-address", target_address, "--method", "ngram", "--max-length", "48")
    with service("coordinator", *options) as process:
        assert process.wait(60) == 2
        errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "speculative_method is ngram; it needs a draft service: name it with draft_address" in errors[0]
    assert "max_length is 48 for the coordinator" in errors[0]
