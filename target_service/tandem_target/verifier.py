"""Runs the target model for the servicer: sequences in, verifications out."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tandem.engine.core.engine import RowEngine
from tandem.engine.core.selection import choose_backends
from tandem.engine.interface import (
    EngineOwner,
    EngineSettings,
    RowRequest,
    SequenceEngine,
    non_finite_logits_logged,
)
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.engine.steps import ModelRunner
from tandem.errors import InvalidRequestError, TandemError
from tandem.model.grammar import Grammars, GrammarState
from tandem.model.outcome_table import OutcomeTable
from tandem.model.types import (
    ENDED,
    DraftedOutcomes,
    Grammar,
    LogitAdjustments,
    ModelInfo,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.telemetry.streams import OnStep
from tandem_target.hidden_state_files import HiddenStateFiles, hidden_state_files
from tandem_target.settings import TargetSettings

OnLed: TypeAlias = Callable[[Verification | TandemError], None] | None
"""Takes the answers to steps that nobody has asked for, in order; an error ends the sequence."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files with which a coordinator tokenizes as the model does."""


def load_verifier(
    settings: TargetSettings, on_step: OnStep = None, on_failure: Callable[[], None] | None = None
) -> Verifier:
    """Load the model that the settings name."""
    if settings.uses_vllm:
        from tandem.engine_vllm.engine import load_vllm

        proposed = settings.num_speculative_tokens
        vllm = load_vllm(settings, settings.model, proposal_length=proposed, on_failure=on_failure)
        return make_verifier(vllm, settings, on_step, on_failure)
    target = load_target(settings)
    files = hidden_state_files(settings, target)
    model, tap = (target, None) if files is None else (files.tap.model, files.tap)
    backends = choose_backends(model, settings.compile, settings.compile_cache, tap)
    return make_verifier(backends, settings, on_step, on_failure, files=files)


def load_target(settings: TargetSettings) -> LoadedModel:
    """Load the model alone."""
    return load_model(
        settings.model, device=settings.device, dtype=settings.compute_dtype, threads=settings.threads
    )


def make_verifier(
    model: ModelRunner,
    settings: TargetSettings,
    on_step: OnStep = None,
    on_failure: Callable[[], None] | None = None,
    open_sequences: dict[str, Any] | None = None,
    files: HiddenStateFiles | None = None,
) -> Verifier:
    """Put a loaded model to work."""
    folder = settings.tokenizer or settings.model
    tokenizer_files = tuple(path for name in TOKENIZER_FILES if (path := folder / name).is_file())
    engine = RowEngine(model, EngineSettings.of(settings), on_step, on_failure=on_failure)
    return Verifier(engine, tokenizer_files, files, {} if open_sequences is None else open_sequences)


@dataclass(eq=False)
class Verifier(EngineOwner[SequenceEngine[Any]]):
    """The target model behind whichever engine runs it."""

    tokenizer_files: Sequence[Path]
    _files: HiddenStateFiles | None = None
    _open: dict[str, Any] = field(default_factory=dict)
    """The engine's sequences by request, which a draft beside the target reads on the same event loop."""
    _grammars: Grammars | None = field(init=False)

    def __post_init__(self) -> None:
        file = next((path for path in self.tokenizer_files if path.name == TOKENIZER_FILES[0]), None)
        self._grammars = None if file is None else Grammars.of(file, self.model_info)

    async def start(self) -> None:
        await super().start()
        if self._grammars is not None:
            await self._grammars.prepare()

    @property
    def model_info(self) -> ModelInfo:
        return self._engine.info

    async def close(self) -> None:
        await super().close()
        if self._files is not None:
            await self._files.close()

    @asynccontextmanager
    async def sequence(self, options: TargetOptions, on_led: OnLed = None) -> AsyncIterator[VerifiedSequence]:
        info = self._engine.info
        if options.adjustments:
            check_ids(options.adjustments, info.vocabulary_size)
        grammar = None if options.grammar is None else await self.open_grammar(options.grammar, options.scope)
        # The grammar's source stays here, where it is compiled: engines may pass options on.
        options = replace(options, max_length=options.max_length or info.max_length, grammar=None)
        cached = await self._engine.open(options.max_length, client=options.client, scope=options.scope)
        sequence = VerifiedSequence(self._engine, cached, options, on_led, grammar)
        self._open[options.request_id] = cached
        try:
            yield sequence
            if self._files is not None:  # not for a request that was abandoned, which leaves by an exception
                await self._files.take(self._engine, cached, sequence.kept_length, options)
        finally:
            sequence.end_lead()
            if self._open.get(options.request_id) is cached:
                del self._open[options.request_id]
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
    kept_length: int = field(default=0, init=False)
    """Tokens that will not be taken back, as far as is known; the coordinator says it at the end."""
    _unasked: deque[RowRequest] = field(default_factory=deque, init=False)
    """Steps with which it goes on by itself and which nobody has asked for, as far as answers tell: the engine's thread
    is further. Each step that is asked for begins another."""
    _asked_count: int = field(default=0, init=False)
    _outcomes: OutcomeTable = field(default_factory=OutcomeTable, init=False)

    def __post_init__(self) -> None:
        self._vocabulary_size = self.engine.info.vocabulary_size

    def confirms(self, step: VerifyStep) -> bool:
        """True for a step that the sequence has taken by itself: `on_led` takes its answer, if it has not already."""
        if not self._unasked:
            return False
        led = self._unasked[0].step
        if (step.delta, step.row_kind, step.row_count) != (led.delta, led.row_kind, led.row_count):
            return False
        self._unasked.popleft()
        self._asked_count += 1
        self._outcomes.ask(step)
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
        self._outcomes.add(drafted)

    def end_lead(self) -> None:
        """Take no further answers to steps that nobody asked for."""
        self._unasked, self._asked_count = deque(), 0

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
        self.kept_length = step.delta.base_length + len(step.delta.token_ids) - max(step.row_count - 1, 0)
        self._outcomes.ask(step)
        self.end_lead()
        unasked = self._unasked
        request = RowRequest(step, self.options, self.grammar, partial(self._led, unasked), self._outcomes)
        with non_finite_logits_logged(self.options.request_id):
            answer = await self.engine.run(self.cached, request)
        if (following := request.following(answer)) is not None:
            unasked.append(following)
        return answer


def check_ids(wanted: LogitAdjustments, vocabulary_size: int) -> None:
    """Refuse ids that the model does not have, and adjustments that leave it no token."""
    for token_id in (*wanted.biases, *wanted.suppressed_token_ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequestError(
                f"the logit of token id {token_id} is to be adjusted; ids must be in 0..{vocabulary_size - 1}"
            )
    if wanted.min_tokens > 0 and len(set(wanted.suppressed_token_ids)) >= vocabulary_size:
        raise InvalidRequestError(
            f"min_tokens is {wanted.min_tokens} and every token ends the completion; it must be 0"
        )
