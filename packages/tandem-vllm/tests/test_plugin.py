"""The plug-in for vLLM, without vLLM: its contract, its patience, how it recognises rows, and its speculator."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm_stub
from tandem.engine_vllm.contract import check_plugin
from tandem.errors import ConfigurationError
from tandem.model.types import AheadBudget, ModelInfo, Proposal, SamplingParams, SparseDistribution
from tandem_vllm import TandemProposer
from tandem_vllm.link import target_info, why_unfit
from tandem_vllm.proposer import (
    MAX_SECONDS,
    MIN_SECONDS,
    BatchRow,
    Patience,
    Way,
    WaySwitch,
    asks,
    sampling_of,
)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_VLLM_DRAFT_ADDRESS", "127.0.0.1:1")


def test_the_tested_release_is_accepted_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_stub.install(monkeypatch)
    with caplog.at_level(logging.INFO):
        check_plugin()
    assert not caplog.records


def test_another_release_with_the_same_call_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_stub.install(monkeypatch, version="0.320.1")
    check_plugin()
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
        check_plugin()


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


@pytest.mark.parametrize(
    ("tensor", "pipeline", "asking"), [(1, 1, [0]), (2, 1, [0]), (4, 2, [0, 4]), (1, 3, [0, 1, 2])]
)
def test_the_first_process_of_each_parallel_group_asks(tensor: int, pipeline: int, asking: list[int]) -> None:
    """vLLM makes a proposer in the last pipeline stage alone."""
    ranks = [SimpleNamespace(rank=rank, tensor_parallel_size=tensor) for rank in range(tensor * pipeline)]
    assert [parallel.rank for parallel in ranks if asks(parallel)] == asking


def described(vocabulary_size: int, tokenizer: str) -> ModelInfo:
    return ModelInfo("draft", "Llama", vocabulary_size, tokenizer, 64, "float32")


def test_a_draft_with_another_tokenizer_does_not_fit_and_one_with_other_rows_does() -> None:
    target = target_info(vllm_stub.config().model_config, 1)
    assert why_unfit(target, described(2048, target.tokenizer_hash)) == ""
    # A padded vocabulary: the draft is told how many ids the target has.
    assert why_unfit(target, described(4096, target.tokenizer_hash)) == ""
    assert "another tokenizer" in why_unfit(target, described(2048, "other"))


def learnt(step_seconds: float, accepted: int, steps: int = 100) -> Patience:
    patience = Patience(4)
    for _ in range(steps):
        patience.stepped(step_seconds)
        patience.came_out(4, accepted)
    return patience


@pytest.mark.parametrize(("accepted", "seconds"), [(0, MIN_SECONDS), (1, 0.02), (3, 0.06)])
def test_a_step_waits_for_what_the_accepted_tokens_save(accepted: int, seconds: float) -> None:
    assert learnt(0.02, accepted).seconds == pytest.approx(seconds, rel=0.01)


def test_a_first_proposal_of_which_nothing_is_accepted_leaves_patience_for_the_next() -> None:
    assert learnt(0.02, 0, steps=1).seconds > 0.03


def test_after_waits_in_vain_a_step_waits_as_if_nothing_had_been_learnt() -> None:
    """Where nothing was accepted for a while, no step would wait long enough to see a better proposal."""
    patience = learnt(0.02, 0)
    assert patience.seconds == MIN_SECONDS
    while patience.may_ask():
        patience.waited(in_vain=True)
    assert patience.seconds == pytest.approx(0.04)
    patience.waited(in_vain=False)
    assert patience.seconds == MIN_SECONDS


def test_no_step_waits_longer_than_the_maximum() -> None:
    assert learnt(10.0, 4).seconds == MAX_SECONDS


def test_waits_in_vain_end_and_become_rarer() -> None:
    """A draft that is always too late costs fewer and fewer steps."""
    patience = Patience(4)
    waits = 0
    for _ in range(4000):
        if patience.may_ask():
            waits += 1
            patience.waited(in_vain=True)
    assert waits < 16


def test_drafting_ahead_as_configured() -> None:
    assert WaySwitch("off", 4).begin_step(1) == (Way.ASKED, None)
    assert WaySwitch("off", 4).max_budget is None
    assert WaySwitch(5, 4).begin_step(16) == (Way.AHEAD, AheadBudget(5, 4))
    assert WaySwitch("auto", 4).max_budget == AheadBudget(16, 4)


@pytest.mark.parametrize(
    ("asked", "ahead", "alone", "best"),
    [
        (150.0, 300.0, 50.0, Way.AHEAD),
        (150.0, 100.0, 50.0, Way.ASKED),
        (35.0, 40.0, 50.0, Way.ALONE),
        (40.0, 35.0, 50.0, Way.ALONE),
    ],
)
def test_the_way_that_was_measured_to_make_the_most_tokens_is_taken(
    asked: float, ahead: float, alone: float, best: Way
) -> None:
    """By tokens per second of each way; a step without a proposal makes one token."""
    speeds = {Way.ASKED: asked, Way.AHEAD: ahead, Way.ALONE: alone}
    tokens = {Way.ASKED: 3.0, Way.AHEAD: 3.0, Way.ALONE: 1.0}
    switch = WaySwitch("auto", 4)
    taken = []
    for _ in range(1000):
        way, budget = switch.begin_step(1)
        assert (budget is not None) is (way is Way.AHEAD)
        taken.append(way)
        switch.end_step(tokens[way], tokens[way] / speeds[way])
    assert set(taken) == set(Way), "one was never tried"
    assert taken[-500:].count(best) > 450


def test_drafts_of_which_next_to_nothing_is_accepted_cost_few_steps() -> None:
    """Even where drafting ahead is set to always: a step of 25 ms then waits 16 ms for 0.3 tokens."""
    switch = WaySwitch(8, 4)
    seconds = tokens = 0.0
    for _ in range(2000):
        way, _ = switch.begin_step(1)
        made, took = (1.0, 0.025) if way is Way.ALONE else (1.3, 0.041)
        switch.end_step(made, took)
        tokens += made
        seconds += took
    assert tokens / seconds > 0.97 * 40.0


@pytest.mark.usefixtures("address")
def test_without_our_worker_class_the_start_says_how_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"--worker-cls tandem_vllm\.worker\.TandemWorker"):
        TandemProposer(vllm_stub.config()).load_model(None)


@pytest.mark.usefixtures("address")
def test_a_runner_that_takes_no_distributions_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)
    with pytest.raises(ConfigurationError, match="its model runner has no _draft_probs; install vLLM"):
        TandemProposer(vllm_stub.config()).attach(SimpleNamespace(input_batch=None))


def params(**given: object) -> SimpleNamespace:
    """vLLM's sampling parameters."""
    usual = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "structured_outputs": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **given})


