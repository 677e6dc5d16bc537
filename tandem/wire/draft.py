"""DraftService: proposals, outcomes drafted ahead, and what asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TypeAlias

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    AheadBudget,
    Cancel,
    DraftedOutcomes,
    DraftLoad,
    DraftOptions,
    Finish,
    HiddenStates,
    Proposal,
    ProposeStep,
    RowKind,
    TargetTokenizer,
    VocabularyMapping,
)
from tandem.v1 import draft_pb2
from tandem.wire.bounds import check_message
from tandem.wire.common import (
    check_sequence,
    file_parts,
    missing,
    read_delta,
    read_options,
    read_outcomes,
    read_proposal,
    write_delta,
    write_options,
    write_outcomes,
    write_proposal,
)
from tandem.wire.converter import Converter, enum_codec
from tandem.wire.features import PassedStates, read_states, write_states
from tandem.wire.status import Ending, read_ending, write_ending

Request: TypeAlias = DraftOptions | ProposeStep | PassedStates | HiddenStates | Finish | Cancel
"""A part of a coordinator's message, about one sequence."""

Answer: TypeAlias = Proposal | DraftedOutcomes
"""A draft's answer to one sequence."""

LOAD: Converter[DraftLoad, draft_pb2.DraftLoad] = Converter(DraftLoad, draft_pb2.DraftLoad)
_MAPPING = enum_codec(VocabularyMapping, draft_pb2.VocabularyMapping.DESCRIPTOR, "vocabulary_mapping")


# ---- what asks for proposals


def requests_to_proto(requests: Iterable[tuple[int, Request]]) -> draft_pb2.ProposeRequest:
    """A message of requests, each with the number of its sequence."""
    message = draft_pb2.ProposeRequest()
    parts = message.parts
    for sequence, request in requests:
        part = parts.add()
        part.sequence = sequence
        if isinstance(request, ProposeStep):
            _write_step(part.step, request)
        elif isinstance(request, DraftOptions):
            _write_open(part.open, request)
        elif isinstance(request, PassedStates | HiddenStates):
            write_states(part.features, request)
        elif isinstance(request, Finish):
            part.finish.kept_token_count = request.token_count
        else:
            part.cancel.SetInParent()
    return message


