"""Runs the target model for the servicer: sequences in, verifications out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from tandem.acceptance.strategies import AcceptanceRule, rule_of
from tandem.engine.interface import EngineOwner, RowRequest, SequenceEngine, non_finite_logits_logged
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.grammar import Grammars, GrammarState
from tandem.model.leading import Leading
from tandem.model.types import (
    ENDED,
    DraftedOutcomes,
    Grammar,
    LogitAdjustments,
    ModelInfo,
    StepProfile,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem_target.hidden_state_files import HiddenStateFiles

logger = logging.getLogger(__name__)

OnLed: TypeAlias = Callable[[Verification | TandemError], None] | None
"""Takes the answers to steps that nobody has asked for, in order; an error ends the sequence."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files with which a coordinator tokenizes as the model does."""


class OwnHead(Protocol):
    """A drafting head beside the target, which its engine asks for proposals."""

    async def start(self) -> None:
        """Prepare its steps and time them, before the target's engine starts."""

    async def close(self) -> None:
        """Release what it holds, once the target's engine has ended."""

    @property
    def step_profile(self) -> StepProfile:
        """Seconds that it takes for a token."""


@dataclass(eq=False)
class Verifier(EngineOwner[SequenceEngine[Any]]):
    """The target model behind whichever engine runs it."""

    tokenizer_files: Sequence[Path]
    files: HiddenStateFiles | None = None
    """Take the hidden states of sequences that have ended; None: nobody wants them."""
    own_head: OwnHead | None = None
    """Proposes in the engine's steps; None: proposals are given."""
    _grammars: Grammars | None = field(init=False)

    def __post_init__(self) -> None:
        file = next((path for path in self.tokenizer_files if path.name == TOKENIZER_FILES[0]), None)
        self._grammars = None if file is None else Grammars.of(file, self.model_info)

    async def start(self) -> None:
        if self.own_head is not None:
            await self.own_head.start()
        await super().start()
        if self._grammars is not None:
            await self._grammars.prepare()

    @property
    def model_info(self) -> ModelInfo:
        info = self._engine.info
        if self.own_head is None:
            return info
        return replace(info, head_step_profile=self.own_head.step_profile)

    async def close(self) -> None:
        await super().close()
        if self.own_head is not None:
            await self.own_head.close()
        if self.files is not None:
            await self.files.close()

    @asynccontextmanager
    async def sequence(self, options: TargetOptions, on_led: OnLed = None) -> AsyncIterator[VerifiedSequence]:
        info = self._engine.info
        if options.adjustments:
            check_ids(options.adjustments, info.vocabulary_size)
        rule = None
        if self.own_head is not None and options.acceptance is not None:
            rule = rule_of(options.acceptance, options.sampling)
        grammar = None if options.grammar is None else await self.open_grammar(options.grammar, options.scope)
        if options.features is not None and options.features.head != info.features_head:
            fields = {"request_id": options.request_id, "asked": options.features.head[:12]}
            logger.warning("features of another head were asked for, and are not sent", extra=fields)
            options = replace(options, features=None)
        # The grammar's source stays here, where it is compiled: engines may pass options on.
        options = replace(options, max_length=options.max_length or info.max_length, grammar=None)
        cached = await self._engine.open(options.max_length, client=options.client, scope=options.scope)
        sequence = VerifiedSequence(self._engine, cached, options, on_led, grammar, rule)
        try:
            yield sequence
            if self.files is not None:  # not for a request that was abandoned, which leaves by an exception
                await self.files.take(self._engine, cached, sequence.kept_length, options)
        finally:
            sequence.end_lead()
            self._engine.release(cached)

    async def open_grammar(self, grammar: Grammar, scope: str) -> GrammarState:
        if self._grammars is None:
            raise InvalidRequestError(
                f"the target has no {TOKENIZER_FILES[0]}, which structured output needs"
            )
        return await self._grammars.open(grammar, scope)


