"""Deltas change the tail of a sequence; pages take a share of the memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.kv_cache.arena import PageTable, accelerator_allowance, memory_allowance
from tandem.engine.kv_cache.sequence import Sequence
from tandem.errors import InvalidRequestError
from tandem.model.types import Delta

_IDS = st.lists(st.integers(0, 3), max_size=8)


@given(before=_IDS, computed=st.integers(0, 8), base_length=st.integers(0, 8), token_ids=_IDS)
def test_kept_tokens_are_always_a_common_prefix(
    before: list[int], computed: int, base_length: int, token_ids: list[int]
) -> None:
    sequence = Sequence((PageTable(64, 64),), 20, vocabulary_size=4)
    sequence.apply(Delta(0, before))
    sequence.advance(min(computed, len(before)))
    delta = Delta(min(base_length, len(before)), token_ids)
    sequence.apply(delta)
    kept = sequence.computed_length
    assert sequence.token_ids == before[: delta.base_length] + token_ids
    assert sequence.token_ids[:kept] == before[:kept]
    computed_before = min(computed, len(before))
    could_keep = kept < min(computed_before, sequence.length) and before[kept] == sequence.token_ids[kept]
    assert not could_keep


GAP = "the sequence has 3 tokens; send the missing ones from base_length 0."


@pytest.mark.parametrize(
    ("delta", "sentence"),
    [
        *((Delta(start, [1]), f"The delta starts at token {start}, but {GAP}") for start in (4, -1)),
        (Delta(3, [1] * 8), "The sequence would have 11 tokens, but its limit is 10."),
        (Delta(3, [5, 100]), "Token id 100 is not in the vocabulary, whose ids are 0 to 99."),
        (Delta(3, [-1]), "Token id -1 is not in the vocabulary, whose ids are 0 to 99."),
    ],
)
def test_a_delta_that_does_not_fit_changes_nothing(delta: Delta, sentence: str) -> None:
    sequence = Sequence((PageTable(64, 10),), 10, vocabulary_size=100)
    sequence.apply(Delta(0, (1, 2, 3)))
    sequence.advance(3)
    with pytest.raises(InvalidRequestError) as raised:
        sequence.apply(delta)
    assert str(raised.value) == sentence
    assert (sequence.token_ids, sequence.computed_length) == ([1, 2, 3], 3)


GIB = 1 << 30
TOTAL = 80 * GIB
CONTEXT = GIB // 2
"""Memory of a process that torch's allocator does not know."""


@pytest.mark.parametrize("order", list(itertools.permutations(["target", "draft"])))
def test_two_services_take_their_shares_in_either_order(order: tuple[str, ...]) -> None:
    weights = {"target": 16 * GIB, "draft": 2 * GIB}
    shares = {"target": 0.6, "draft": 0.3}
    free = TOTAL
    for name in order:
        free -= weights[name] + CONTEXT
        allowance = accelerator_allowance(TOTAL, free, weights[name], shares[name])
        assert weights[name] + allowance == int(TOTAL * shares[name])
        free -= allowance
    assert free > 0


def test_memory_of_others_does_not_count_as_long_as_the_share_is_free() -> None:
    alone = accelerator_allowance(TOTAL, TOTAL - 10 * GIB, 10 * GIB, 0.5)
    shared = accelerator_allowance(TOTAL, TOTAL - 45 * GIB, 10 * GIB, 0.5)
    assert alone == shared == 30 * GIB


def test_nothing_is_left_where_the_weights_exceed_the_share() -> None:
    assert accelerator_allowance(TOTAL, 60 * GIB, 20 * GIB, 0.2) < 0


def test_a_service_reads_the_devices_memory_and_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With simulated figures; no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device = torch.device("cuda:1")
    assert memory_allowance(0.4, device) == 16 * GIB
    assert not caplog.messages
    assert 19 * GIB < memory_allowance(None, device) < 20 * GIB, "less than 0.9 of the device leaves"
    assert vars(caplog.records[0])["promised_bytes"] == 56 * GIB