@pytest.mark.parametrize(
    "given", [None, params(temperature=0.0), params(temperature=1e-6), params(structured_outputs=object())]
)
def test_drafts_are_greedy_where_drawing_gains_nothing_or_would_be_wrong(given: object) -> None:
    """Under a grammar vLLM drops proposed tokens by what they are, and forgets that they were drawn."""
    assert sampling_of(given).is_greedy


def test_a_draft_draws_as_its_target() -> None:
    given = params(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, seed=-3)
    assert sampling_of(given) == SamplingParams(0.7, 0, 0.9, 0.1, seed=(1 << 63) - 3)
    assert sampling_of(params(seed=None)).seed != sampling_of(params(seed=None)).seed


REQUESTS = 4
TOKENS = 2
VOCABULARY = 8


@pytest.fixture
def speculator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes one over states of the fixture's, with a stand-in of vLLM."""
    vllm_stub.install(monkeypatch)
    name = "vllm.v1.worker.gpu.spec_decode.speculator"
    for depth in range(3, name.count(".") + 2):
        monkeypatch.setitem(
            sys.modules, ".".join(name.split(".")[:depth]), ModuleType(name.split(".")[depth - 1])
        )
    sys.modules[name].BaseSpeculator = object  # type: ignore[attr-defined]
    monkeypatch.setenv("TANDEM_VLLM_DRAFT_ADDRESS", "127.0.0.1:1")
    monkeypatch.delitem(sys.modules, "tandem_vllm.speculator", raising=False)

    def make(method: str = "ngram_gpu") -> Any:
        from tandem_vllm.speculator import TandemSpeculator

        config = vllm_stub.config()
        config.speculative_config.method = method
        return TandemSpeculator(config, torch.device("cpu"), states())

    return make


