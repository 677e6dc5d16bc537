"""TargetService: verifications and what asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.types import (
    MAX_AHEAD_TOKENS,
    MAX_BRANCHES,
    MAX_LEAD,
    MAX_LOGIT_BIAS,
    AcceptanceTerms,
    CacheCounts,
    Cancel,
    Delta,
    DenseRow,
    DraftedOutcomes,
    FeatureRequest,
    Finish,
    GoesOn,
    HiddenStates,
    IntArray,
    LogitAdjustments,
    Pending,
    Proposal,
    RowKind,
    RowLogprobs,
    RowStatistics,
    SupportRow,
    TargetOptions,
    TargetRow,
    TokenRow,
    Verification,
    VerifyStep,
)
from tandem.v1 import target_pb2, types_pb2
from tandem.wire.bounds import check_message
from tandem.wire.common import (
    ROW_KIND,
    check_sequence,
    int_array,
    logits_from_tensor,
    logits_to_tensor,
    missing,
    read_cost,
    read_delta,
    read_options,
    read_outcomes,
    read_proposal,
    write_cost,
    write_delta,
    write_options,
    write_outcomes,
    write_proposal,
)
from tandem.wire.converter import Converter
from tandem.wire.features import PassedStates, pass_states, write_states
from tandem.wire.status import Ending, read_ending, write_ending

Request: TypeAlias = TargetOptions | VerifyStep | DraftedOutcomes | Finish | Cancel
"""A part of a coordinator's message, about one sequence."""

_EMPTY_SUPPORT: IntArray = np.empty(0, dtype=np.int64)
_ADJUSTMENTS: Converter[LogitAdjustments, target_pb2.LogitAdjustments] = Converter(
    LogitAdjustments, target_pb2.LogitAdjustments, apart=("forbidden_sequences",)
)


# ---- what asks for verifications


def requests_to_proto(requests: Iterable[tuple[int, Request]]) -> target_pb2.VerifyRequest:
    """A message of requests, each with the number of its sequence."""
    message = target_pb2.VerifyRequest()
    parts = message.parts
    for sequence, request in requests:
        part = parts.add()
        part.sequence = sequence
        if isinstance(request, VerifyStep):
            _write_step(part.step, request)
        elif isinstance(request, DraftedOutcomes):
            write_outcomes(part.outcomes, request)
        elif isinstance(request, TargetOptions):
            _write_open(part.open, request)
        elif isinstance(request, Finish):
            part.finish.kept_token_count = request.token_count
        else:
            part.cancel.SetInParent()
    return message


def requests_from_proto(
    message: target_pb2.VerifyRequest,
) -> Iterator[tuple[int, Request | InvalidRequestError]]:
    """The requests of a message, each with the number of its sequence; an error in place of one that is wrong."""
    check_message(message)
    for part in message.parts:
        sequence = check_sequence(part)
        try:
            yield sequence, _read_request(part)
        except InvalidRequestError as error:
            yield sequence, error
        except ProtocolError as error:
            yield sequence, InvalidRequestError(str(error))


def _read_request(part: target_pb2.VerifyRequest.Part) -> Request:
    match part.WhichOneof("content"):
        case "step":
            return _read_step(part.step)
        case "outcomes":
            return _check_outcomes(read_outcomes(part.outcomes))
        case "open":
            return _read_open(part.open)
        case "finish":
            return Finish(part.finish.kept_token_count)
        case "cancel":
            return Cancel()
        case _:
            raise InvalidRequestError(
                "a part has no content; it must hold open, step, outcomes, finish or cancel"
            )


def _write_open(message: target_pb2.VerifyOpen, options: TargetOptions) -> None:
    write_options(message, options)
    message.end_token_ids.extend(options.end_token_ids)
    message.draft_top_k = options.draft_top_k
    if options.logprobs is not None:
        message.logprob_count = options.logprobs
    message.with_sampled_logprobs = options.sampled_logprobs
    message.weights_fingerprint = options.weights_fingerprint
    if options.features is not None:
        message.features.head = options.features.head
        if options.features.prompt_window is not None:
            message.features.prompt_window = options.features.prompt_window
    if options.acceptance is not None:
        _write_rule(message.acceptance_rule, options.acceptance)
    if options.adjustments != _NO_ADJUSTMENTS:
        message.logit_adjustments.MergeFrom(_ADJUSTMENTS.to_proto(options.adjustments))
        for sequence in options.adjustments.forbidden_sequences:
            message.logit_adjustments.forbidden_sequences.add(token_ids=sequence)


