"""A service's help: every option in a group, with its default and its variable, in the width of a terminal."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel

from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.settings import DraftSettings
from tandem.config.help import OTHERS, group_of, help_text
from target_service.settings import TargetSettings
from tests.commands import Commands

SERVICES = [CoordinatorSettings, DraftSettings, TargetSettings]


@pytest.mark.parametrize("cls", SERVICES)
def test_every_option_appears_once_in_a_group(cls: type[BaseModel]) -> None:
    assert [name for name in cls.model_fields if group_of(cls, name) == OTHERS] == []
    text = help_text(cls, "tandem serve x", 80)
    for name in cls.model_fields:
        assert len(re.findall(rf"^  --{name.replace('_', '-')},? ", text, re.MULTILINE)) == 1
        assert re.search(rf"TANDEM_([A-Z]+_)?{name.upper()}\b", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("cls", SERVICES)
def test_it_fits_a_terminal(cls: type[BaseModel]) -> None:
    too_long = [line for line in help_text(cls, "tandem serve x", 80).splitlines() if len(line) > 80]
    assert all(len(line.split()) <= 3 for line in too_long), "only what cannot be broken is longer"


def test_defaults_and_variables_are_shown_together() -> None:
    text = re.sub(r"\s+", " ", help_text(TargetSettings, "tandem serve target", 80))
    assert text.startswith("Usage: tandem serve target [OPTIONS] Serve a target model. Model: --model <path>")
    assert "[env var: TANDEM_TARGET_MODEL; required]" in text
    assert "[env var: TANDEM_TARGET_DEVICE; default: cpu]" in text
    assert "--dtype <auto|float32|bfloat16|float16>" in text
    assert "--enforce-eager / --no-enforce-eager" in text
    coordinator = help_text(CoordinatorSettings, "tandem serve coordinator", 80)
    assert "TANDEM_NUM_SPECULATIVE_TOKENS" in coordinator, "what services share has no service in its name"


@pytest.mark.parametrize("service", ["draft", "target", "coordinator"])
def test_help_is_printed_for_either_name(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(monkeypatch, capsys)
    text = commands.succeed("serve", service, "--help")
    assert text.startswith(f"Usage: tandem serve {service} [OPTIONS]\n\n  ")
    assert commands.succeed("serve", service, "-h") == text