def requests_from_proto(
    message: draft_pb2.ProposeRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """The requests of a message, each with the number of its sequence; an error in place of one that is wrong."""
    check_message(message)
    for part in message.parts:
        sequence = check_sequence(part)
        try:
            yield sequence, _read_request(part)
        except InvalidRequestError as error:
            yield sequence, error


def _read_request(part: draft_pb2.ProposeRequest.Part) -> Request:
    match part.WhichOneof("content"):
        case "step":
            return _read_step(part.step)
        case "open":
            return _read_open(part.open)
        case "finish":
            return Finish(part.finish.kept_token_count)
        case "cancel":
            return Cancel()
        case "features":
            return read_states(part.features)
        case _:
            raise InvalidRequestError("a part has no content; it must hold open, step, finish or cancel")


def _write_open(message: draft_pb2.ProposeOpen, options: DraftOptions) -> None:
    write_options(message, options)
    message.with_distributions = options.row_kind is RowKind.SUPPORT
    message.draft_top_k = options.draft_top_k
    message.draft_support_mass = options.draft_support_mass
    message.with_token_logits = options.with_token_logits
    message.noise_is_unknown = options.noise_is_unknown
    message.tokenizer_hash = options.tokenizer_hash
    message.vocabulary_mapping = _MAPPING.encode(options.vocabulary_mapping)
    message.vocabulary_size = options.vocabulary_size
    if options.ahead is not None:
        _write_budget(message.ahead, options.ahead)


def _read_open(message: draft_pb2.ProposeOpen) -> DraftOptions:
    options = DraftOptions(
        **read_options(message),
        row_kind=RowKind.SUPPORT if message.with_distributions else RowKind.TOKEN,
        draft_top_k=message.draft_top_k,
        with_token_logits=message.with_token_logits,
        ahead=_read_budget(message.ahead) if message.HasField("ahead") else None,
        tokenizer_hash=message.tokenizer_hash,
        vocabulary_mapping=_MAPPING.decode(message.vocabulary_mapping),
        draft_support_mass=message.draft_support_mass,
        noise_is_unknown=message.noise_is_unknown,
        vocabulary_size=message.vocabulary_size,
    )
    if options.draft_top_k < 0:
        raise InvalidRequestError(f"draft_top_k is {options.draft_top_k}; it must be at least 0")
    if not 0.0 <= options.draft_support_mass <= 1.0:
        raise InvalidRequestError(f"draft_support_mass is {options.draft_support_mass}; it must be in 0..1")
    if options.vocabulary_size < 0:
        raise InvalidRequestError(f"vocabulary_size is {options.vocabulary_size}; it must be at least 0")
    return options


def _write_step(message: draft_pb2.ProposeStep, step: ProposeStep) -> None:
    if step.is_answered:
        write_delta(message.committed, step.delta, 0)
        message.propose.max_tokens = step.token_count
        if step.ahead is not None:
            _write_budget(message.propose.ahead, step.ahead)
    else:
        assert step.ahead is not None, "so it has no answer of its own"
        proposed = write_delta(message.committed, step.delta, step.proposed_count)
        message.draft_ahead.token_ids.extend(proposed)
        _write_budget(message.draft_ahead.ahead, step.ahead)


def _read_step(message: draft_pb2.ProposeStep) -> ProposeStep:
    match message.WhichOneof("question"):
        case "propose":
            asked = message.propose
            if asked.max_tokens < 0:
                raise InvalidRequestError(f"max_tokens is {asked.max_tokens}; it must be at least 0")
            budget = _read_budget(asked.ahead) if asked.HasField("ahead") else None
            if budget is not None and not asked.max_tokens:
                raise InvalidRequestError(
                    "max_tokens is 0 and ahead is set; outcomes alone are for draft_ahead"
                )
            return ProposeStep(read_delta(message, ()), asked.max_tokens, budget)
        case "draft_ahead":
            if not message.draft_ahead.HasField("ahead"):
                raise missing("draft_ahead.ahead")
            proposed = message.draft_ahead.token_ids[:]
            delta = read_delta(message, proposed)
            if proposed and delta.length == len(proposed):
                raise InvalidRequestError(
                    f"draft_ahead.token_ids are {len(proposed)} tokens behind no committed one; there must be one"
                )
            return ProposeStep(delta, 0, _read_budget(message.draft_ahead.ahead), len(proposed))
        case _:
            raise missing("step.question (propose or draft_ahead)")


def _write_budget(message: draft_pb2.AheadBudget, budget: AheadBudget) -> None:
    message.branch_count = budget.branch_count
    message.token_count = budget.token_count


def _read_budget(message: draft_pb2.AheadBudget) -> AheadBudget:
    for name, value, limit in (
        ("branch_count", message.branch_count, MAX_BRANCHES),
        ("token_count", message.token_count, MAX_AHEAD_TOKENS),
    ):
        if not 1 <= value <= limit:
            raise InvalidRequestError(f"{name} of the budget is {value}; it must be from 1 to {limit}")
    return AheadBudget(message.branch_count, message.token_count)


# ---- proposals and outcomes


def answers_to_proto(
    answers: Iterable[tuple[int, Answer | Ending]], load: DraftLoad | None = None
) -> draft_pb2.ProposeResponse:
    """A message of answers, each with the number of its sequence, and how busy the service is."""
    message = draft_pb2.ProposeResponse()
    if load is not None:
        message.load.CopyFrom(LOAD.to_proto(load))
    parts = message.parts
    for sequence, answer in answers:
        part = parts.add()
        part.sequence = sequence
        if isinstance(answer, Proposal):
            write_proposal(part.proposal, answer)
        elif isinstance(answer, DraftedOutcomes):
            write_outcomes(part.outcomes, answer)
        else:
            write_ending(part.ending, answer)
    return message


def answers_from_proto(
    message: draft_pb2.ProposeResponse,
) -> Iterator[tuple[int, Answer | Ending | ProtocolError]]:
    """The answers of a message, each with the number of its sequence; an error in place of one that is wrong."""
    check_message(message)
    for part in message.parts:
        sequence = check_sequence(part)
        try:
            yield sequence, _read_answer(part)
        except ProtocolError as error:
            yield sequence, error


def _read_answer(part: draft_pb2.ProposeResponse.Part) -> Answer | Ending:
    match part.WhichOneof("content"):
        case "proposal":
            return read_proposal(part.proposal)
        case "outcomes":
            return read_outcomes(part.outcomes)
        case "ending":
            return read_ending(part.ending)
        case _:
            raise ProtocolError("a part has no content; it must hold proposal, outcomes or ending")


# ---- tokenizers of targets

MAX_TOKENIZER_BYTES = 128 << 20
"""Bound of a tokenizer.json, as for a model's own."""


def tokenizer_to_proto(tokenizer: TargetTokenizer) -> Iterator[draft_pb2.MapVocabularyRequest]:
    """The messages with a tokenizer."""
    size = tokenizer.vocabulary_size
    yield draft_pb2.MapVocabularyRequest(
        tokenizer_hash=tokenizer.hash, vocabulary_size=size, eos_token_ids=tokenizer.eos_token_ids
    )
    for part in file_parts(tokenizer.content):
        yield draft_pb2.MapVocabularyRequest(content=part)


async def tokenizer_from_proto(parts: AsyncIterator[draft_pb2.MapVocabularyRequest]) -> TargetTokenizer:
    """The tokenizer in some messages."""
    first = draft_pb2.MapVocabularyRequest()
    content = bytearray()
    async for part in parts:
        if not first.tokenizer_hash:
            first = part
            check_message(part)
        content += part.content
        if len(content) > MAX_TOKENIZER_BYTES:
            raise InvalidRequestError(
                f"the tokenizer is too large; at most {MAX_TOKENIZER_BYTES} bytes are taken"
            )
    if not first.tokenizer_hash or first.vocabulary_size <= 0:
        raise InvalidRequestError("the tokenizer came without its hash or without the size of the vocabulary")
    return TargetTokenizer(
        first.tokenizer_hash, first.vocabulary_size, bytes(content), tuple(first.eos_token_ids)
    )