_NO_ADJUSTMENTS = LogitAdjustments()
MAX_ROW_LOGPROBS = 128
"""Bound of the most probable tokens of a row that a sequence may ask for; requests may ask for 20."""


def _write_rule(message: target_pb2.AcceptanceRule, terms: AcceptanceTerms) -> None:
    message.name = terms.name
    message.epsilon = terms.epsilon
    message.delta = terms.delta


def _read_open(message: target_pb2.VerifyOpen) -> TargetOptions:
    own = message.logit_adjustments
    forbidden = tuple(tuple(sequence.token_ids) for sequence in own.forbidden_sequences)
    if () in forbidden:
        raise InvalidRequestError("forbidden_sequences holds an empty one; each must have an id")
    adjustments = _ADJUSTMENTS.from_proto(own, forbidden_sequences=forbidden)
    if adjustments.min_tokens < 0:
        raise InvalidRequestError(f"min_tokens is {adjustments.min_tokens}; it must be at least 0")
    for token_id, bias in adjustments.biases.items():
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"the bias of token {token_id} is {bias:g}; it must be between {-MAX_LOGIT_BIAS:g} and "
                f"{MAX_LOGIT_BIAS:g}"
            )
    if message.draft_top_k < 0:
        raise InvalidRequestError(f"draft_top_k is {message.draft_top_k}; it must be at least 0")
    return TargetOptions(
        **read_options(message),
        adjustments=adjustments,
        end_token_ids=tuple(message.end_token_ids),
        acceptance=_read_rule(message.acceptance_rule) if message.HasField("acceptance_rule") else None,
        draft_top_k=message.draft_top_k,
        logprobs=_read_logprob_count(message),
        sampled_logprobs=message.with_sampled_logprobs,
        weights_fingerprint=message.weights_fingerprint,
        features=_read_features(message.features) if message.HasField("features") else None,
    )


def _read_features(message: target_pb2.FeatureRequest) -> FeatureRequest:
    window = message.prompt_window if message.HasField("prompt_window") else None
    if window is not None and window < 0:
        raise InvalidRequestError(f"features.prompt_window is {window}; it must be at least 0")
    return FeatureRequest(message.head, window)


def _read_logprob_count(message: target_pb2.VerifyOpen) -> int | None:
    if not message.HasField("logprob_count"):
        return None
    if not 0 <= message.logprob_count <= MAX_ROW_LOGPROBS:
        raise InvalidRequestError(
            f"logprob_count is {message.logprob_count}; it must be from 0 to {MAX_ROW_LOGPROBS}"
        )
    return message.logprob_count


def _read_rule(message: target_pb2.AcceptanceRule) -> AcceptanceTerms:
    if not 0.0 <= message.epsilon <= 1.0:
        raise InvalidRequestError(f"acceptance_rule.epsilon is {message.epsilon:g}; it must be from 0 to 1")
    if not 0.0 <= message.delta < math.inf:
        raise InvalidRequestError(
            f"acceptance_rule.delta is {message.delta:g}; it must be a number from 0 on"
        )
    return AcceptanceTerms(message.name, message.epsilon, message.delta)


def _write_step(message: target_pb2.VerifyStep, step: VerifyStep) -> None:
    message.serial = step.serial
    proposed = write_delta(message.committed, step.delta, max(step.row_count - 1, 0))
    _write_source(message, proposed, step.own_tokens)
    if step.row_count:
        rows = message.rows
        rows.kind = _ROW_KINDS[step.row_kind]
        if step.supports:
            supports = rows.supports
            for support in step.supports:
                supports.add().token_ids.extend(support.tolist())
        if step.with_statistics:
            rows.with_statistics = True
    if step.lead or step.min_proposed or step.alone_after_miss:
        lead = message.lead
        lead.credits = step.lead
        lead.min_tokens = step.min_proposed
        if step.alone_after_miss:
            lead.after_miss = target_pb2.AFTER_MISS_ALONE


def _write_source(
    message: target_pb2.VerifyStep | target_pb2.GoesOn, proposed: Sequence[int], own_tokens: int | None
) -> None:
    """Write where a step's proposal comes from."""
    if own_tokens is not None:
        message.own_head.max_tokens = own_tokens
        message.own_head.SetInParent()
    elif proposed:
        message.given.token_ids.extend(proposed)
    else:
        message.given.SetInParent()


