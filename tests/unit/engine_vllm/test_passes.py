"""Passes behind a step, over model runners without a model, on a stand-in for a GPU: the host waits once for all."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.drafting.proposal import Drafting, TokenDraws
from tandem.engine_vllm.step import Part
from tandem.engine_vllm.worker import RowWorker
from tandem.model.types import DraftOptions, RowKind, SamplingParams
from tests.unit.engine.stand_in_device import StandInDevice, stand_in_device

BLOCK = 4
VOCABULARY = 40
WIDTH = 32
"""Places for sequences in the runner's buffers."""


class Buffer:
    """vLLM's `CpuGpuBuffer`."""

    def __init__(self, device: StandInDevice, size: int, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.gpu = device.put(self.cpu)


class Table:
    """Block i of the sequence at place p is block 8 * p + i."""

    def __init__(self, device: StandInDevice) -> None:
        self.slot_mapping = Buffer(device, WIDTH, torch.int64)

    def compute(self, positions: Tensor, count: int) -> None:
        first = torch.arange(count, device=positions.device) * 8 * BLOCK
        self.slot_mapping.gpu[:count] = first + positions


class FakeRunner:
    """A model whose logits depend on the sum of all tokens of a sequence, which it reads from their places."""

    def __init__(self, device: StandInDevice, names: list[str]) -> None:
        self.memory = device.put(torch.zeros(WIDTH * 8 * BLOCK, dtype=torch.int64))
        table = Table(device)
        tables = SimpleNamespace(
            block_tables=[table],
            compute_slot_mapping=lambda count, starts, positions: table.compute(positions, count),
        )
        self.input_batch = SimpleNamespace(req_ids=names, block_table=tables)
        self.input_ids = Buffer(device, WIDTH, torch.int32)
        self.positions = device.put(torch.zeros(WIDTH, dtype=torch.int64))
        self.seq_lens = device.put(torch.zeros(WIDTH, dtype=torch.int32))
        self.query_start_loc = Buffer(device, WIDTH + 1, torch.int32)
        self.optimistic_seq_lens_cpu = torch.zeros(WIDTH, dtype=torch.int32)
        self.vllm_config = None
        group = SimpleNamespace(backend=SimpleNamespace(forward_includes_kv_cache_update=False))
        self.attn_groups = [[group]]
        self.model = SimpleNamespace(compute_logits=self.logits_of)
        self.weights = device.put(torch.randn(997, VOCABULARY, generator=torch.Generator().manual_seed(2)))
        self.host_lengths: list[list[int]] = []
        self._slots = table.slot_mapping.gpu

    def logits_of(self, states: Tensor) -> Tensor:
        return self.weights[states]

    def _determine_batch_execution_and_padding(self, **sizes: Any) -> tuple[Any, ...]:
        assert sizes["max_num_scheduled_tokens"] == 1
        return "none", SimpleNamespace(num_tokens=sizes["num_tokens"] + 1, num_reqs=None), False, None, None

    def _get_slot_mappings(self, **sizes: Any) -> tuple[Any, Any]:
        return {0: self._slots}, {"layer": self._slots}

    def _build_attention_metadata(self, **sizes: Any) -> tuple[Any, None]:
        count = sizes["num_reqs"]
        self.host_lengths.append(self.optimistic_seq_lens_cpu[:count].tolist())
        assert self.query_start_loc.cpu[: count + 1].tolist() == list(range(count + 1))
        return count, None

    def _prepare_padding_mask(self, count: int, width: int) -> None:
        return None

    def _init_model_kwargs(self) -> dict[str, Any]:
        return {}

    def _model_forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        count = len(self.input_batch.req_ids)
        slots = self._slots[:count]
        places = torch.where(slots < 0, len(self.memory) - 1, slots)  # nobody reads the last one
        self.memory.index_copy_(0, places, input_ids[:count].long())
        return self.states(self.seq_lens[:count])

    def states(self, lengths: Tensor) -> Tensor:
        """Of the last token of each sequence."""
        rows = self.memory.view(WIDTH, 8 * BLOCK)[: len(lengths)]
        inside = torch.arange(8 * BLOCK, device=rows.device) < lengths[:, None]
        weights = torch.arange(8 * BLOCK, device=rows.device) * 7 + 3
        return (torch.where(inside, rows + 1, 0) * weights).sum(-1) % 997


class FakeRunnerV2(FakeRunner):
    """The same model in the runner that vLLM calls V2, which finds tokens and lengths on the device itself."""

    def __init__(self, device: StandInDevice, names: list[str]) -> None:
        super().__init__(device, names)
        self.req_states = SimpleNamespace(
            req_id_to_index={name: place for place, name in enumerate(names)},
            last_sampled_tokens=device.put(torch.zeros(WIDTH, 1, dtype=torch.int64)),
            num_computed_tokens=SimpleNamespace(gpu=device.put(torch.zeros(WIDTH, dtype=torch.int32))),
            num_computed_tokens_np=np.zeros(WIDTH, dtype=np.int32),
        )
        self.execute_model_state: Any = None

    def execute_model(self, output: Any) -> None:
        names = sorted(output.num_scheduled_tokens, reverse=True)  # in an order of its own
        states = self.req_states
        places = [states.req_id_to_index[name] for name in names]
        self.host_lengths.append([int(states.num_computed_tokens_np[place]) + 1 for place in places])
        for place in places:
            position = states.num_computed_tokens.gpu[place : place + 1].long()
            token = states.last_sampled_tokens[place]
            self.memory.index_copy_(0, position + place * 8 * BLOCK, token)
        lengths = torch.where(states.num_computed_tokens.gpu > 0, states.num_computed_tokens.gpu + 1, 0)
        rows = self.states(lengths[: len(states.req_id_to_index)])
        hidden = torch.cat([rows[place : place + 1] for place in places])
        self.execute_model_state = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=names), hidden_states=hidden
        )