@dataclass(eq=False)
class VerifiedSequence:
    """One sequence that proposals are verified for."""

    engine: SequenceEngine[Any]
    cached: Any
    options: TargetOptions
    on_led: OnLed = None
    grammar: GrammarState | None = None
    rule: AcceptanceRule | None = None
    """Decides on proposals of the target's own head; None where it makes none."""
    kept_length: int = field(default=0, init=False)
    """Tokens that will not be taken back, as far as is known; the coordinator says it at the end."""
    _unasked: deque[RowRequest] = field(default_factory=deque, init=False)
    """Steps with which it goes on by itself and which nobody has asked for, as far as answers tell: the engine's thread
    is further. Each step that is asked for begins another."""
    _asked_count: int = field(default=0, init=False)
    _leading: Leading = field(default_factory=Leading, init=False)

    def __post_init__(self) -> None:
        self._vocabulary_size = self.engine.info.vocabulary_size

    def confirms(self, step: VerifyStep) -> bool:
        """True for a step that the sequence has taken by itself: `on_led` takes its answer, if it has not already."""
        if not self._unasked:
            return False
        if not _is_same(step, self._unasked[0].step):
            return False
        self._unasked.popleft()
        self._asked_count += 1
        self._leading.ask(step)
        self.kept_length = step.delta.length
        self.engine.grant(self.cached, self._asked_count, step.lead)
        return True

    def waits_for_pages(self) -> bool:
        return self.engine.waits_for_pages(self.cached)

    def expect(self, drafted: DraftedOutcomes) -> None:
        own = [token_id for token_id in drafted.token_ids if token_id != ENDED]
        token_ids = (*own, *drafted.lead_token_ids)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocabulary_size):
            raise InvalidRequestError(
                f"an outcome holds an id outside the vocabulary; ids must be in 0..{self._vocabulary_size - 1}"
            )
        self._leading.add(drafted)

    def end_lead(self) -> None:
        """Take no further answers to steps that nobody asked for."""
        self._unasked = deque()
        self._asked_count = 0

    def _led(
        self, unasked: deque[RowRequest], request: RowRequest, answer: Verification | TandemError
    ) -> None:
        if unasked is self._unasked and self.on_led is not None:
            if isinstance(answer, Verification) and (following := request.following(answer)) is not None:
                unasked.append(following)
            self.on_led(answer)

    async def verify(self, step: VerifyStep) -> Verification:
        for support in step.supports:
            if len(support) and not (support.min() >= 0 and support.max() < self._vocabulary_size):
                raise InvalidRequestError(
                    f"a support holds an id outside the vocabulary; ids must be in 0..{self._vocabulary_size - 1}"
                )
        if step.own_tokens is not None and self.rule is None:
            raise InvalidRequestError(
                "the step has own_head; this target has no drafting head of its own, or open has no acceptance_rule"
            )
        self.kept_length = step.delta.base_length + len(step.delta.token_ids) - max(step.row_count - 1, 0)
        self._leading.ask(step)
        self.end_lead()
        unasked = self._unasked
        request = RowRequest(
            step, self.options, self.grammar, partial(self._led, unasked), self._leading, self.rule
        )
        with non_finite_logits_logged(self.options.request_id):
            answer = await self.engine.run(self.cached, request)
        if (following := request.following(answer)) is not None:
            unasked.append(following)
        return answer


def _is_same(step: VerifyStep, led: VerifyStep) -> bool:
    """True if a step asks for just what the target has begun by itself. How many tokens its own head proposes it has
    decided already."""
    is_own = step.own_tokens is not None
    if is_own != (led.own_tokens is not None):
        return False
    return (step.delta, step.row_kind, step.row_count) == (led.delta, led.row_kind, led.row_count)


def check_ids(wanted: LogitAdjustments, vocabulary_size: int) -> None:
    """Refuse ids that the model does not have, and adjustments that leave it no token."""
    forbidden = chain.from_iterable(wanted.forbidden_sequences)
    for token_id in (*wanted.biases, *wanted.suppressed_token_ids, *wanted.allowed_token_ids, *forbidden):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequestError(
                f"the logit of token id {token_id} is to be adjusted; ids must be in 0..{vocabulary_size - 1}"
            )
    if wanted.leaves_no_token(vocabulary_size):
        raise InvalidRequestError(
            "logit_adjustments may leave no token; an allowed id must end no forbidden sequence and, with min_tokens, "
            "not the completion"
        )
