"""The processes of `tandem up`; options that it refuses; every option of every service arrives from every source."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.config.help import kind as kind_of
from tandem.config.settings import ServerSettings, load_settings
from tandem.errors import ConfigurationError, ServiceUnavailableError
from tandem.model_sources import bundled
from tandem.serving.children import Child
from tandem_coordinator.cli.up import UpOptions, not_read, read_start, service_arguments, unequal_lengths
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_draft.service import DraftService
from tandem_draft.settings import DraftSettings
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings
from tests.commands import Commands
from tests.paths import DEMO_DRAFT, DEMO_EAGLE3, DEMO_TARGET, SMOLLM2_EAGLE3


class Speaker(Child):
    """A child that has written these lines."""

    def __init__(self, *lines: str) -> None:  # no process
        self._lines = lines

    async def lines(self) -> AsyncIterator[str]:
        for line in self._lines:
            yield line

    async def obituary(self) -> str:
        return "the coordinator service ended with exit code 2"


async def test_the_news_of_a_start_are_read_in_any_order() -> None:
    said = ("tandem coordinator: drafting is slow", "tandem coordinator: http on http://a:1")
    news = await read_start(Speaker(*said, "noise", "tandem coordinator: ready on a:2", "later"))
    assert news == {"drafting ": "is slow", "http on ": "http://a:1", "ready on ": "a:2"}
    with pytest.raises(ServiceUnavailableError, match="exit code 2"):
        await read_start(Speaker(*said))


def test_all_services_have_one_length_of_proposals(tmp_path: Path) -> None:
    """A draft draws as many tokens as it is asked for."""
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"num_speculative_tokens": 5}))
    for options, target, coordinator in (
        (UpOptions(model="demo"), None, None),
        (UpOptions(model="demo", num_speculative_tokens=3), "3", "3"),
        (UpOptions(model="demo", config_file=file), "5", None),
    ):
        arguments = service_arguments(options)
        assert value(arguments.target, "--num-speculative-tokens") == target
        assert value(arguments.coordinator, "--num-speculative-tokens") == coordinator


def value(words: list[str] | None, option: str) -> str | None:
    """Return the value of the option; None without the option."""
    assert words is not None
    return words[words.index(option) + 1] if option in words else None


BY_SUFFIX, DEMO = (None, "suffix"), (str(DEMO_DRAFT), None)
"""Model and method of a draft."""


@pytest.mark.parametrize(
    ("options", "target", "draft", "head"),
    [
        # a method is named, or the engine has no heads
        (UpOptions(model="smollm2", draft="suffix"), "smollm2", BY_SUFFIX, None),
        (UpOptions(model="smollm2", method="suffix"), "smollm2", BY_SUFFIX, None),
        (UpOptions(model="smollm2", engine="vllm"), "smollm2", BY_SUFFIX, None),
        (UpOptions(), DEMO_TARGET, DEMO, None),
        (UpOptions(target=str(DEMO_TARGET)), DEMO_TARGET, BY_SUFFIX, None),
        (UpOptions(model="demo"), DEMO_TARGET, DEMO, None),
        (UpOptions(model=str(DEMO_TARGET)), DEMO_TARGET, BY_SUFFIX, None),
        (UpOptions(draft="ngram"), DEMO_TARGET, (None, "ngram"), None),
        (UpOptions(draft="suffix"), DEMO_TARGET, BY_SUFFIX, None),
        (UpOptions(draft="owner/model"), DEMO_TARGET, ("owner/model", None), None),
        (UpOptions(target=str(DEMO_TARGET), draft=str(DEMO_DRAFT)), DEMO_TARGET, DEMO, None),
        # bundled heads, which the target hosts
        (UpOptions(method="eagle3"), DEMO_TARGET, None, DEMO_EAGLE3),
        (UpOptions(method="medusa"), DEMO_TARGET, None, DEMO_TARGET.parent / "medusa"),
        (UpOptions(model="smollm2"), "smollm2", None, SMOLLM2_EAGLE3),
        (UpOptions(target="smollm2"), "smollm2", None, SMOLLM2_EAGLE3),
        (UpOptions(model="smollm2", method="eagle3"), "smollm2", None, SMOLLM2_EAGLE3),
    ],
)
def test_the_named_draft_is_started_or_hosted_by_the_target(
    options: UpOptions, target: object, draft: tuple[str | None, str | None] | None, head: Path | None
) -> None:
    arguments = service_arguments(options)
    assert value(arguments.target, "--model") == str(target)
    assert value(arguments.target, "--draft-model") == (head and str(head))
    own = arguments.draft
    assert (own and (value(own, "--model"), value(own, "--method"))) == draft


@pytest.mark.parametrize("source", ["its config", "--method", "a file", "a variable"])
def test_a_drafting_head_is_hosted_by_the_target(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"architectures": ["LlamaForCausalLMEagle3"]} if source == "its config" else {}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "file.json").write_text('{"method": "eagle3"}')
    options = UpOptions(draft=str(tmp_path))
    head = tmp_path
    if source == "--method":
        options = UpOptions(draft=str(tmp_path), method="eagle3")
    elif source == "a file":
        options = UpOptions(config_file=tmp_path / "file.json")
        head = DEMO_EAGLE3
    elif source == "a variable":
        monkeypatch.setenv("TANDEM_SPECULATIVE_METHOD", "eagle3")
        options = UpOptions()
        head = DEMO_EAGLE3
    arguments = service_arguments(options)
    assert arguments.draft is None
    assert value(arguments.target, "--draft-model") == str(head)


def test_a_target_drafts_by_its_layers_where_the_method_says_so() -> None:
    arguments = service_arguments(UpOptions(target=str(DEMO_TARGET), method="mtp"))
    assert arguments.draft is None
    assert value(arguments.target, "--method") == "mtp"


@pytest.mark.parametrize(
    ("options", "variables", "model"),
    [
        (UpOptions(), {}, "smollm2"),
        (UpOptions(draft="ngram"), {}, "smollm2"),
        (UpOptions(draft="none"), {}, "smollm2"),
        (UpOptions(method="eagle3"), {}, "smollm2"),
        # SmolLM2 has no such head, and these drafts may be for the target that was the default before.
        (UpOptions(method="medusa"), {}, "demo"),
        (UpOptions(), {"TANDEM_SPECULATIVE_METHOD": "medusa"}, "demo"),
        (UpOptions(draft=str(DEMO_DRAFT)), {}, "demo"),
        (UpOptions(), {"TANDEM_DRAFT_MODEL_PATH": str(DEMO_DRAFT)}, "demo"),
    ],
)
def test_the_default_is_a_model_that_chats_where_its_packages_are_there(
    options: UpOptions, variables: dict[str, str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.model_sources.bundled.smollm2_missing", list)
    for name, words in variables.items():
        monkeypatch.setenv(name, words)
    arguments = service_arguments(options)
    assert arguments.model == model
    assert value(arguments.target, "--model") == {"smollm2": "smollm2", "demo": str(DEMO_TARGET)}[model]
    monkeypatch.setattr("tandem.model_sources.bundled.smollm2_missing", lambda: ["gguf"])
    assert service_arguments(options).model == "demo"


def test_the_fastest_rule_is_used_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    option = "--rejection-sampling-strategy"
    for options in (UpOptions(), UpOptions(model="smollm2"), UpOptions(method="eagle3")):
        assert value(service_arguments(options).coordinator, option) == "auto"
    assert value(service_arguments(UpOptions(draft="none")).coordinator, option) is None
    file = tmp_path / "tandem.json"
    file.write_text(json.dumps({"rejection_sample_method": "block"}), encoding="utf-8")
    arguments = service_arguments(UpOptions(model="smollm2", config_file=file))
    assert value(arguments.coordinator, option) is None
    monkeypatch.setenv("TANDEM_COORDINATOR_REJECTION_SAMPLING_STRATEGY", "strict")
    assert value(service_arguments(UpOptions(model="smollm2")).coordinator, option) is None


def test_drafts_propose_for_requests_with_penalties_unless_it_is_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    option = "--draft-model-penalties"
    assert value(service_arguments(UpOptions()).coordinator, option) == "draft"
    assert value(service_arguments(UpOptions(draft="none")).coordinator, option) is None
    for variable, given in (("DRAFT_MODEL_PENALTIES", "refuse"), ("COMPATIBILITY", "max")):
        with monkeypatch.context() as environment:
            environment.setenv(f"TANDEM_COORDINATOR_{variable}", given)
            assert value(service_arguments(UpOptions()).coordinator, option) is None


def test_smollm2_is_sampled_as_its_card_advises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    option = "--override-generation-config"
    card = json.dumps({"temperature": 0.2, "top_p": 0.9})
    assert value(service_arguments(UpOptions(model="smollm2")).coordinator, option) == card
    assert value(service_arguments(UpOptions(model="demo")).coordinator, option) is None
    own = UpOptions(model="smollm2", override_generation_config='{"top_k": 5}')
    assert value(service_arguments(own).coordinator, option) == '{"top_k": 5}'
    without = service_arguments(UpOptions(model="smollm2", generation_config="vllm")).coordinator
    assert value(without, option) is None
    assert value(without, "--generation-config") == "vllm"
    for name, given in (("GENERATION_CONFIG", "vllm"), ("OVERRIDE_GENERATION_CONFIG", "{}")):
        with monkeypatch.context() as environment:
            environment.setenv(f"TANDEM_COORDINATOR_{name}", given)
            assert value(service_arguments(UpOptions(model="smollm2")).coordinator, option) is None


def test_smollm2_without_its_head_needs_no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "SMOLLM2_FOLDERS", (tmp_path,))
    assert value(service_arguments(UpOptions(model="smollm2")).draft, "--method") == "suffix"


def test_a_model_may_load_for_longer_than_a_lone_coordinator_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    default = CoordinatorSettings(target_address="127.0.0.1:1").start_timeout_seconds
    option = "--start-timeout-seconds"
    assert float(value(service_arguments(UpOptions()).coordinator, option) or 0) > 10 * default
    monkeypatch.setenv("TANDEM_COORDINATOR_START_TIMEOUT_SECONDS", "5")
    assert option not in service_arguments(UpOptions()).coordinator


def test_the_coordinator_listens_where_host_says_or_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_COORDINATOR_HTTP_HOST", "0.0.0.0")
    monkeypatch.setenv("TANDEM_COORDINATOR_INSECURE", "true")

    def hosts(options: UpOptions) -> tuple[str, str]:
        words = [*service_arguments(options).coordinator, "--target-address", "127.0.0.1:1"]
        settings = load_settings(CoordinatorSettings, words, "test")
        return settings.host, settings.http_host

    assert hosts(UpOptions()) == ("127.0.0.1", "0.0.0.0")
    assert hosts(UpOptions(host="::1")) == ("::1", "::1")
    monkeypatch.delenv("TANDEM_COORDINATOR_HTTP_HOST")
    monkeypatch.delenv("TANDEM_COORDINATOR_INSECURE")
    with pytest.raises(ConfigurationError, match="or insecure, where the network is trusted"):
        hosts(UpOptions(host="0.0.0.0"))
    assert hosts(UpOptions(host="0.0.0.0", insecure=True)) == ("0.0.0.0", "0.0.0.0")


@pytest.mark.parametrize(("content", "draft"), [({"method": "ngram"}, None), ({}, str(DEMO_DRAFT))])
def test_a_config_file_names_the_draft_where_the_command_line_does_not_and_the_length_of_all(
    content: dict[str, str], draft: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "tandem.json"
    file.write_text(json.dumps(content | {"max_length": 256}), encoding="utf-8")
    arguments = service_arguments(UpOptions(config_file=file))
    assert arguments.draft is not None
    assert value(arguments.target, "--max-length") == "256"
    assert value(arguments.draft, "--max-length") == (draft and "256")
    assert value(arguments.coordinator, "--config-file") == str(file)
    assert value(arguments.draft, "--model") == draft
    settings = load_settings(DraftSettings, arguments.draft, "test")
    assert settings.method == content.get("method", "standalone")


def test_http_takes_another_port_where_its_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("tandem_coordinator.cli.up.HTTP_PORT", taken.getsockname()[1])
        assert value(service_arguments(UpOptions()).coordinator, "--http-port") == "0"
    assert value(service_arguments(UpOptions(http_port=81)).coordinator, "--http-port") == "81"
    assert "--http-port" not in service_arguments(UpOptions(http=False)).coordinator


OTHER = ("--target", str(DEMO_TARGET))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--device", "tpu"), "--device is 'tpu'; it must be cpu, cuda, cuda:N, gpu or gpu:N"),
        (("--target-device", "tpu"), "--target-device is 'tpu'; it must be cpu, cuda, cuda:N, gpu or gpu:N"),
        (("--draft-devices", "0"), "--draft-device is '0'; it must be cpu, cuda, cuda:N, gpu or gpu:N"),
        (("--dtype", "int8"), "--dtype is int8; it must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (("--target", "no/such/folder"), "--target is no/such/folder; there is no such folder"),
        (("--model", "demo", "--target", "x"), "--model is demo and --target is x, which both name the target"),
        (("--model", "smollm3"), "--model is smollm3; there is no such folder"),
        (("--draft", "nagram"), "a Hugging Face id, or ngram, suffix, none"),
        (("--draft", "setup.py", "--target", "pyproject.toml"), "--target is pyproject.toml; a file is there"),
        (("--chat-template", "no-such.jinja"), "--chat-template is no-such.jinja: path does not point to a file"),
        (("--config-file", "no-such.toml"), "no-such.toml"),
        (("--tool-call-parser", "qwen3-coder"), "--tool-call-parser is 'qwen3-coder'; it must be one of auto, none, "),
        (("--tool-call-parser", "qwen3-coder"), "; did you mean qwen3_coder?"),
        (("--reasoning-parser", "deepseek-r1"), "; did you mean deepseek_r1?"),
        ((*OTHER, "--method", "eagle3"), "--method is eagle3; name the folder of such a head with --draft"),
        ((*OTHER, "--method", "lookahead"),
            "--method is 'lookahead'; it must be one of standalone, ngram, suffix, eagle, eagle3, medusa, mtp, dflash"),
        ((*OTHER, "--method", "ngram_gpu"),
            "--method is 'ngram_gpu'; it is not available in this version: prompt lookup needs no GPU here; use ngram"),
        ((*OTHER, "--method", "mtp", "--draft", "somewhere"),
            "--method is mtp, whose weights lie in the target's own checkpoint"),
        (("--target-memory-utilization", "1.5"), "is 1.5; it must be above 0 and at most 1"),
        (("--device", "cuda", "--target-memory-utilization", "0.9"), "1.15 of cuda together; it must be at most 1"),
    ],
)  # fmt: skip
def test_conflicting_options_are_refused_before_anything_starts(
    words: tuple[str, ...], sentence: str, commands: Commands
) -> None:
    assert sentence in commands.fail(2, "up", *words)


DEVICES = ("device", "target_device", "draft_device", "target_memory_utilization", "draft_memory_utilization")


def on(*values: object) -> dict[str, Any]:
    return dict(zip(DEVICES, ("cpu", *(None,) * 4), strict=True)) | dict(zip(DEVICES, values, strict=False))


@pytest.mark.parametrize(
    ("options", "variable", "devices", "shares"),
    [
        (on(), None, ("cpu", "cpu"), (None, None)),
        (on("gpu:1"), None, ("cuda:1", "cuda:1"), (0.65, 0.25)),
        (on("cpu", "cuda", "gpu:0"), None, ("cuda", "cuda:0"), (0.65, 0.25)),
        (on("cuda", None, None, None, 0.1), None, ("cuda", "cuda"), (0.65, 0.1)),
        (on("cpu", "cuda:0", "cuda:1"), None, ("cuda:0", "cuda:1"), (None, None)),
        (on("cpu", "cuda:0", "cuda:1", 0.8, 0.7), None, ("cuda:0", "cuda:1"), (0.8, 0.7)),
        (on("cuda:2", None, "cpu"), None, ("cuda:2", "cpu"), (None, None)),
        (on("cpu", "gpu"), None, ("cuda", "cpu"), (None, None)),
        # The environment is stronger than the default.
        (on("cuda:1"), "TANDEM_TARGET_DEVICE_MEMORY_UTILIZATION", ("cuda:1", "cuda:1"), (0.4, 0.25)),
        (on("cuda:1"), "TANDEM_DRAFT_DEVICE_MEMORY_UTILIZATION", ("cuda:1", "cuda:1"), (0.65, 0.4)),
        (on("cuda:1"), "TANDEM_TARGET_GPU_MEMORY_UTILIZATION", ("cuda:1", "cuda:1"), (0.4, 0.25)),
        (on("cuda:1"), "TANDEM_DEVICE_MEMORY_UTILIZATION", ("cuda:1", "cuda:1"), (0.4, 0.4)),
    ],
)
def test_each_model_runs_on_its_device_and_two_on_one_accelerator_share_its_memory(
    options: dict[str, Any],
    variable: str | None,
    devices: tuple[str, str],
    shares: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "0.4")
    arguments = service_arguments(UpOptions(**options))
    assert arguments.draft is not None
    target = load_settings(TargetSettings, arguments.target, "test")
    draft = load_settings(DraftSettings, arguments.draft, "test")
    assert (target.compute_device, draft.compute_device) == devices
    assert (target.device_memory_utilization, draft.device_memory_utilization) == shares


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        (UpOptions(draft="ngram"), None, None),
        (UpOptions(draft="suffix"), None, None),
        (UpOptions(draft="none"), None, None),
        (UpOptions(method="eagle3"), None, None),
        (UpOptions(device="cuda"), None, None),
        (UpOptions(target_device="cuda"), None, None),
        (UpOptions(), "4", "4"),
        (UpOptions(draft=str(DEMO_DRAFT)), "4", "4"),
        (UpOptions(threads=3), "3", "3"),
        (UpOptions(draft="ngram", threads=3), "3", None),
    ],
)
def test_cores_go_to_those_that_compute(
    options: UpOptions, target: str | None, draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option a service uses all cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    arguments = service_arguments(options)
    assert value(arguments.target, "--threads") == target
    assert value(arguments.draft or [], "--threads") == draft


@pytest.fixture
def shorter(tmp_path: Path) -> Path:
    config = {"text_config": {"n_positions": 512}, "max_position_embeddings": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_lengths_that_differ_are_known_before_the_models_are_loaded(shorter: Path, tmp_path: Path) -> None:
    def lengths(environment: dict[str, str] | None = None, **options: Any) -> tuple[int, ...]:
        return unequal_lengths(service_arguments(UpOptions(**options)), environment or {})

    draft = str(shorter)
    assert lengths(model="demo", draft=draft) == (1024, 512)
    assert lengths(model="demo") == lengths(model="demo", draft="ngram") == lengths(target=draft) == ()
    assert lengths(model="demo", draft=draft, max_length=64) == ()
    assert lengths({"TANDEM_DRAFT_MAX_LENGTH": "64"}, model="demo", draft=draft) == ()
    assert lengths({"TANDEM_TARGET_MAX_MODEL_LEN": "64"}, model="demo", draft=draft) == ()
    assert lengths({"TANDEM_COORDINATOR_MAX_LENGTH": "64"}, model="demo", draft=draft) == (1024, 512)
    file = tmp_path / "tandem.json"
    file.write_text(json.dumps({"draft_model_path": draft}))
    assert lengths(model="demo", config_file=file) == (1024, 512)
    (shorter / "config.json").write_text("{}")
    assert lengths(model="demo", draft=draft) == ()


def test_a_shorter_length_is_given_to_both_models(shorter: Path) -> None:
    arguments = service_arguments(UpOptions(model="demo", draft=str(shorter))).with_options(max_length=512)
    assert value(arguments.target, "--max-length") == value(arguments.draft, "--max-length") == "512"
    assert service_arguments(UpOptions(draft="none")).with_options(max_length=512).draft is None


def test_variables_that_are_overridden_are_named() -> None:
    environment = {
        "TANDEM_TARGET_DEVICE": "cuda",
        "TANDEM_COORDINATOR_PORT": "1",
        "TANDEM_COORDINATOR_DRAFT_ADDRESS": "draft:1",
        "TANDEM_DRAFT_MODEL": "x",
        "TANDEM_TARGET_MAX_SEQUENCES": "4",
        "TANDEM_COORDINATOR_WORKERS": "",
    }
    sentences = list(not_read(service_arguments(UpOptions(draft="none")), environment))
    assert [sentence.partition(" ")[0] for sentence in sentences] == [
        "TANDEM_TARGET_DEVICE",
        "TANDEM_DRAFT_MODEL",
        "TANDEM_COORDINATOR_PORT",
        "TANDEM_COORDINATOR_DRAFT_ADDRESS",
    ]


def test_a_service_without_its_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    sentence = r"needs torch; install the extra: pip install 'tandem-speculative\[engine\]'"
    target = TargetSettings(model=DEMO_TARGET)
    bound = TargetSettings(model=DEMO_TARGET, draft_model=DEMO_EAGLE3)
    draft = DraftSettings(model=DEMO_DRAFT)
    for service in (TargetService(target), TargetService(bound), DraftService(draft)):
        with pytest.raises(ConfigurationError, match=sentence):
            service.load()


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
    "share_between_callers": "prefix",
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
    "override_generation_config": '{"temperature": 0.5}',
    "allowed_rejection_sampling_strategies": ["strict", "synthetic"],
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
    kind = kind_of(field.annotation)
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


@pytest.mark.parametrize("name", list(UpOptions.model_fields))
def test_a_flag_of_up_reaches_a_service(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text("{}")
    values: dict[str, Any] = dict.fromkeys(("model", "target"), str(DEMO_DRAFT))
    values |= dict.fromkeys(("device", "target_device", "draft_device"), "cuda")
    values |= dict.fromkeys(("target_memory_utilization", "draft_memory_utilization"), 0.5)
    values |= {
        "draft": "ngram",
        "method": "suffix",
        "engine": "tandem",
        "dtype": "bfloat16",
        "draft_ahead": "off",
    }
    values |= {"chat_template": file, "config_file": file, "http": False, "insecure": True}
    values |= {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    values |= {"generation_config": "vllm", "override_generation_config": "{}"}
    values |= {"log_level": "debug", "served_model_name": "name", "host": "127.0.0.2"}
    if name == "api_key":
        return  # goes by the environment
    assert service_arguments(UpOptions(**{name: values.get(name, 3)})) != service_arguments(UpOptions())
