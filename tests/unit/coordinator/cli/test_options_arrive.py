"""Every option of every service arrives by a flag, a variable or a config file, and through `tandem up`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.up import UpOptions, not_read, service_arguments
from coordinator.settings.coordinator import CoordinatorSettings
from draft_service.settings import DraftSettings
from tandem.config.layers import _kind
from tandem.errors import ConfigurationError
from tandem.settings import ServerSettings, load_settings
from target_service.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET

SERVICES: dict[str, tuple[type[ServerSettings], list[str]]] = {
    "coordinator": (CoordinatorSettings, ["--target-address", "127.0.0.1:1"]),
    "draft": (DraftSettings, ["--model", str(DEMO_TARGET)]),
    "target": (TargetSettings, ["--model", str(DEMO_TARGET)]),
}
SAMPLES: dict[str, object] = {
    "otlp_endpoint": "http://127.0.0.1:4317",
    "host": "127.0.0.2",
    "http_host": "127.0.0.2",
    "prometheus_host": "127.0.0.2",
    "cors_origin": "https://chat.example",
    "draft_ahead": 3,
    "target_address": "127.0.0.1:2",
    "draft_address": "127.0.0.1:2",
    "device": "cuda",
    "draft_devices": "cuda",
    "max_num_steps": 2,
    "rejection_sampling_strategy": "strict",
    "speculative_method": "ngram",
    "draft_load_config": '{"load_format": "dummy"}',
    "eagle_aux_hidden_state_layer_ids": [0, 1],
    "synthetic_acceptance_rates": [0.5, 0.5],
}
"""Values of options whose type alone does not say one."""
SOURCES = {"config_file", "section_name", "speculative_config"}
"""Options that name sources of others."""
OTHER_IN_FILES = {("draft", "model"), ("draft", "tensor_parallel_size")}
"""A file is shared, and these words are vLLM's for `draft_model_path` and `draft_tensor_parallel_size` there."""
BY_KIND: dict[str, object] = {"bool": True, "path": "/nowhere/file", "str": "word"}


def sample(cls: type[ServerSettings], name: str) -> Any:
    """A value that differs from the default."""
    if name in SAMPLES:
        return SAMPLES[name]
    field = cls.model_fields[name]
    kind = _kind(field.annotation)
    if kind == "bool":
        return not field.default
    if "|" in kind:
        return next(word for word in kind.split("|") if word != field.default)
    if kind == "int":
        return (field.default or 0) + 1
    if kind == "float":
        return (field.default or 1.0) / 2
    return BY_KIND[kind]


def outcome(cls: type[ServerSettings], name: str, arguments: list[str]) -> object:
    """The option's value, or the sentence that refuses it."""
    try:
        return getattr(load_settings(cls, arguments, "tandem"), name)
    except ConfigurationError as error:
        return str(error)


def flag(name: str, value: object) -> list[str]:
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{word}" if value else f"--no-{word}"]
    return [f"--{word}", json.dumps(value) if isinstance(value, list) else str(value)]


def config_file(folder: Path, values: dict[str, object]) -> list[str]:
    (folder / "file.json").write_text(json.dumps(values))
    return ["--config-file", str(folder / "file.json")]


def each() -> list[Any]:
    return [
        pytest.param(service, name, id=f"{service}-{name}")
        for service, (cls, _) in SERVICES.items()
        for name in cls.model_fields
        if name not in SOURCES
    ]


def through_up(service: str, options: UpOptions) -> tuple[list[str], list[str]]:
    """The command line that `tandem up` gives a service, and the variables that it says are not read."""
    arguments = service_arguments(options)
    words = getattr(arguments, service)
    assert words is not None
    if service == "coordinator":
        words = [*words, "--target-address", "127.0.0.1:1", "--draft-address", "127.0.0.1:1"]
    return words, [sentence.partition(" ")[0] for sentence in not_read(arguments, os.environ)]


@pytest.mark.parametrize(("service", "name"), each())
def test_an_option_arrives_from_every_source(
    service: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, needed = SERVICES[service]
    value = sample(cls, name)
    base = [] if needed[0] == flag(name, "")[0] else needed
    by_flag = outcome(cls, name, [*base, *flag(name, value)])
    assert by_flag != cls.model_fields[name].default
    if "config_file" in cls.model_fields and (service, name) not in OTHER_IN_FILES:
        assert outcome(cls, name, [*base, *config_file(tmp_path, {name: value})]) == by_flag
    variable = f"{cls.env_prefix}{name.upper()}"
    with monkeypatch.context() as environment:
        environment.setenv(variable, json.dumps(value) if isinstance(value, list | bool) else str(value))
        assert outcome(cls, name, base) == by_flag
        words, not_read_here = through_up(service, UpOptions())
        assert variable in not_read_here or outcome(cls, name, words) == by_flag
    if service == "coordinator" and flag(name, "")[0] not in words:
        words, _ = through_up(service, UpOptions(config_file=Path(config_file(tmp_path, {name: value})[1])))
        assert outcome(cls, name, words) == by_flag


@pytest.mark.parametrize("name", [each.name for each in fields(UpOptions)])
def test_a_flag_of_up_reaches_a_service(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("{}")
    values: dict[str, Any] = {
        "model": str(DEMO_DRAFT),
        "target": str(DEMO_DRAFT),
        "draft": "ngram",
        "method": "suffix",
        "device": "cuda",
        "target_device": "cuda",
        "draft_device": "cuda",
        "engine": "tandem",
        "dtype": "bfloat16",
        "chat_template": tmp_path / "file.json",
        "config_file": tmp_path / "file.json",
        "http": False,
        "insecure": True,
        "log_level": "debug",
        "draft_ahead": "off",
        "served_model_name": "name",
        "host": "127.0.0.2",
        "target_memory_utilization": 0.5,
        "draft_memory_utilization": 0.5,
    }
    if name == "api_key":
        return  # goes by the environment
    assert service_arguments(UpOptions(**{name: values.get(name, 3)})) != service_arguments(UpOptions())


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_head_that_a_file_or_a_variable_names_is_hosted_by_the_target(
    is_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file.json").write_text('{"method": "eagle3"}')
    if is_variable:
        monkeypatch.setenv("TANDEM_SPECULATIVE_METHOD", "eagle3")
    arguments = service_arguments(UpOptions(config_file=None if is_variable else tmp_path / "file.json"))
    assert arguments.draft is None
    assert arguments.target[arguments.target.index("--draft-model") + 1] == str(DEMO_EAGLE3)
