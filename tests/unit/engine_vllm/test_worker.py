"""The worker's steps over the model runner that vLLM calls V2, without a vLLM."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine_vllm import worker as worker_module
from tandem.engine_vllm.step import Part, Step
from tandem.engine_vllm.worker import RowWorker
from tests.unit.engine_vllm.fake_vllm import VOCABULARY_SIZE, expected_logits

_PLACES = 8
_LENGTH = 64


@dataclass
class Staged:
    """vLLM's `StagedWriteTensor`: the step reads what was staged only once it is applied."""

    values: Any
    writes: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def stage_write(self, index: int, start: int, values: list[int]) -> None:
        self.writes.append((index, start, list(values)))

    def stage_write_elem(self, index: int, value: int) -> None:
        self.writes.append((index, 0, [value]))

    def apply(self) -> None:
        for index, start, values in self.writes:
            self.values[index, start : start + len(values)] = values
        self.writes.clear()


class FakeRunner:
    """Reads its requests' tokens from their states, and leaves hidden states: here each token's logits."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            all_token_ids=Staged(np.zeros((_PLACES, _LENGTH), np.int64)),
            prefill_len=SimpleNamespace(np=np.zeros(_PLACES, np.int64)),
            num_computed_tokens=Staged(np.zeros((_PLACES, 1), np.int64)),
            apply_staged_writes=self._apply,
        )
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.execute_model_state: Any = None
        self.draw = random.Random(3)

    def _apply(self) -> None:
        self.req_states.all_token_ids.apply()
        self.req_states.num_computed_tokens.apply()

    def execute_model(self, step: Step) -> None:
        states = self.req_states
        for part in step.parts:
            if part.is_new:  # as vLLM's runner does with a new request
                index = states.req_id_to_index[part.request_id] = len(states.req_id_to_index)
                states.all_token_ids.stage_write(index, 0, part.token_ids)
                states.num_computed_tokens.stage_write_elem(index, part.start)
                states.prefill_len.np[index] = part.end
                self._apply()
        assert not states.all_token_ids.writes, "tokens were staged and not applied"
        hidden: list[Tensor] = []
        starts = [0]
        order = self.draw.sample(step.parts, len(step.parts))  # decodes come first to it
        for part in order:
            index = states.req_id_to_index[part.request_id]
            start = int(states.num_computed_tokens.values[index, 0])
            end = int(states.prefill_len.np[index])
            tokens = states.all_token_ids.values[index, :end].tolist()
            hidden += [expected_logits(tokens[: at + 1]) for at in range(start, end)]
            starts.append(len(hidden))
        padded = [*starts, *[starts[-1]] * (_PLACES - len(order))]
        self.execute_model_state = SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=[part.request_id for part in order], query_start_loc_np=np.array(padded)
            ),
            hidden_states=torch.stack([*hidden, torch.full((VOCABULARY_SIZE,), torch.nan)]),
        )


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> RowWorker:
    monkeypatch.setattr(worker_module, "_scheduler_output", lambda step: step)
    found = RowWorker()
    found.model_runner = FakeRunner()
    found.rank = 0
    return found


def part(name: str, text: list[int], *, known: int, start: int, rows: int, is_new: bool = False) -> Part:
    """A part that ends with the text, of which the worker knows the first `known` tokens."""
    return Part(name, is_new, start, known, text[known:], rows, 0, ([1],))


def assert_rows(worker: RowWorker, *wanted: tuple[list[int], int]) -> None:
    """The last rows of each text, text by text."""
    found = worker.tandem_apply(lambda _, logits: logits, None)
    expected = [
        expected_logits(text[: len(text) - back]) for text, rows in wanted for back in reversed(range(rows))
    ]
    assert found is not None
    assert torch.equal(found, torch.stack(expected))
    assert worker.model_runner.execute_model_state is None


def test_rows_are_those_of_the_parts_whatever_order_the_runner_takes(worker: RowWorker) -> None:
    texts = [[5, 6, 7, 8], [9], [3, 4, 5, 6, 7, 8, 9, 10]]
    new = [
        part(str(number), text, known=0, start=0, rows=rows, is_new=True)
        for number, (text, rows) in enumerate(zip(texts, (1, 1, 3), strict=True))
    ]
    worker.tandem_step(Step(new, ()))
    assert_rows(worker, *zip(texts, (1, 1, 3), strict=True))


def test_a_known_request_takes_a_proposal_and_another_text_behind_a_rollback(worker: RowWorker) -> None:
    text = [5, 6, 7, 8]
    other = [20, 21, 22]
    worker.tandem_step(
        Step(
            [
                part("a", text, known=0, start=0, rows=1, is_new=True),
                part("b", other, known=0, start=0, rows=1, is_new=True),
            ],
            (),
        )
    )
    proposed = [*text, 11, 12, 13, 14]
    worker.tandem_step(Step([part("a", proposed, known=4, start=4, rows=4)], ()))
    assert_rows(worker, (proposed, 4))
    # 12 to 14 were rejected, beside a request whose last token is computed once more.
    instead = [*text, 11, 30, 31]
    worker.tandem_step(
        Step([part("b", other, known=2, start=2, rows=1), part("a", instead, known=5, start=5, rows=2)], ())
    )
    assert_rows(worker, (other, 1), (instead, 2))


def test_a_part_of_a_prompt_has_no_rows(worker: RowWorker) -> None:
    text = list(range(3, 13))
    worker.tandem_step(Step([part("a", text[:6], known=0, start=0, rows=0, is_new=True)], ()))
    with pytest.raises(RuntimeError, match="no logits"):
        worker.tandem_apply(lambda _, logits: logits, None)
    worker.tandem_step(Step([part("a", text, known=6, start=6, rows=2)], ()))
    assert_rows(worker, (text, 2))


def test_a_step_that_fails_leaves_nothing_behind(worker: RowWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [5, 6, 7]
    worker.tandem_step(Step([part("a", text, known=0, start=0, rows=1, is_new=True)], ()))

    def full(step: Step) -> None:
        worker.model_runner.execute_model_state = object()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker.model_runner, "execute_model", full)
    with pytest.raises(torch.OutOfMemoryError):
        worker.tandem_step(Step([part("a", [*text, 8], known=3, start=3, rows=1)], ()))
    assert worker.model_runner.execute_model_state is None
    with pytest.raises(RuntimeError, match="no logits"):
        worker.tandem_apply(lambda _, logits: logits, None)


def test_ranks_but_the_first_draw_no_rows(worker: RowWorker) -> None:
    worker.tandem_step(Step([part("a", [5], known=0, start=0, rows=1, is_new=True)], ()))
    worker.rank = 1
    assert worker.tandem_apply(lambda _, logits: logits, None) is None
