"""The models of `tandem up` run where they are told to, and share an accelerator that both are on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.cli.up.arguments import UpOptions, service_arguments
from coordinator.cli.up.devices import DeviceOptions
from draft_service.settings import DraftSettings
from tandem.settings import load_settings
from target_service.settings import TargetSettings
from tests.commands import Commands


def placed(devices: DeviceOptions, **options: object) -> tuple[TargetSettings, DraftSettings]:
    """The settings that the services make of their command lines and the environment."""
    arguments = service_arguments(UpOptions(devices=devices, **options))  # type: ignore[arg-type]
    assert arguments.draft is not None
    return (
        load_settings(TargetSettings, arguments.target, "test"),
        load_settings(DraftSettings, arguments.draft, "test"),
    )


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        (DeviceOptions(), "cpu", "cpu"),
        (DeviceOptions("gpu:1"), "cuda:1", "cuda:1"),
        (DeviceOptions("cpu", "cuda:0", "cuda:1"), "cuda:0", "cuda:1"),
        (DeviceOptions("cuda:2", draft_device="cpu"), "cuda:2", "cpu"),
        (DeviceOptions("cpu", target_device="gpu"), "cuda", "cpu"),
    ],
)
def test_each_model_runs_on_its_device(options: DeviceOptions, target: str, draft: str) -> None:
    settings = placed(options)
    assert (settings[0].compute_device, settings[1].compute_device) == (target, draft)


def test_the_drafts_device_on_the_command_line_is_stronger_than_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.json"
    file.write_text(json.dumps({"draft_devices": "cuda:3"}), encoding="utf-8")
    assert placed(DeviceOptions("cuda:0"), config_file=file)[1].compute_device == "cuda:3"
    named = placed(DeviceOptions("cuda:0", draft_device="cuda:1"), config_file=file)
    assert named[1].compute_device == "cuda:1"


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        (DeviceOptions("cuda"), (0.65, 0.25)),
        (DeviceOptions("cpu", "cuda", "gpu:0"), (0.65, 0.25)),
        (DeviceOptions("cuda", draft_memory_utilization=0.1), (0.65, 0.1)),
        (DeviceOptions("cpu", "cuda:0", "cuda:1"), (None, None)),
        (DeviceOptions("cpu", "cuda:0", "cuda:1", 0.8, 0.7), (0.8, 0.7)),
        (DeviceOptions("cpu"), (None, None)),
    ],
)
def test_models_on_one_accelerator_share_its_memory(
    options: DeviceOptions, shares: tuple[float | None, float | None]
) -> None:
    target, draft = placed(options)
    assert (target.device_memory_utilization, draft.device_memory_utilization) == shares


def test_a_draft_without_a_model_takes_no_share() -> None:
    target, draft = placed(DeviceOptions("cuda"), draft="ngram")
    assert (target.device_memory_utilization, draft.device_memory_utilization) == (None, None)


@pytest.mark.parametrize(
    ("variable", "shares"),
    [
        ("TANDEM_TARGET_DEVICE_MEMORY_UTILIZATION", (0.4, 0.25)),
        ("TANDEM_DRAFT_DEVICE_MEMORY_UTILIZATION", (0.65, 0.4)),
        ("TANDEM_DEVICE_MEMORY_UTILIZATION", (0.4, 0.4)),
    ],
)
def test_the_environment_is_stronger_than_the_default_share(
    variable: str, shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0.4")
    target, draft = placed(DeviceOptions("cuda:1"))
    assert (target.device_memory_utilization, draft.device_memory_utilization) == shares


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--target-memory-utilization", "1.5"),
            "--target-memory-utilization is 1.5; it must be above 0 and at most 1",
        ),
        (
            ("--device", "cuda", "--target-memory-utilization", "0.9"),
            "--target-memory-utilization is 0.9 and --draft-memory-utilization is 0.25, 1.15 of cuda together; it must "
            "be at most 1",
        ),
    ],
)
def test_shares_that_no_device_has_are_refused_before_anything_starts(
    words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in Commands(monkeypatch, capsys).fail(2, "up", *words)