def states() -> Any:
    """Requests at places 3 and 1, of 5 and 2 tokens."""
    tokens = torch.zeros((REQUESTS, 16), dtype=torch.int32)
    tokens[3, :5] = torch.tensor([1, 2, 3, 4, 5])
    tokens[1, :2] = torch.tensor([6, 7])
    return SimpleNamespace(
        max_num_reqs=REQUESTS,
        num_speculative_steps=TOKENS,
        vocab_size=VOCABULARY,
        all_token_ids=SimpleNamespace(gpu=tokens),
        total_len=SimpleNamespace(gpu=torch.tensor([0, 2, 0, 5], dtype=torch.int32)),
    )


def propose(speculator: Any, proposals: list[Proposal]) -> tuple[torch.Tensor, Sequence[BatchRow]]:
    """Its tokens for these proposals of the drafts, and the rows that it asked them with."""
    asked: list[Sequence[BatchRow]] = []

    def answer(count: int, rows: Callable[[], Sequence[BatchRow]]) -> list[Proposal]:
        asked.append(rows())
        return proposals

    speculator.drafts.propose = answer
    batch = SimpleNamespace(
        num_reqs=2, req_ids=["a", "b"], idx_mapping=torch.tensor([3, 1], dtype=torch.int32)
    )
    unused = [None] * 4
    tokens = speculator.propose(
        batch, *unused, torch.tensor([2, 0]), *[None] * 3, torch.tensor([0.0, 1.0, 0.0, 0.5]), None
    )
    return tokens, asked[0]


def test_drafts_are_asked_with_the_rows_of_the_batch(speculator: Callable[..., Any]) -> None:
    _, (a, b) = propose(speculator(), [Proposal(5), Proposal(2)])
    assert (a.name, a.sampled, b.name, b.sampled) == ("a", 2, "b", 0)
    assert [list(a.tokens_from(start)) for start in (0, 2, 3, 5)] == [[1, 2, 3, 4, 5], [3, 4, 5], [4, 5], []]
    assert list(b.tokens_from(0)) == [6, 7]


def test_vllm_finds_distributions_by_the_place_of_the_request(speculator: Callable[..., Any]) -> None:
    ours = speculator()
    drawn = SparseDistribution(np.array([4, 6]), np.array([0.75, 0.25]))
    for _ in range(2):  # nothing stays of an earlier step
        tokens, _ = propose(ours, [Proposal(5, (4,), (drawn,)), Proposal(2, (1, 2))])
        propose(ours, [Proposal(5, (7, 7)), Proposal(2)])
    tokens, _ = propose(ours, [Proposal(5, (4,), (drawn,)), Proposal(2, (1, 2))])
    assert tokens.tolist() == [[4, 5], [1, 2]], "what is missing is the last token once more"
    assert tokens.dtype is torch.int64
    first = torch.softmax(ours.draft_logits[3] / 0.5, -1)
    second = torch.softmax(ours.draft_logits[1], -1)
    torch.testing.assert_close(first[0], torch.tensor([0, 0, 0, 0, 0.75, 0, 0.25, 0]))
    assert first[1].argmax() == 5
    assert second.argmax(-1).tolist() == [1, 2]
    assert (second == second.amax(-1, keepdim=True)).sum() == second.sum() == 2


def test_a_dummy_run_asks_nobody(speculator: Callable[..., Any]) -> None:
    ours = speculator()
    batch = SimpleNamespace(num_reqs=2)
    found = ours.propose(batch, *[None] * 10, dummy_run=True)
    assert found.shape == (2, TOKENS)


def test_another_method_is_refused(speculator: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="in place of the method ngram_gpu, and this is eagle"):
        speculator("eagle")