def _read_source(message: target_pb2.VerifyStep | target_pb2.GoesOn, owner: str) -> int | None:
    """Maximum tokens of the target's own head; None where the proposal is given. Errors name the owner."""
    source = message.WhichOneof("proposal")
    if source is None:
        raise missing(f"{owner}.proposal (given or own_head)")
    if source == "given":
        return None
    most = message.own_head.max_tokens
    if most < 0:
        raise InvalidRequestError(f"own_head.max_tokens is {most}; it must be at least 0")
    return most


_ROW_KINDS = {kind: ROW_KIND.encode(kind) for kind in RowKind}
_KINDS_OF_ROWS = {number: kind for kind, number in _ROW_KINDS.items()} | {
    types_pb2.ROW_KIND_UNSPECIFIED: RowKind.TOKEN
}


def _read_step(message: target_pb2.VerifyStep) -> VerifyStep:
    own_tokens = _read_source(message, "step")
    serial = message.serial
    if serial < 0:
        raise InvalidRequestError(f"serial is {serial}; it must be at least 0")
    proposed = message.given.token_ids[:]
    delta = read_delta(message, proposed)
    kind = RowKind.TOKEN
    row_count = 0
    supports: tuple[IntArray, ...] = ()
    with_statistics = False
    if message.HasField("rows"):
        rows = message.rows
        row_count = len(proposed) + 1
        if (found := _KINDS_OF_ROWS.get(rows.kind)) is None:
            raise InvalidRequestError(f"rows.kind is {rows.kind}; it must be a RowKind of the protocol")
        kind = found
        with_statistics = rows.with_statistics
        if kind is RowKind.SUPPORT:
            supports = _read_supports(rows.supports, row_count)
    elif proposed or own_tokens is not None:
        raise InvalidRequestError(
            f"the step proposes {len(proposed)} tokens and asks for no rows; rows must be set, or nothing proposed"
            if own_tokens is None
            else "the step has own_head and asks for no rows; rows must be set"
        )
    if own_tokens is not None and not delta.token_ids:
        raise InvalidRequestError("committed.token_ids is empty and own_head is set; there must be a token")
    if not message.HasField("lead"):
        return VerifyStep(
            delta, kind, row_count, supports, with_statistics, serial=serial, own_tokens=own_tokens
        )
    lead = message.lead
    if not 0 <= lead.credits <= MAX_LEAD:
        raise InvalidRequestError(f"lead.credits is {lead.credits}; it must be from 0 to {MAX_LEAD}")
    return VerifyStep(
        delta,
        kind,
        row_count,
        supports,
        with_statistics,
        lead=lead.credits,
        min_proposed=lead.min_tokens,
        alone_after_miss=lead.after_miss == target_pb2.AFTER_MISS_ALONE,
        serial=serial,
        own_tokens=own_tokens,
    )


def _read_supports(messages: Sequence[types_pb2.TokenIds], row_count: int) -> tuple[IntArray, ...]:
    if len(messages) > row_count:
        raise InvalidRequestError(
            f"{len(messages)} supports came for {row_count} rows; there may be one for each"
        )
    return tuple([int_array(each.token_ids[:]) for each in messages])


def _check_outcomes(drafted: DraftedOutcomes) -> DraftedOutcomes:
    depth = drafted.depth + len(drafted.lead_token_ids)
    if not 0 <= drafted.depth <= depth < MAX_AHEAD_TOKENS or len(drafted.token_ids) > MAX_BRANCHES:
        raise InvalidRequestError(
            f"{len(drafted.token_ids)} outcomes came at depth {depth}; there must be at most {MAX_BRANCHES}, and "
            f"depths must be in 0..{MAX_AHEAD_TOKENS - 1}"
        )
    return drafted


# ---- verifications


def answers_to_proto(
    answers: Iterable[tuple[int, Verification | Pending | HiddenStates | Ending]],
) -> target_pb2.VerifyResponse:
    """A message of answers, each with the number of its sequence."""
    message = target_pb2.VerifyResponse()
    parts = message.parts
    for sequence, answer in answers:
        part = parts.add()
        part.sequence = sequence
        if isinstance(answer, Verification):
            _write_verification(part.verification, answer)
        elif isinstance(answer, Pending):
            part.pending.serial = answer.serial
            part.pending.waits_for_room = answer.is_waiting
        elif isinstance(answer, HiddenStates):
            write_states(part.features, answer)
        else:
            write_ending(part.ending, answer)
    return message


