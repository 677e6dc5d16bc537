"""Targets with a head beside them, without servers, and the rounds of a greedy request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from bound_service.loading import BoundPair, load_pair
from tandem.types import (
    Delta,
    DraftOptions,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetOptions,
    TokenRow,
    VerifyStep,
)
from target_service.settings import TargetSettings
from tests.end_to_end.models import random_model, save_model

GREEDY = SamplingParams(temperature=0.0)


def small_target(**changes: object) -> Any:
    """Eight layers of random weights, with the demo pair's vocabulary."""
    shape = {"hidden_size": 48, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model(3, num_hidden_layers=8, initializer_range=0.2, **{**shape, **changes})


def saved_target(model: Any, folder: Path) -> Path:
    """Write it."""
    folder.mkdir(parents=True, exist_ok=True)
    return save_model(model, folder)


@asynccontextmanager
async def running(target: Path, head: Path | None, **settings: object) -> AsyncIterator[BoundPair]:
    """Both engines at work."""
    values: dict[str, Any] = {"model": target, "threads": 1, "max_length": 256, "compile": "off", **settings}
    made = TargetSettings(**values)
    pair = load_pair(made, head)
    async with AsyncExitStack() as stack:
        for each in (pair.proposer, pair.verifier):
            stack.push_async_callback(each.close)
            await each.start()
        yield pair


class Request:
    """A greedy request on both, round by round as the coordinator runs them."""

    def __init__(self, pair: BoundPair, name: str, prompt: Sequence[int], token_count: int = 4) -> None:
        self._pair = pair
        self._name = name
        self._token_count = token_count
        self._sent_draft = self._sent_target = 0
        self.tokens = list(prompt)
        self.proposals: list[tuple[int, tuple[int, ...]]] = []
        """Of each round: the length before it, and what was proposed."""
        self.accepted = 0

    async def run(self, new_tokens: int) -> list[int]:
        """The first `new_tokens` tokens after the prompt."""
        end = len(self.tokens) + new_tokens
        target = TargetOptions(self._name, GREEDY, prompt_length=len(self.tokens))
        draft = DraftOptions(self._name, GREEDY)
        async with (
            self._pair.verifier.sequence(target) as verified,
            self._pair.proposer.sequence(draft) as drafted,
        ):
            while len(self.tokens) < end:
                await self._round(verified, drafted)
        return self.tokens[end - new_tokens : end]

    async def _round(self, verified: Any, drafted: Any) -> None:
        length = len(self.tokens)
        delta = Delta(self._sent_draft, tuple(self.tokens[self._sent_draft :]))
        proposal: Proposal = await drafted.propose(ProposeStep(delta, self._token_count))
        self._sent_draft = length
        self.proposals.append((length, proposal.token_ids))
        delta = Delta(self._sent_target, (*self.tokens[self._sent_target :], *proposal.token_ids))
        step = VerifyStep(delta, RowKind.TOKEN, len(proposal) + 1)
        rows = (await verified.verify(step)).rows
        for index, row in enumerate(rows):
            assert isinstance(row, TokenRow)
            self.tokens.append(row.token_id)
            if index == len(proposal) or row.token_id != proposal.token_ids[index]:
                break
            self.accepted += 1
        self._sent_target = len(self.tokens) - 1


class Reference(Protocol):
    """An independent computation of a head's proposals."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The most probable tokens after these."""


def continued(model: Any, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """Greedy text by transformers' own loop."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                            eos_token_id=None, pad_token_id=0)  # fmt: skip
    return [int(each) for each in output[0, len(prompt) :]]


async def check(
    model: Any,
    folder: Path,
    head: Path | None,
    reference: Reference,
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    proposed: int = 4,
    **settings: object,
) -> int:
    """Run all prompts at once, and compare each proposal and each text; return the number of accepted tokens."""
    async with running(folder, head, **settings) as pair:
        requests = [Request(pair, str(index), prompt) for index, prompt in enumerate(prompts)]
        texts = await asyncio.gather(*(request.run(new_tokens) for request in requests))
    for prompt, text, request in zip(prompts, texts, requests, strict=True):
        assert text == continued(model, prompt, new_tokens)
        lengths = [len(proposal) for _, proposal in request.proposals]
        assert lengths == [0] + [proposed] * (len(lengths) - 1), "a proposal in every round but the first"
        for length, proposal in request.proposals[1:]:
            assert list(proposal) == reference.propose(request.tokens[:length], proposed)
    return sum(request.accepted for request in requests)
