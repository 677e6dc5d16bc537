"""The speculator of vLLM's newer runner over fakes of its states: what it asks, and what vLLM's sampler finds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.errors import ConfigurationError
from tandem.integrations.vllm.proposer import BatchRow
from tandem.types import Proposal, SparseDistribution
from tests.service import vllm_stub

REQUESTS, TOKENS, VOCABULARY = 4, 2, 8


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
    monkeypatch.delitem(sys.modules, "tandem.integrations.vllm.speculator", raising=False)

    def make(method: str = "ngram_gpu") -> Any:
        from tandem.integrations.vllm.speculator import TandemSpeculator

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
    first, second = (torch.softmax(ours.draft_logits[3] / 0.5, -1), torch.softmax(ours.draft_logits[1], -1))
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
