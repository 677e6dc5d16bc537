"""The command line of `tandem bench`, and which contenders can start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench import BenchSettings, parse
from benchmarks.contenders import CONTENDERS, Setup
from tandem.errors import ConfigurationError
from tests.paths import DEMO_DRAFT, DEMO_TARGET


def test_without_options_everything_is_compared() -> None:
    settings = parse([])

    assert settings == BenchSettings()
    assert settings.contenders == tuple(CONTENDERS)
    assert settings.batch == (1, 4, 16)
    assert settings.temperature == (0.0, 1.0)
    assert settings.model_threads == settings.cores


def test_options_are_read() -> None:
    settings = parse(
        [
            *("--batch", "1,2", "--temperature", "0.5", "--contenders", "speculative,one-process"),
            *("--json", "a.json", "--steps", "--no-prefix", "--fresh", "--num-speculative-tokens", "3"),
        ]
    )

    assert (settings.batch, settings.temperature) == ((1, 2), (0.5,))
    assert settings.contenders == ("speculative", "one-process")
    assert (settings.json_file, settings.steps, settings.fresh) == (Path("a.json"), True, True)
    assert (settings.prefix, settings.phases, settings.num_speculative_tokens) == (False, True, 3)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(["--batch", "0", "--rounds", "x", "--dtype", "int8", "--contenders", "nobody"])

    message = str(caught.value)
    for words in (
        "batch.0 is 0",
        "rounds is 'x'",
        "dtype is int8",
        "there is no contender 'nobody'",
    ):
        assert words in message


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(
        target=DEMO_TARGET,
        draft=DEMO_DRAFT,
        dtype="float32",
        threads=1,
        device="cpu",
        max_length=64,
        max_sequences=2,
        num_speculative_tokens=4,
        logs=tmp_path,
    )


def test_a_head_is_named(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))

    assert replace(setup, head=tmp_path).head_folder("eagle3") == tmp_path


def test_a_target_without_a_head_leaves_the_contender_out(setup: Setup, tmp_path: Path) -> None:
    elsewhere = replace(setup, target=tmp_path / "target")

    assert CONTENDERS["eagle3"].absent(elsewhere) == "name the folder of the target's eagle3 head with --head"
    assert CONTENDERS["eagle3"].absent(replace(setup, head=DEMO_DRAFT)) != "", "a draft model is no head"
