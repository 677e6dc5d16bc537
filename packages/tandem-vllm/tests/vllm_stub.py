"""A stand-in for the parts of vLLM that the plug-in meets: its packages, its configuration, its model runner.

The runner keeps a batch as vLLM 0.32 does: rows are swapped and condensed between steps, a prompt may be read in parts,
requests are preempted and come back, and proposals are verified against a target that is a function of all tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from tandem_vllm import TandemProposer
from tandem_vllm.link import target_info
from tandem_vllm.proposer import StepDrafter
from tests.paths import DEMO_TARGET
from tests.service.fakes import MAX_LENGTH, FakeDraft, serving

VERSION = "0.32.0"
TOKEN_COUNT = 3
NextToken = Callable[[Sequence[int]], int]


class GPUModelRunner:
    """As far as its source is read."""

    drafter: Any
    input_batch: Any
    speculative_config: Any

    def propose_draft_token_ids(self, sampled_token_ids: Any, slot_mappings: Any) -> Any:
        """Call a proposer as vLLM 0.32 does."""
        drafted = None
        if self.speculative_config.method == "ngram":
            drafted = self.drafter.propose(self.speculative_config.num_speculative_tokens, sampled_token_ids)
        elif self.speculative_config.method == "custom_class":
            drafted = self.drafter.propose(
                sampled_token_ids,
                self.input_batch.num_tokens_no_spec,
                self.input_batch.token_ids_cpu,
                slot_mappings=slot_mappings,
            )
        return drafted


class ChangedRunner:
    """Another release's."""

    drafter: Any
    method: str

    def propose_draft_token_ids(self, sampled_token_ids: Any, request_ids: Any) -> Any:
        """Call a proposer otherwise."""
        if self.method == "custom_class":
            return self.drafter.propose(sampled_token_ids, request_ids)
        return None


def modules(runner: type = GPUModelRunner, version: str = VERSION) -> dict[str, ModuleType]:
    """The packages of vLLM that the plug-in imports."""
    names = "vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu_model_runner"
    distributed = "vllm.distributed", "vllm.distributed.parallel_state"
    made = {name: ModuleType(name) for name in (*names, *distributed)}
    # A process alone hears itself
    group = SimpleNamespace(broadcast_object=lambda found, src: found)
    made[distributed[1]].get_tp_group = lambda: group  # type: ignore[attr-defined]
    made["vllm"].__version__ = version  # type: ignore[attr-defined]
    made["vllm.v1.worker.gpu_model_runner"].GPUModelRunner = runner  # type: ignore[attr-defined]
    return made


def install(patch: pytest.MonkeyPatch, runner: type = GPUModelRunner, version: str = VERSION) -> None:
    for name, module in modules(runner, version).items():
        patch.setitem(sys.modules, name, module)


def config() -> Any:
    """The part of `VllmConfig` that the plug-in reads, with the demo pair's tokenizer."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="target", tokenizer=str(DEMO_TARGET), max_model_len=MAX_LENGTH, get_vocab_size=lambda: 2048
        ),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=TOKEN_COUNT),
    )


_names = itertools.count()


@dataclass(eq=False)
class Request:
    """One request of the runner."""

    tokens: list[int]
    unread: int = 0
    """Tokens of the prompt that later steps read."""
    proposal: list[int] = field(default_factory=list)
    temperature: float = 0.0
    structured: bool = False
    salt: str | None = None
    """Extra arguments that it gives in `vllm_xargs`."""
    name: str = field(default_factory=lambda: f"request-{next(_names)}")

    @property
    def sampling_params(self) -> Any:
        """In vLLM's words."""
        grammar = object() if self.structured else None
        extra = None if self.salt is None else {"cache_salt": self.salt}
        return SimpleNamespace(
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=None,
            structured_outputs=grammar,
            extra_args=extra,
        )


class ModelRunner:
    """The attributes of vLLM's runner that the plug-in reads and sets, over a batch."""

    def __init__(self, batch: Runner) -> None:
        self.batch = batch
        self.device = torch.device("cpu")
        self._draft_probs: torch.Tensor | None = None
        self._draft_prob_req_ids: list[str] | None = None

    @property
    def input_batch(self) -> Any:
        """The requests that have a row."""
        names = [request.name for request in self.batch.requests]
        return SimpleNamespace(req_ids=names, vocab_size=2048)


