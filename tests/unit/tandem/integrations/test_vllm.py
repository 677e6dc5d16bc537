"""The plug-in for vLLM, without vLLM: its contract, its patience, and how it recognises rows."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ConfigurationError
from tandem.integrations.vllm import TandemProposer
from tandem.integrations.vllm.link import target_info, why_unfit
from tandem.integrations.vllm.proposer import MAX_SECONDS, MIN_SECONDS, AheadSwitch, Patience, asks
from tandem.integrations.vllm.rows import ABSENT_STEPS, IntArray, SequenceTable
from tandem.types import AheadBudget, ModelInfo
from tandem.vllm_contract import check_plugin
from tests.service import vllm_stub


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
def test_the_first_process_of_each_tensor_parallel_group_asks(
    tensor: int, pipeline: int, asking: list[int]
) -> None:
    """Of those, vLLM makes a proposer in the last pipeline stage alone."""
    ranks = [SimpleNamespace(rank=rank, tensor_parallel_size=tensor) for rank in range(tensor * pipeline)]
    assert [parallel.rank for parallel in ranks if asks(parallel)] == asking


def described(vocabulary_size: int, tokenizer: str) -> ModelInfo:
    return ModelInfo("draft", "Llama", vocabulary_size, tokenizer, 64, "float32")


def test_a_draft_with_another_vocabulary_or_tokenizer_does_not_fit() -> None:
    target = target_info(vllm_stub.config().model_config, 1)
    assert why_unfit(target, described(2048, target.tokenizer_hash)) == ""
    assert "vocabulary of 4096" in why_unfit(target, described(4096, target.tokenizer_hash))
    assert "another tokenizer" in why_unfit(target, described(2048, "other"))


def learnt(step_seconds: float, accepted: int, steps: int = 100) -> Patience:
    patience = Patience(4)
    for _ in range(steps):
        patience.stepped(step_seconds)
        patience.came_out(4, accepted)
    return patience


@pytest.mark.parametrize(("accepted", "seconds"), [(0, MIN_SECONDS), (1, 0.02), (3, 0.06)])
def test_a_step_waits_for_what_the_accepted_tokens_save(accepted: int, seconds: float) -> None:
    assert learnt(0.02, accepted).seconds == pytest.approx(seconds)


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
    assert AheadSwitch("off", 4).begin_step(1) is None
    assert AheadSwitch("off", 4).max_budget is None
    assert AheadSwitch(5, 4).begin_step(16) == AheadBudget(5, 4)


@pytest.mark.parametrize(("ahead_seconds", "pays"), [(0.01, True), (0.03, False)])
def test_drafting_ahead_is_used_where_it_was_measured_to_pay(ahead_seconds: float, pays: bool) -> None:
    switch = AheadSwitch("auto", 4)
    ways = []
    for _ in range(400):
        is_ahead = switch.begin_step(1) is not None
        ways.append(is_ahead)
        switch.end_step(3.0, ahead_seconds if is_ahead else 0.02)
    assert any(ways), "it was never tried"
    assert (sum(ways[-200:]) > 100) is pays


def row(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


class Receiver:
    """The other end: what each key's deltas add up to."""

    def __init__(self) -> None:
        self.table = SequenceTable()
        self.tokens: dict[int, list[int]] = {}

    def step(self, rows: list[list[int]]) -> list[int]:
        """Take a step's deltas; the key of each row, whose tokens must be the row's."""
        recognised = self.table.recognise([row(*tokens) for tokens in rows])
        for found, tokens in zip(recognised, rows, strict=True):
            assert found.is_new == (found.sequence.key not in self.tokens)
            self.tokens.setdefault(found.sequence.key, []).extend(found.new_tokens)
            assert self.tokens[found.sequence.key] == tokens == found.sequence.token_ids.tolist()
        keys = [found.sequence.key for found in recognised]
        assert len(set(keys)) == len(keys), "two rows were taken for one sequence"
        for ended in self.table.take_ended():
            del self.tokens[ended.key]
        return keys


def test_swapped_rows_keep_their_sequences() -> None:
    receiver = Receiver()
    first = receiver.step([[1, 2], [3, 4], [5]])
    assert receiver.step([[5, 9], [3, 4, 8], [1, 2, 7, 7]]) == [first[2], first[1], first[0]]


def test_equal_sequences_are_two() -> None:
    receiver = Receiver()
    keys = receiver.step([[1, 2], [1, 2]])
    assert set(receiver.step([[1, 2, 3], [1, 2, 4]])) == set(keys)


def test_a_sequence_whose_steps_were_not_seen_is_the_same() -> None:
    """vLLM asks nobody while a sequence is near the length limit."""
    receiver = Receiver()
    (key,) = receiver.step([[1, 2]])
    assert receiver.step([[1, 2, 3, 4, 5, 6, 7, 8]]) == [key]


def test_other_tokens_in_the_same_row_are_another_sequence() -> None:
    receiver = Receiver()
    (key,) = receiver.step([[1, 2, 3]])
    assert receiver.step([[1, 9, 3, 4]]) != [key]


def test_the_end_of_a_sequence_is_told_once_after_some_steps() -> None:
    table = SequenceTable()
    (ended,) = table.recognise([row(1, 2)])
    told = []
    for _ in range(ABSENT_STEPS + 3):
        table.recognise([])
        told += table.take_ended()
    assert [known.key for known in told] == [ended.sequence.key]
    assert len(table) == 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(2, 4))
def test_every_delta_adds_up_to_the_rows_tokens(seed: int, max_rows: int, alphabet: int) -> None:
    """Few different tokens, so that sequences are often equal, or prefixes of each other."""
    chance = random.Random(seed)
    receiver, rows, away = Receiver(), list[list[int]](), list[list[int]]()
    for _ in range(40):
        for tokens in rows:
            tokens += [chance.randrange(alphabet) for _ in range(chance.randrange(4))]
        match chance.randrange(6):
            case 0 | 1 if len(rows) < max_rows:
                rows.append([chance.randrange(alphabet) for _ in range(chance.randrange(1, 6))])
            case 2 if rows:
                rows.pop(chance.randrange(len(rows)))
            case 3 if rows:
                away.append(rows.pop(chance.randrange(len(rows))))
            case 4 if away and len(rows) < max_rows:
                rows.append(away.pop())
            case _:
                chance.shuffle(rows)
        receiver.step(rows)
        assert len(receiver.table) <= max_rows * (ABSENT_STEPS + 1)
        assert len(receiver.tokens) == len(receiver.table)