def _write_verification(message: target_pb2.Verification, answer: Verification) -> None:
    message.serial = answer.serial
    message.led = answer.led
    message.base_length = answer.base_length
    if answer.rows:
        _write_rows(message, answer.rows)
    if answer.cost is not None:
        write_cost(message.cost, answer.cost)
    if answer.proposal is not None:
        write_proposal(message.proposal, answer.proposal)
    if answer.goes_on is not None:
        delta, own_tokens = answer.goes_on
        last_token_id, *proposed = delta.token_ids
        following = message.goes_on
        following.base_length = delta.base_length
        following.last_token_id = last_token_id
        _write_source(following, proposed, own_tokens)
    if answer.cache is not None:
        message.cache.cached_token_count = answer.cache.cached_tokens
        message.cache.preemption_count = answer.cache.preemptions
    for row in answer.logprobs:
        message.logprobs.add(
            top_token_ids=row.top_token_ids,
            top_logprobs=row.top_logprobs,
            token_logprobs=row.token_logprobs,
            raw_logprobs=row.raw_logprobs,
            processed_logprobs=row.processed_logprobs,
        )


def _write_rows(message: target_pb2.Verification, rows: Sequence[TargetRow]) -> None:
    match rows[0]:
        case TokenRow():
            message.token_rows.token_ids.extend([row.token_id for row in rows])  # type: ignore[union-attr]
        case SupportRow():
            for row in rows:
                _write_support_row(message.support_rows.rows.add(), row)  # type: ignore[arg-type]
        case DenseRow():
            logits = np.stack([row.logits for row in rows])  # type: ignore[union-attr]
            message.dense_rows.CopyFrom(logits_to_tensor(logits))


def _write_support_row(message: target_pb2.SupportRow, row: SupportRow) -> None:
    message.probabilities.extend(row.probs.tolist())
    message.outside_mass = row.outside_mass
    if row.outside_token_id >= 0:
        message.outside_token_id = row.outside_token_id
    if row.outside_prob is not None:
        message.outside_probability = row.outside_prob
    if (statistics := row.statistics) is not None:
        written = message.statistics
        written.entropy = statistics.entropy
        written.max_probability = statistics.max_prob
        written.argmax_token_id = statistics.argmax_token_id
        written.ranks.extend(statistics.ranks.tolist())
        written.logits.extend(statistics.logits.tolist())


@dataclass(slots=True, eq=False)  # one for each answer: to freeze it would take three times as long
class Answer:
    """A sequence's verification, whose rows are read with the step that asked for them."""

    serial: int
    led: int
    base_length: int
    proposal: Proposal | None
    goes_on: GoesOn | None
    cache: CacheCounts | None
    message: target_pb2.VerifyResponse
    """The message that brought it, and perhaps those of other sequences."""
    _part: target_pb2.Verification

    def verification(self, step: VerifyStep) -> Verification:
        part = self._part
        logprobs = part.logprobs
        return Verification(
            self.base_length,
            _read_rows(part, step),
            read_cost(part.cost) if part.HasField("cost") else None,
            self.proposal,
            self.goes_on,
            self.serial,
            self.led,
            self.cache,
            tuple(map(_read_logprobs, logprobs)) if logprobs else (),
        )


def answers_from_proto(
    message: target_pb2.VerifyResponse,
) -> Iterator[tuple[int, Answer | Pending | PassedStates | Ending | ProtocolError]]:
    """The answers of a message, each with the number of its sequence; an error in place of one that is wrong."""
    check_message(message)
    for part in message.parts:
        sequence = check_sequence(part)
        match part.WhichOneof("content"):
            case "verification":
                yield sequence, _read_verification(part.verification, message)
            case "pending":
                yield sequence, Pending(part.pending.serial, part.pending.waits_for_room)
            case "features":
                yield sequence, pass_states(part.features)
            case "ending":
                yield sequence, read_ending(part.ending)
            case _:
                yield (
                    sequence,
                    ProtocolError("a part has no content; it must hold verification, pending or ending"),
                )


