"""Another vLLM is noticed at its start, in one sentence; one process of a tensor-parallel group asks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tandem.errors import ConfigurationError
from tandem.integrations.vllm import TandemProposer, contract
from tandem.integrations.vllm.link import target_info, why_unfit
from tandem.integrations.vllm.settings import VllmSettings
from tandem.types import ModelInfo
from tests.paths import ROOT
from tests.service import vllm_stub


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_VLLM_DRAFT_ADDRESS", "127.0.0.1:1")


def test_the_tested_release_is_accepted_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_stub.install(monkeypatch)
    with caplog.at_level(logging.INFO):
        contract.check_vllm()
    assert not caplog.records


def test_another_release_with_the_same_call_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_stub.install(monkeypatch, version="0.320.1")
    contract.check_vllm()
    assert "not the release" in caplog.text


@pytest.mark.usefixtures("address")
def test_a_changed_call_is_one_clear_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch, vllm_stub.ChangedRunner, "0.40.0")
    with pytest.raises(ConfigurationError) as raised:
        TandemProposer(vllm_stub.config())
    assert str(raised.value) == (
        "vLLM 0.40.0 calls a custom proposer as propose(sampled_token_ids, request_ids); this plug-in must be "
        "called as propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=...), as vLLM 0.32 "
        "does: install vLLM 0.32, or a Tandem made for 0.40.0"
    )


def test_a_release_without_custom_proposers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch, SimpleNamespace)
    with pytest.raises(ConfigurationError, match="calls a custom proposer as nothing"):
        contract.check_vllm()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "TANDEM_VLLM_DRAFT_ADDRESS is not set"),
        ({"DRAFT_ADDRESS": "draft"}, "'draft' is not an address"),
        ({"DRAFT_ADDRESS": "draft.example:1"}, "prompts would go there in plain text"),
        ({"DRAFT_ADDRESS": "localhost:1", "DRAFT_AHEAD": "often"}, "draft"),
        ({"DRAFT_ADDRESS": "localhost:1", "DRAFT_ADRESS": "x"}, "TANDEM_VLLM_DRAFT_ADRESS"),
    ],
)
def test_wrong_options_are_one_sentence_at_start(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    vllm_stub.install(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(f"TANDEM_VLLM_{name}", value)
    with pytest.raises(ConfigurationError) as raised:
        TandemProposer(vllm_stub.config())
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_page_names_every_option() -> None:
    """But for the share of requests to trace: the plug-in has none."""
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    options = VllmSettings.model_fields.keys() - {"trace_sample_ratio"}
    assert {name for name in options if f"`TANDEM_VLLM_{name.upper()}`" not in page} == set()


@pytest.mark.parametrize(
    ("tensor", "pipeline", "asking"), [(1, 1, [0]), (2, 1, [0]), (4, 2, [0, 4]), (1, 3, [0, 1, 2])]
)
def test_the_first_process_of_each_tensor_parallel_group_asks(
    tensor: int, pipeline: int, asking: list[int]
) -> None:
    """Of those, vLLM makes a proposer in the last pipeline stage alone."""
    ranks = [SimpleNamespace(rank=rank, tensor_parallel_size=tensor) for rank in range(tensor * pipeline)]
    assert [parallel.rank for parallel in ranks if contract.asks(parallel)] == asking


def described(vocabulary_size: int, tokenizer: str) -> ModelInfo:
    return ModelInfo("draft", "Llama", vocabulary_size, tokenizer, 64, "float32")


def test_a_draft_with_another_vocabulary_or_tokenizer_does_not_fit() -> None:
    target = target_info(vllm_stub.config().model_config, 1)
    assert why_unfit(target, described(2048, target.tokenizer_hash)) == ""
    assert "vocabulary of 4096" in why_unfit(target, described(4096, target.tokenizer_hash))
    assert "another tokenizer" in why_unfit(target, described(2048, "other"))
