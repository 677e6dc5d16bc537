"""DraftService: proposals, outcomes drafted ahead, and what asks for them, for many sequences in a message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, islice
from struct import Struct
from typing import TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    AheadBudget,
    Cancel,
    Delta,
    DraftedOutcomes,
    DraftLoad,
    DraftOptions,
    Finish,
    Proposal,
    ProposeStep,
    RowKind,
    SparseDistribution,
    TargetTokenizer,
)
from tandem.v1 import draft_pb2
from tandem.wire import columns
from tandem.wire.common import read_requests, write_requests
from tandem.wire.mirror import Mirror
from tandem.wire.status import Ending, ending_from_proto, ending_to_proto

Request: TypeAlias = DraftOptions | ProposeStep | Finish | Cancel
"""A coordinator's message part for one sequence."""

Answer: TypeAlias = Proposal | DraftedOutcomes
"""A draft's answer to one sequence."""

_Columns: TypeAlias = draft_pb2.ProposalColumns | draft_pb2.OutcomeColumns

_STEP = Struct("<7i")
"""Sequence, base length, number of token ids, tokens to propose, proposed tokens, branches and tokens of the budget."""
_DEPTH = Struct("<3i")
"""Depth, number of outcomes, number of lead tokens."""

Mirror(AheadBudget, draft_pb2.AheadBudget)
_LOAD = Mirror(DraftLoad, draft_pb2.DraftLoad)
load_to_proto, load_from_proto = _LOAD.to_proto, _LOAD.from_proto
_OPTIONS = Mirror(DraftOptions, draft_pb2.ProposeOpen, prompt_length="prompt_token_count")


# ---- what asks for proposals


def requests_to_proto(requests: Iterable[tuple[int, Request]]) -> draft_pb2.ProposeRequest:
    """A message for sequences by number; see `write_requests`."""
    message = draft_pb2.ProposeRequest()
    write_requests(message, requests, _OPTIONS, ProposeStep, _STEP, _numbers)
    return message