def _read_verification(
    part: target_pb2.Verification, message: target_pb2.VerifyResponse
) -> Answer | ProtocolError:
    proposal: Proposal | None = None
    goes_on: GoesOn | None = None
    cache: CacheCounts | None = None
    try:
        if part.HasField("proposal"):
            proposal = read_proposal(part.proposal)
        if part.HasField("goes_on"):
            goes_on = _read_goes_on(part.goes_on)
        if part.HasField("cache"):
            cache = _read_cache(part.cache)
    except (InvalidRequestError, ProtocolError) as error:
        return ProtocolError(str(error))
    return Answer(part.serial, part.led, part.base_length, proposal, goes_on, cache, message, part)


def _read_cache(message: target_pb2.CacheCounts) -> CacheCounts:
    cached = message.cached_token_count
    preemptions = message.preemption_count
    if min(cached, preemptions) < 0:
        raise ProtocolError(
            f"cache has {cached} cached tokens and {preemptions} preemptions; neither can be below 0"
        )
    return CacheCounts(cached, preemptions)


def _read_logprobs(message: target_pb2.RowLogprobs) -> RowLogprobs:
    return RowLogprobs(
        tuple(message.top_token_ids[:]),
        tuple(message.top_logprobs[:]),
        tuple(message.token_logprobs[:]),
        tuple(message.raw_logprobs[:]),
        tuple(message.processed_logprobs[:]),
    )


def _read_goes_on(message: target_pb2.GoesOn) -> GoesOn:
    own_tokens = _read_source(message, "goes_on")
    delta = Delta(message.base_length, (message.last_token_id, *message.given.token_ids[:]))
    return GoesOn(delta, own_tokens)


def _read_rows(part: target_pb2.Verification, step: VerifyStep) -> tuple[TargetRow, ...]:
    rows: tuple[TargetRow, ...]
    match part.WhichOneof("rows"):
        case "token_rows" if step.row_kind is RowKind.TOKEN:
            rows = tuple(map(TokenRow, part.token_rows.token_ids[:]))
        case "support_rows" if step.row_kind is RowKind.SUPPORT:
            return _read_support_rows(part.support_rows.rows, step)
        case "dense_rows" if step.row_kind is RowKind.DENSE:
            rows = tuple(map(DenseRow, logits_from_tensor(part.dense_rows, "dense_rows")))
        case None if not step.row_count:
            return ()
        case None:
            raise ProtocolError(f"no rows came for {step.row_count} that were requested")
        case found:
            raise ProtocolError(f"{found} came where {step.row_kind.value}_rows were requested")
    if len(rows) != step.row_count:
        raise _wrong_count(len(rows), step)
    return rows


def _wrong_count(count: int, step: VerifyStep) -> ProtocolError:
    return ProtocolError(f"{count} rows came for {step.row_count} that were requested")


def _read_support_rows(messages: Sequence[target_pb2.SupportRow], step: VerifyStep) -> tuple[SupportRow, ...]:
    if len(messages) != step.row_count:
        raise _wrong_count(len(messages), step)
    supports = chain(step.supports, repeat(_EMPTY_SUPPORT))
    return tuple(
        [_read_support_row(message, support) for message, support in zip(messages, supports, strict=False)]
    )


def _read_support_row(message: target_pb2.SupportRow, support: IntArray) -> SupportRow:
    probs = message.probabilities[:]
    if len(probs) != len(support):
        raise ProtocolError(f"a support row of {len(probs)} ids came for a support of {len(support)}")
    return SupportRow(
        token_ids=support,
        probs=np.array(probs, np.float64),
        outside_mass=message.outside_mass,
        outside_token_id=message.outside_token_id if message.HasField("outside_token_id") else -1,
        statistics=_read_statistics(message.statistics, len(probs))
        if message.HasField("statistics")
        else None,
        outside_prob=message.outside_probability,
    )


def _read_statistics(message: target_pb2.RowStatistics, count: int) -> RowStatistics:
    if len(message.ranks) != count or len(message.logits) != count:
        raise ProtocolError(
            f"statistics hold {len(message.ranks)} ranks and {len(message.logits)} logits for a support of {count}"
        )
    return RowStatistics(
        entropy=message.entropy,
        max_prob=message.max_probability,
        argmax_token_id=message.argmax_token_id,
        ranks=int_array(message.ranks[:]),
        logits=np.array(message.logits[:], np.float32),
    )
