"""Options of the command line and of a file reach vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.config.settings import load_settings
from tandem.engine_vllm import engine
from tandem.engine_vllm.engine import vllm_head
from tandem.errors import ConfigurationError
from tandem.model_sources import hub
from tandem.model_sources.find import checked_folder
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_draft.proposers.standalone import load_standalone
from tandem_draft.settings import DraftSettings
from tandem_target.loading import load_verifier
from tandem_target.settings import TargetSettings
from tests.paths import DEMO_DRAFT, DEMO_TARGET

EACH_REACHES_IT: Mapping[str, tuple[str, object]] = {
    "--tensor-parallel-size=2": ("tensor_parallel_size", 2),
    "--quantization=fp8": ("quantization", "fp8"),
    "--load-format=dummy": ("load_format", "dummy"),
    "--dtype=float16": ("dtype", "float16"),
    "--kv-cache-dtype=fp8": ("kv_cache_dtype", "fp8"),
    "--max-model-len=300": ("max_model_len", 300),
    "--max-sequences=7": ("max_num_seqs", 7),
    "--gpu-memory-utilization=0.4": ("gpu_memory_utilization", 0.4),
    "--kv-cache-memory-bytes=1000000": ("kv_cache_memory_bytes", 1_000_000),
    "--moe-backend=triton": ("moe_backend", "triton"),
    "--enforce-eager": ("enforce_eager", True),
    "--no-enable-prefix-caching": ("enable_prefix_caching", False),
    f"--tokenizer={DEMO_DRAFT}": ("tokenizer", str(DEMO_DRAFT)),
}


class _Given(Exception):  # noqa: N818  it ends a start that has shown its options
    pass


@pytest.fixture(autouse=True)
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that shows what it is given instead of starting."""

    def load_core(options: dict[str, Any], on_failure: object, reserved_bytes: int) -> None:
        raise _Given(options)

    monkeypatch.setattr(engine, "load_core", load_core)


def target_options(*words: str) -> dict[str, Any]:
    """The options that vLLM gets from these words of a target's command line."""
    arguments = ["--model", str(DEMO_TARGET), "--engine", "vllm", "--device", "cuda", *words]
    with pytest.raises(_Given) as given:
        load_verifier(load_settings(TargetSettings, arguments, "tandem serve target"))
    return given.value.args[0]  # type: ignore[no-any-return]


def draft_options(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    """The options that vLLM gets for a draft with this SpeculativeConfig."""
    (folder / "file.json").write_text(json.dumps(section))
    arguments = ["--model", str(DEMO_DRAFT), "--engine", "vllm", "--device", "cuda"]
    settings = load_settings(
        DraftSettings, [*arguments, "--config-file", str(folder / "file.json")], "tandem serve draft"
    )
    with pytest.raises(_Given) as given:
        load_standalone(settings, lambda record: None, lambda: None)
    return given.value.args[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("word", EACH_REACHES_IT)
def test_an_option_of_the_target_reaches_it(word: str) -> None:
    name, value = EACH_REACHES_IT[word]
    assert target_options().get(name) != value
    assert target_options(word)[name] == value


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ({"draft_tensor_parallel_size": 2}, "tensor_parallel_size", 2),
        ({"quantization": "awq"}, "quantization", "awq"),
        ({"moe_backend": "triton"}, "moe_backend", "triton"),
        ({"enforce_eager": True}, "enforce_eager", True),
        ({"draft_load_config": {"load_format": "runai_streamer"}}, "load_format", "runai_streamer"),
        ({"draft_load_config": {"download_dir": "/weights"}}, "download_dir", "/weights"),
    ],
)
def test_an_option_of_a_speculative_config_reaches_the_drafts(
    tmp_path: Path, section: dict[str, Any], name: str, value: object
) -> None:
    assert draft_options(tmp_path, {}).get(name) != value
    assert draft_options(tmp_path, section)[name] == value


def test_the_length_of_proposals_is_that_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for runner, method in (("0", "custom_class"), ("1", "ngram")):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        given = target_options("--num-speculative-tokens=6")["speculative_config"]
        assert (given["method"], given["num_speculative_tokens"]) == (method, 6)
        table = given.get("num_speculative_tokens_per_batch_size", [])
        assert sorted(length for *_, length in table) == (list(range(7)) if runner == "1" else [])


def test_a_draft_has_graphs_of_one_token(tmp_path: Path) -> None:
    assert "speculative_config" not in draft_options(tmp_path, {})


def test_a_target_expects_the_proposals_that_a_coordinator_asks_for() -> None:
    fields = TargetSettings.model_fields, CoordinatorSettings.model_fields
    assert len({own["num_speculative_tokens"].default for own in fields}) == 1


def test_a_head_that_the_newer_runner_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert vllm_head("mtp", None) == {"method": "mtp"}
    with pytest.raises(ConfigurationError, match="method is medusa; with that runner"):
        vllm_head("medusa", Path("head"))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("--pipeline-parallel-size=2", "pipeline"),
        ("--data-parallel-size=2", "data"),
        ("--load-format=pt", "load_format is pt"),
    ],
)
def test_what_is_not_served_is_refused(word: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        target_options(word)


def test_a_revision_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(model_id: str, revision: str | None) -> Path:
        asked.append((model_id, revision))
        return Path(DEMO_TARGET)

    monkeypatch.setattr(hub, "fetch", fetch)
    # It sets variables for the rest of the process; HF_HUB_OFFLINE is among them.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    arguments = ["--model", "someone/model", "--revision", "v2", "--engine", "vllm"]
    settings = load_settings(TargetSettings, arguments, "tandem serve target")
    assert checked_folder(settings, settings.model) == Path(DEMO_TARGET)
    assert asked == [("someone/model", "v2")]
