"""The command line of `tandem bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.settings import BenchSettings, parse
from tandem.errors import ConfigurationError


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
            *("--json", "a.json", "--svg", "a.svg", "--no-prefix", "--num-speculative-tokens", "3"),
        ]
    )

    assert (settings.batch, settings.temperature) == ((1, 2), (0.5,))
    assert settings.contenders == ("speculative", "one-process")
    assert (settings.json_file, settings.svg_file) == (Path("a.json"), Path("a.svg"))
    assert (settings.prefix, settings.phases, settings.num_speculative_tokens) == (False, True, 3)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(["--batch", "0", "--rounds", "x", "--dtype", "int8", "--contenders", "nobody"])

    message = str(caught.value)
    for words in (
        "--batch.0 is '0'",
        "--rounds is 'x'",
        "--dtype is 'int8'",
        "there is no contender 'nobody'",
    ):
        assert words in message


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])

    text = capsys.readouterr().out
    assert ended.value.code == 0
    for option in ("--pair", "--json", "--svg", "--vllm-python", "--no-phases", "shaped:200M:1:0.8"):
        assert option in text
