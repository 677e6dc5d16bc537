"""Options of measurements, as docs and modules call them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from benchmarks import pace
from benchmarks.coordinator_cost import CostSettings
from benchmarks.device_idle import IdleSettings
from benchmarks.pace import DelaySettings, Pace, PaceSettings
from benchmarks.studies.exactness import ExactnessSettings
from benchmarks.studies.hostile import HostileSettings
from benchmarks.studies.penalties import PenaltySettings
from benchmarks.studies.structured import StructuredSettings
from tandem.config.settings import FilledSettings, load_settings
from tandem.errors import ConfigurationError
from tandem_load.fakes import ScriptedSettings

HTTP = "http-readers"
GRPC = "grpc-readers"


@pytest.mark.parametrize(
    ("cls", "words", "values"),
    [
        (CostSettings, "", {"streams": 64, "rule": "greedy", "pairs": 1, "output_tokens": 200, "against": None}),
        (CostSettings, "--streams 8 --rule residual --pairs 10", {"streams": 8, "rule": "residual", "pairs": 10}),
        (IdleSettings, "--batch 1,4 --step-ms 3 --answers-first --max-sequences 4", {
            "batch": (1, 4), "step_ms": 3.0, "answers_first": True, "serve": None,
            "arguments": ["--max-sequences", "4"]}),
        (ExactnessSettings, "--model smollm2 --prompts 7", {"model": "smollm2", "prompts": 7}),
        (HostileSettings, "", {"kind": (), "attack": (), "seconds": 20.0}),
        (HostileSettings, f"{HTTP} {GRPC} --seconds 2", {"kind": (HTTP, GRPC), "seconds": 2.0}),
        (HostileSettings, "--seconds 2 inputs", {"kind": ("inputs",)}),
        (HostileSettings, "--attack inputs a:1 80 --port 0 --log-level warning", {"attack": ("inputs", "a:1", "80")}),
        (PenaltySettings, "--chat --prompts 2 --address a:1", {"chat": True, "prompts": 2, "address": "a:1"}),
        (StructuredSettings, "--kill 3", {"kill": 3.0, "temperatures": (0.0, 1.0), "answers": 1000}),
        (StructuredSettings, "--temperatures 0,0.5 --pair smollm2", {"temperatures": (0.0, 0.5), "pair": "smollm2"}),
        (ScriptedSettings, "--role draft --step-ms 1 --port 0", {"role": "draft", "step_ms": 1.0, "acceptance": 0.72}),
        (PaceSettings, "--model x --role target --pace 6,1.5 --steps f --port 0 --no-x", {
            "role": "target", "pace": Pace(0.006, 0.0015), "arguments": ["--model", "x", "--port", "0", "--no-x"]}),
        (DelaySettings, "--to a:1 --ms 0.5 --log-level warning", {"to": "a:1", "ms": 0.5, "port": 0}),
    ],
)  # fmt: skip
def test_a_measurement_reads_its_options(
    cls: type[FilledSettings], words: str, values: dict[str, Any]
) -> None:
    settings = load_settings(cls, shlex.split(words), "test")
    assert {name: getattr(settings, name) for name in values} == values


@pytest.mark.parametrize(
    ("cls", "words", "sentence"),
    [
        (CostSettings, "--streems 3 --pairs 0",
            "pairs is 0; it must be at least 1; --streems is not an option; did you mean --streams?"),
        (HostileSettings, "input", "kind.0 is input; it must be 'inputs', "),
        (PaceSettings, "--role target --model x", "role is target; it needs --pace"),
        (PaceSettings, "--role target --pace fast", "pace is 'fast'; it must be VERIFY_MS,DRAFT_STEP_MS"),
    ],
)  # fmt: skip
def test_wrong_options_of_a_measurement_are_told_at_once(
    cls: type[FilledSettings], words: str, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        load_settings(cls, shlex.split(words), "test")
    assert str(refusal.value).startswith(sentence)


def test_a_process_with_wrong_options_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        pace.main(["--role", "delay", "--to", "a:1"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: --ms is missing; give it, or set TANDEM_DELAY_MS\n"