def requests_from_proto(
    message: draft_pb2.ProposeRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """The requests of a message; see `read_requests`."""
    records = columns.unpack_records(_STEP, message.steps.records, "steps")
    return read_requests(message, _options_from_proto, records, _step)


def _options_from_proto(message: draft_pb2.ProposeOpen) -> DraftOptions:
    options = _OPTIONS.from_proto(message)
    if options.draft_top_k < 0:
        raise InvalidRequestError(f"draft_top_k is {options.draft_top_k}; it must be at least 0")
    if not 0.0 <= options.draft_support_mass <= 1.0:
        raise InvalidRequestError(f"draft_support_mass is {options.draft_support_mass}; it must be in 0..1")
    if options.vocabulary_size < 0:
        raise InvalidRequestError(f"vocabulary_size is {options.vocabulary_size}; it must be at least 0")
    if options.row_kind is RowKind.DENSE:
        raise InvalidRequestError("row_kind is ROW_KIND_DENSE; a draft has token and support rows")
    if options.ahead is not None:
        _check_budget(options.ahead)
    return options


def _numbers(step: ProposeStep) -> tuple[int, ...]:
    budget = step.ahead
    branches, tokens = (budget.branch_count, budget.token_count) if budget else (0, 0)
    return step.token_count, step.proposed_count, branches, tokens


def _step(delta: Delta, size: int, proposed: int, branches: int, tokens: int) -> ProposeStep:
    if size < 0:
        raise InvalidRequestError(f"the proposal size is {size}; it must be at least 0")
    if not branches and not tokens:
        return ProposeStep(delta, size)
    if not 0 <= proposed < max(delta.length, 1):
        raise InvalidRequestError(
            f"proposed_count is {proposed}; it must be from 0 to below the number of tokens, {delta.length}"
        )
    if proposed and size:
        raise InvalidRequestError(
            f"proposed_count is {proposed} and the proposal size {size}; one of them must be 0"
        )
    return ProposeStep(delta, size, _check_budget(AheadBudget(branches, tokens)), proposed)


def _check_budget(budget: AheadBudget) -> AheadBudget:
    for name, value, limit in (
        ("branch_count", budget.branch_count, MAX_BRANCHES),
        ("token_count", budget.token_count, MAX_AHEAD_TOKENS),
    ):
        if not 1 <= value <= limit:
            raise InvalidRequestError(f"{name} of the budget is {value}; it must be from 1 to {limit}")
    return budget


# ---- tokenizers of targets

MAX_TOKENIZER_BYTES = 128 << 20
"""Bound of a tokenizer.json, as for a model's own."""


def tokenizer_to_proto(tokenizer: TargetTokenizer) -> Iterator[draft_pb2.MapVocabularyRequest]:
    """The messages with a tokenizer."""
    size = tokenizer.vocabulary_size
    yield draft_pb2.MapVocabularyRequest(
        tokenizer_hash=tokenizer.hash, vocabulary_size=size, eos_token_ids=tokenizer.eos_token_ids
    )
    for part in columns.parts_of(tokenizer.content):
        yield draft_pb2.MapVocabularyRequest(content=part)


async def tokenizer_from_proto(parts: AsyncIterator[draft_pb2.MapVocabularyRequest]) -> TargetTokenizer:
    """The tokenizer in some messages."""
    first, content = draft_pb2.MapVocabularyRequest(), bytearray()
    async for part in parts:
        if not first.tokenizer_hash:
            first = part
        content += part.content
        if len(content) > MAX_TOKENIZER_BYTES:
            raise InvalidRequestError(
                f"the tokenizer is too large; at most {MAX_TOKENIZER_BYTES} bytes are taken"
            )
    columns.check_count(len(first.eos_token_ids), "ids that end a text")
    if not first.tokenizer_hash or first.vocabulary_size <= 0:
        raise InvalidRequestError("the tokenizer came without its hash or without the size of the vocabulary")
    return TargetTokenizer(
        first.tokenizer_hash, first.vocabulary_size, bytes(content), tuple(first.eos_token_ids)
    )


# ---- proposals and outcomes


def answers_to_proto(
    answers: Iterable[tuple[int, Answer | Ending]], load: DraftLoad | None = None
) -> draft_pb2.ProposeResponse:
    """A message of answers to sequences by number, and how busy the service is; those of one form become one block."""
    message = draft_pb2.ProposeResponse()
    if load is not None:
        message.load.CopyFrom(load_to_proto(load))
    proposals: dict[tuple[bool, bool], list[tuple[int, Proposal]]] = {}
    outcomes: dict[bool, list[tuple[int, DraftedOutcomes]]] = {}
    for sequence, answer in answers:
        if isinstance(answer, Proposal):
            form = bool(answer.distributions), answer.token_logits is not None
            proposals.setdefault(form, []).append((sequence, answer))
        elif isinstance(answer, DraftedOutcomes):
            outcomes.setdefault(bool(answer.distributions), []).append((sequence, answer))
        else:
            message.ends.append(ending_to_proto(sequence, answer))
    for block in proposals.values():
        added = message.proposals.add()
        _write_tokens(added, block)
        logits = [proposal.token_logits for _, proposal in block if proposal.token_logits is not None]
        added.token_logits = columns.pack_floats(np.concatenate(logits)) if logits else b""
    for pushed in outcomes.values():
        outcomes_to_proto(message.outcomes.add(), pushed)
    return message


def outcomes_to_proto(
    message: draft_pb2.OutcomeColumns, numbered: Sequence[tuple[int, DraftedOutcomes]]
) -> None:
    """Write outcomes, each by the number of its sequence; all of them have distributions, or none."""
    outcomes = [each for _, each in numbered]
    _write_tokens(message, numbered)
    message.depths = b"".join(
        [_DEPTH.pack(each.depth, len(each.accepted_counts), len(each.lead_token_ids)) for each in outcomes]
    )
    message.accepted_counts = _joined(each.accepted_counts for each in outcomes)
    message.next_token_ids = _joined(each.next_token_ids for each in outcomes)
    message.lead_token_ids = _joined(each.lead_token_ids for each in outcomes)


def _write_tokens(message: _Columns, numbered: Sequence[tuple[int, Answer]]) -> None:
    """Write the columns of any answers: their records, their tokens, and what these were drawn from."""
    message.records = columns.pack_answers((number, each, len(each.token_ids)) for number, each in numbered)
    message.token_ids = _joined(each.token_ids for _, each in numbered)
    if drawn_from := [distribution for _, each in numbered for distribution in each.distributions]:
        drawn = message.distributions
        drawn.support_sizes = columns.pack_ints([len(each.token_ids) for each in drawn_from])
        drawn.support_ids = columns.pack_ids([each.token_ids for each in drawn_from])
        drawn.probabilities = columns.pack_floats(np.concatenate([each.probs for each in drawn_from]))


def _joined(parts: Iterable[Sequence[int]]) -> bytes:
    return columns.pack_ints(list(chain.from_iterable(parts)))


def answers_from_proto(message: draft_pb2.ProposeResponse) -> Iterator[tuple[int, Answer | Ending]]:
    """The answers of a message, by number of the sequence."""
    block_count = len(message.proposals) + len(message.outcomes)
    columns.check_count(block_count + len(message.ends), "blocks and ends")
    blocks: list[_Columns] = [*message.proposals, *message.outcomes]
    columns.check_count(sum([columns.answer_count(each.records) for each in blocks]), "answers")
    columns.check_count(sum([len(each.token_ids) // 4 for each in blocks]), "tokens", columns.MAX_ROWS)
    for proposals in message.proposals:
        answers, token_ids, distributions = _read_tokens(proposals)
        has_logits, start = bool(proposals.token_logits), 0
        logits = columns.unpack_floats(
            proposals.token_logits, "logits", has_logits * sum(map(len, token_ids))
        )
        for (sequence, base_length, count, cost), own, drawn_from in zip(
            answers, token_ids, distributions, strict=True
        ):
            own_logits = logits[start : start + count] if has_logits else None
            start += count
            yield sequence, Proposal(base_length, own, drawn_from, own_logits, cost)
    for outcomes in message.outcomes:
        yield from outcomes_from_proto(outcomes)
    for end in message.ends:
        yield end.sequence, ending_from_proto(end)


def outcomes_from_proto(message: draft_pb2.OutcomeColumns) -> Iterator[tuple[int, DraftedOutcomes]]:
    """The outcomes of a message, by number of the sequence."""
    answers, token_ids, distributions = _read_tokens(message)
    depths = columns.unpack_records(_DEPTH, message.depths, "depths", len(answers))
    outcomes = [count for _, count, _ in depths]
    parts = zip(
        token_ids,
        columns.split(message.accepted_counts, outcomes, "accepted counts"),
        columns.split(message.next_token_ids, outcomes, "next tokens"),
        distributions,
        columns.split(message.lead_token_ids, [count for _, _, count in depths], "lead tokens"),
        strict=True,
    )
    for (sequence, base_length, _, cost), (depth, _, _), own in zip(answers, depths, parts, strict=True):
        yield sequence, DraftedOutcomes(base_length, depth, *own, cost)


def sums_to_one(total: float) -> bool:
    """True if probabilities with this sum may be a distribution, after rounding to binary32."""
    return 0.999 < total < 1.001


def _read_tokens(
    message: _Columns,
) -> tuple[list[columns.AnswerRecord], list[tuple[int, ...]], list[tuple[SparseDistribution, ...]]]:
    """Of each answer its record, its tokens, and what each token was drawn from; nothing where it is deterministic."""
    answers = list(columns.unpack_answers(message.records))
    counts = [count for _, _, count, _ in answers]
    tokens = columns.split(message.token_ids, counts, "tokens")
    drawn = message.distributions
    if not drawn.ByteSize():
        return answers, tokens, [()] * len(counts)
    size_count = len(drawn.support_sizes) // 4
    if size_count not in (0, sum(counts)):
        raise ProtocolError(
            f"{sum(counts)} tokens came with {size_count} distributions; there must be one for each token or none"
        )
    sizes = columns.unpack_ints(drawn.support_sizes, "support sizes")
    columns.check_count(len(drawn.support_ids) // 4, "ids in distributions", columns.MAX_SUPPORT_IDS)
    token_ids = columns.unpack_ids(drawn.support_ids, "support ids")
    spans = columns.bounds(sizes, len(token_ids), "support ids")
    probs = columns.unpack_floats(drawn.probabilities, "probabilities", len(token_ids))
    # Supports are short: Python's own sum over a list is faster than numpy's, which takes microseconds to begin.
    values = probs.tolist()
    totals = [sum(values[first:last]) for first, last in spans]
    # binary32 rounded each probability; the draft sampled in proportion to them. One that does not sum to 1 stays as
    # it is, for whoever refuses it.
    divisors = [each if sums_to_one(each) else 1.0 for each in totals]
    scaled = probs.astype(float) / np.repeat(divisors, sizes)
    each = iter([SparseDistribution(token_ids[first:last], scaled[first:last]) for first, last in spans])
    return answers, tokens, [tuple(islice(each, count)) for count in counts]