class FakeOutput(SimpleNamespace):
    """vLLM's `SchedulerOutput`."""

    @classmethod
    def make_empty(cls) -> FakeOutput:
        return cls()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The little of vLLM that passes call."""
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"CUDAGraphMode": SimpleNamespace(FULL="full")},
        "vllm.distributed": {"get_tp_group": lambda: SimpleNamespace(world_size=1)},
        "vllm.v1.core.sched.output": {"SchedulerOutput": FakeOutput},
        "vllm.forward_context": {"set_forward_context": lambda *given, **named: nullcontext()},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def options_of(sampling: SamplingParams, kind: RowKind, mass: float = 1.0) -> DraftOptions:
    return DraftOptions("r", sampling, row_kind=kind, draft_top_k=8, draft_support_mass=mass)


OPTIONS = {
    "greedy": options_of(SamplingParams(0.0), RowKind.TOKEN),
    "strict": options_of(SamplingParams(0.9, seed=3), RowKind.TOKEN),
    "support": options_of(SamplingParams(0.9, seed=3), RowKind.SUPPORT, 0.9),
}
TEXTS = [[5, 6, 7], [9], [3, 4, 5, 6, 7, 8, 9, 10], [1, 2]]
ROWS = [1, 1, 0, 1]
"""The third one reads a part of a prompt."""
COUNTS = [4, 2, 3]


def drafted(
    way: str, counts: list[int], texts: list[list[int]], make: type[FakeRunner] = FakeRunner
) -> tuple[list[list[int]], FakeRunner, list[str]]:
    """Tokens behind the texts with rows, which may go on with tokens that were drawn before. vLLM has the sequences in
    another order than the step."""
    order = [2, 0, 3, 1]
    with stand_in_device() as device:
        runner = make(device, [str(number) for number in order])
        for place, number in enumerate(order):
            start = place * 8 * BLOCK
            runner.memory[start : start + len(texts[number])] = device.put(torch.tensor(texts[number]))
        parts = [
            Part(str(number), False, 0, 0, text, rows, 0, ([],))
            for number, (text, rows) in enumerate(zip(texts, ROWS, strict=True))
        ]
        worker = RowWorker()
        worker.model_runner = runner
        worker.rank = 0
        lengths = device.put(torch.tensor([len(texts[number]) for number in order]))
        places = [order.index(number) for number, rows in enumerate(ROWS) if rows]
        worker._tandem_logits = runner.logits_of(runner.states(lengths))[device.put(torch.tensor(places))]
        worker._tandem_left = None, parts
        own = []
        for known, text, rows in zip(TEXTS, texts, ROWS, strict=True):
            if rows:
                own.append(Drafting(len(known), 9, OPTIONS[way], token_ids=text[len(known) :]))
        before = [len(each.token_ids) for each in own]
        device.waits.clear()
        found = worker.tandem_draft(TokenDraws, own, counts)
        assert found is not None
        tokens = [each.drafting.token_ids[count:] for each, count in zip(found, before, strict=True)]
        return tokens, runner, device.waits


LENGTHS: dict[type[FakeRunner], list[list[int]]] = {
    # In vLLM's order; the prompt rests, and so does a sequence that has all of its tokens
    FakeRunner: [[8, 4, 3, 2], [8, 5, 4, 2], [8, 6, 4, 2]],
    # Only those that go on, the last one first
    FakeRunnerV2: [[3, 2, 4], [4, 5], [6]],
}


@pytest.mark.parametrize("make", LENGTHS)
@pytest.mark.parametrize("way", OPTIONS)
def test_tokens_in_a_row_are_those_of_one_at_a_time(way: str, make: type[FakeRunner]) -> None:
    found, runner, waits = drafted(way, COUNTS, TEXTS, make)
    assert waits == ["to_host"]
    assert list(map(len, found)) == COUNTS
    for place, number in enumerate((0, 1, 3)):
        for count in range(COUNTS[place]):
            texts = [list(text) for text in TEXTS]
            texts[number] += found[place][:count]
            alone, _, _ = drafted(way, [1, 1, 1], texts)
            assert alone[place] == found[place][count : count + 1]
    assert runner.host_lengths == LENGTHS[make]