class Runner:
    """A batch, and steps of it."""

    def __init__(self, target: NextToken, max_rows: int = 24) -> None:
        self._target = target
        self._token_ids = np.zeros((max_rows, MAX_LENGTH), np.int32)
        self._lengths = np.zeros(max_rows, np.int32)
        self.requests: list[Request] = []
        """By row."""
        self._begun: dict[str, Request] = {}
        """Of which steps have told."""
        self.preempted: list[Request] = []
        self.accepted = 0
        self.proposed = 0

    def step(self, proposer: Any) -> None:
        """Verify what was proposed, sample, and have the next tokens proposed."""
        proposer.drafts.begin_step(self._scheduled())
        sampled = [self._sampled(request) for request in self.requests]
        for row, request in enumerate(self.requests):
            self._lengths[row] = len(request.tokens)
            self._token_ids[row, : len(request.tokens)] = request.tokens
            self._token_ids[row, len(request.tokens) :] = -1  # nothing past the end may be read
        proposals = proposer.propose(sampled, self._lengths, self._token_ids, slot_mappings=None)
        assert len(proposals) == len(self.requests)
        for request, proposal in zip(self.requests, proposals, strict=True):
            assert len(proposal) <= TOKEN_COUNT
            request.proposal = proposal
            self.proposed += len(proposal)
        self._end()

    def disturb(self, chance: random.Random) -> None:
        """Swap, add, remove, preempt or bring back."""
        rows = len(self.requests)
        match chance.choice(("swap", "add", "add", "remove", "preempt", "resume", "nothing")):
            case "add" if rows < len(self._lengths):
                prompt = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 9))]
                self.requests.append(Request(prompt, unread=chance.choice((0, 0, 1))))
            case "swap" if rows > 1:
                a, b = chance.sample(range(rows), 2)
                self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
            case "remove" if rows:
                self._take(chance.randrange(rows))
            case "preempt" if rows:
                self.preempted.append(self._take(chance.randrange(rows)))
            case "resume" if self.preempted and rows < len(self._lengths):
                request = self.preempted.pop()
                request.proposal = []
                request.unread = 1
                self.requests.append(request)

    def _scheduled(self) -> Any:
        live = {request.name: request for request in (*self.requests, *self.preempted)}
        over = [name for name, request in self._begun.items() if live.get(name) is not request]
        new = [request for request in self.requests if self._begun.get(request.name) is not request]
        self._begun = {name: request for name, request in self._begun.items() if name not in over}
        self._begun |= {request.name: request for request in new}
        return SimpleNamespace(
            finished_req_ids=over,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.name,
                    prompt_token_ids=list(request.tokens),
                    prefill_token_ids=None,
                    sampling_params=request.sampling_params,
                )
                for request in new
            ],
        )

    def _take(self, row: int) -> Request:
        """Remove a row; the last one takes its place, as vLLM condenses."""
        request = self.requests[row]
        last = self.requests.pop()
        if last is not request:
            self.requests[row] = last
        return request

    def _sampled(self, request: Request) -> list[int]:
        if request.unread:
            request.unread -= 1
            return []
        sampled: list[int] = []
        for proposed in [*request.proposal, None]:
            token_id = self._target(request.tokens + sampled)
            sampled.append(token_id)
            if token_id != proposed:
                break
        self.accepted += len(sampled) - 1
        request.tokens += sampled
        return sampled

    def _end(self) -> None:
        for row in reversed(range(len(self.requests))):
            if len(self.requests[row].tokens) > MAX_LENGTH - 2 * (TOKEN_COUNT + 1):
                self._take(row)


PATIENCE = 5.0
"""Seconds. Long, so that what comes too late has another cause than a busy machine."""

STEP_SECONDS = 0.01
"""Time that a step of the stand-in takes. A draft reads prompts meanwhile."""


def hashed(tokens: Sequence[int]) -> int:
    """Return a next token that depends on every token before it: proposals for other tokens are never right."""
    value = 7
    for token_id in tokens:
        value = (value * 1_000_003 + token_id + 1) % 2_147_483_647
    return value % 2048


DraftT = TypeVar("DraftT", bound=FakeDraft)


def fitting(draft: DraftT) -> DraftT:
    """Give a fake draft the tokenizer of the stand-in's model."""
    info = target_info(config().model_config, 1)
    draft.model_info = replace(draft.model_info, tokenizer_hash=info.tokenizer_hash)
    return draft


@asynccontextmanager
async def plugged(
    *drafts: FakeDraft | str,
    patience: float = PATIENCE,
    ahead: str = "off",
    auth_token: str | None = None,
    **options: str,
) -> AsyncIterator[TandemProposer]:
    """A proposer as vLLM makes it, connected to these drafts: those at an address, and fakes, which are served."""
    variables = {"DRAFT_AHEAD": ahead, "DRAFT_PATIENCE_SECONDS": str(patience), **options}
    loggers = [logging.getLogger(name) for name in ("tandem", "tandem_coordinator")]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        fakes = [each for each in drafts if isinstance(each, FakeDraft)]
        served = [await stack.enter_async_context(serving(each, auth_token=auth_token)) for each in fakes]
        addresses = [each for each in drafts if isinstance(each, str)] + [address for address, _ in served]
        variables["DRAFT_ADDRESS"] = ",".join(addresses)
        install(patch)
        for name, value in variables.items():
            patch.setenv(f"TANDEM_VLLM_{name}", value)
        proposer = TandemProposer(config())
        proposer.attach(ModelRunner(Runner(hashed)))
        await asyncio.to_thread(proposer.load_model, None)
        try:
            yield proposer
        finally:
            await asyncio.to_thread(steps_of(proposer).close)
            for each, (level, propagate, handlers) in zip(loggers, before, strict=True):
                each.setLevel(level)
                each.propagate = propagate
                each.handlers = handlers


def steps_of(proposer: TandemProposer) -> StepDrafter:
    assert proposer.drafts.steps is not None
    return proposer.drafts.steps


async def run(
    proposer: TandemProposer, runner: Runner, steps: int, disturbed: Callable[[], None] = lambda: None
) -> None:
    """Make steps on a thread, as vLLM's blocks, while this loop serves the drafts."""
    proposer.attach(ModelRunner(runner))
    for _ in range(steps):
        disturbed()
        await asyncio.to_thread(runner.step, proposer)
        await asyncio.sleep(STEP_SECONDS)


def disturbance(runner: Runner, seed: int) -> Callable[[], None]:
    chance = random.Random(seed)
    return lambda: runner.disturb(chance)
