"""Checks of draft services.

Each check is a function that returns what it found, or raises the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import grpc
import grpc.aio

from tandem.errors import ProtocolError
from tandem.model.types import (
    MAX_BRANCHES,
    AheadBudget,
    Cancel,
    Delta,
    DraftedOutcomes,
    DraftOptions,
    Finish,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
)
from tandem.v1.draft_pb2 import ProposeRequest, ProposeResponse
from tandem.wire import draft as wire
from tandem.wire.status import Ending
from tandem_coordinator.outcomes import Coming, Hit
from tandem_coordinator.transport.conformance import conversation
from tandem_coordinator.transport.conformance.checks import Suite, check_health, name_checks
from tandem_coordinator.transport.conformance.conversation import (
    PROMPT_LENGTH,
    REFUSED,
    check_ending,
    describe_ending,
)
from tandem_coordinator.transport.draft_client import DraftClient, PendingOutcomes
from tandem_coordinator.transport.proposals import check_proposal

_COUNT = 4
"""Tokens of a proposal, the default of `num_speculative_tokens`."""
_LARGEST_ID = 2**31 - 1

Request = DraftOptions | ProposeStep | Finish | Cancel


class Subject(conversation.Subject):
    """The draft service that is tested."""

    __slots__ = ()

    def options(self, temperature: float = 0.0, **others: object) -> DraftOptions:
        sampling = SamplingParams(temperature=temperature, seed=7)
        usual = DraftOptions("conformance", sampling, self.max_length, prompt_length=PROMPT_LENGTH)
        return replace(usual, **others)  # type: ignore[arg-type]  # fields of the class

    async def fresh(self, tokens: Sequence[int], options: DraftOptions | None = None) -> Proposal:
        """The proposal of a new sequence that was sent all tokens at once."""
        async with Conversation(self) as talk:
            proposal = await talk.ask(tokens, options=options)
            await talk.say((1, Finish(len(tokens))))
            await talk.must_end("a Finish", code=grpc.StatusCode.OK)
            return proposal


class Conversation(conversation.Conversation[Request, wire.Answer]):
    """One stream to a draft service."""

    service = "draft service"
    method = "/tandem.v1.DraftService/Propose"

    def __init__(self, draft: Subject) -> None:
        super().__init__(draft)
        self._draft = draft
        self._opened: set[int] = set()

    def _encode(self, requests: Iterable[tuple[int, Request]]) -> bytes:
        return wire.requests_to_proto(requests).SerializeToString()

    def _decode(self, content: bytes) -> Iterable[tuple[int, wire.Answer | Ending | ProtocolError]]:
        return wire.answers_from_proto(ProposeResponse.FromString(content))

    async def say(self, *requests: tuple[int, Request]) -> None:
        self._opened |= {sequence for sequence, said in requests if isinstance(said, DraftOptions)}
        await super().say(*requests)

    async def ask(
        self,
        tokens: Sequence[int],
        base_length: int = 0,
        *,
        count: int = _COUNT,
        sequence: int = 1,
        options: DraftOptions | None = None,
    ) -> Proposal:
        """The proposal after a delta from the base length on. A new sequence is opened in the same message."""
        opening = () if sequence in self._opened else ((sequence, options or self._draft.options()),)
        await self.say(*opening, (sequence, _step(tokens, base_length, count)))
        return await self.proposal(len(tokens), count, sequence)

    async def answer(self, sequence: int = 1, outcomes: PendingOutcomes | None = None) -> Proposal | Ending:
        """The next answer or end of a sequence; outcomes that were drafted ahead are checked or passed over."""
        while isinstance(answer := await self.next(sequence), DraftedOutcomes):
            if outcomes is not None:
                outcomes.add(answer)
        return answer

    async def proposal(
        self, length: int, count: int = _COUNT, sequence: int = 1, outcomes: PendingOutcomes | None = None
    ) -> Proposal:
        """The answer to a step, as a coordinator would take it."""
        answer = await self.answer(sequence, outcomes)
        if isinstance(answer, Ending):
            raise ProtocolError(
                f"it ended sequence {sequence} instead of answering: {describe_ending(answer)}"
            )
        check_proposal(
            self.service, answer, length, count, self._draft.vocabulary_size, with_token_logits=False
        )
        return answer


def _step(tokens: Sequence[int], base_length: int = 0, count: int = _COUNT) -> ProposeStep:
    return ProposeStep(Delta(base_length, list(tokens[base_length:])), count)


def _must_equal(found: Proposal, wanted: Proposal, what: str) -> None:
    if found.token_ids != wanted.token_ids:
        raise ProtocolError(
            f"{what}: it proposed {list(found.token_ids)}, and before {list(wanted.token_ids)}"
        )


# ---- what every draft service must do


async def _check_model(draft: Subject, _: Conversation) -> str:
    model = draft.model
    steps = len(model.step_profile.seconds)
    if model.has_model and not (model.tokenizer_hash and model.max_length > 0):
        raise ProtocolError("a model with a vocabulary must name its tokenizer's hash and its maximum length")
    profile = f"{steps} step times" if steps else "no step times"
    size = f"{model.vocabulary_size} tokens" if model.has_model else "no vocabulary"
    return f"{model.name}: {size}, sequences of up to {model.max_length or 'any'} tokens, {profile}"


async def _check_reading(draft: Subject, talk: Conversation) -> str:
    await talk.ask(draft.prompt(), count=0)
    return "a step that asks for no tokens is answered by an empty proposal"


async def _check_proposals(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    base = 0
    lengths = []
    await talk.say((1, draft.options()))
    for _ in range(4):
        proposal = await talk.ask(tokens, base)
        base = len(tokens)
        lengths.append(len(proposal))
        tokens += [*proposal.token_ids[:2], *tokens[3:7]]
    return f"rounds were answered with {', '.join(map(str, lengths))} of {_COUNT} tokens"


async def _check_distributions(draft: Subject, _: Conversation) -> str:
    options = draft.options(1.0, row_kind=RowKind.SUPPORT, draft_top_k=5)
    proposal = await draft.fresh(draft.prompt(), options)
    _must_equal(await draft.fresh(draft.prompt(), options), proposal, "two sequences with one seed")
    for each in proposal.distributions:
        if len(each.token_ids) > 5:
            raise ProtocolError(f"draft_top_k is 5; a distribution has {len(each.token_ids)} ids")
    if not proposal.distributions:
        return "proposals are deterministic, without distributions"
    return "each token is from the support that it comes with; one seed gives one proposal"


async def _check_token_rows(draft: Subject, _: Conversation) -> str:
    proposal = await draft.fresh(draft.prompt(), draft.options(1.0))
    if proposal.distributions:
        raise ProtocolError("with_distributions is not set; its proposal has distributions")
    return "no distributions where the Open does not ask for them"


async def _check_token_logits(draft: Subject, _: Conversation) -> str:
    if not draft.model.has_model:
        return "not asked for: without a model there are none"
    tokens = draft.prompt()
    proposal = await draft.fresh(tokens, draft.options(with_token_logits=True))
    check_proposal(
        "draft service", proposal, len(tokens), _COUNT, draft.vocabulary_size, with_token_logits=True
    )
    return "each token comes with its logit where the Open asks for it"


async def _check_order(draft: Subject, talk: Conversation) -> str:
    prompts = {number: draft.prompt(number)[: PROMPT_LENGTH - number] for number in (1, 2, 3)}
    openings = [(number, draft.options()) for number in prompts]
    await talk.say(*openings, *((number, _step(prompt)) for number, prompt in prompts.items()))
    for number in (3, 1, 2):
        await talk.proposal(len(prompts[number]), sequence=number)
    # Each step has one answer: none may be left once another step was answered
    await talk.ask(prompts[1], len(prompts[1]))
    if not all(map(talk.is_silent, prompts)):
        raise ProtocolError("it answered a step twice")
    return "three sequences of one message: each step is answered once, by its sequence's number"


# ---- deltas


async def _check_idempotence(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    first = await talk.ask(tokens)
    for base, what in ((0, "the same step again"), (PROMPT_LENGTH // 2, "a delta that repeats a half")):
        _must_equal(await talk.ask(tokens, base), first, what)
    return "a delta that says again what is there changes nothing"


async def _check_rollback(draft: Subject, talk: Conversation) -> str:
    kept = draft.prompt()
    await talk.ask([*kept, *reversed(kept)])
    tokens = [*kept[:-3], *kept[3:7]]
    found = await talk.ask(tokens, len(kept) - 3)
    _must_equal(found, await draft.fresh(tokens), "after a rollback and on a fresh sequence")
    return "a delta that begins earlier replaces the tail, and the proposal is that of a fresh sequence"


async def _check_unchanged(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    await talk.ask(tokens)
    await talk.say((1, ProposeStep(Delta(len(tokens) + 1, [tokens[0]]), _COUNT)))
    await talk.must_end("a delta that begins behind the sequence's end")
    return "a proposal changes nothing: a delta behind it leaves a gap, and is refused"


# ---- what is refused


async def _check_malformed(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    deltas = {
        "a negative base length": Delta(-1, tokens),
        "a negative id": Delta(0, [*tokens[:-1], -1]),
        "a sequence beyond its max_length": Delta(0, [tokens[0]] * (draft.max_length + 2)),
    }
    if draft.model.has_model:
        deltas["an unknown id"] = Delta(0, [*tokens[:-1], min(draft.vocabulary_size, _LARGEST_ID)])
    steps = {what: ProposeStep(delta, _COUNT) for what, delta in deltas.items()}
    steps["a negative number of tokens to propose"] = ProposeStep(Delta(0, tokens), -1)
    first = await talk.ask(tokens)
    for number, (what, step) in enumerate(steps.items(), start=2):
        await talk.say((number, draft.options()), (number, step))
        await talk.must_end(what, number)
    _must_equal(await talk.ask(tokens, len(tokens)), first, "beside sequences that were refused")
    return f"{len(steps)} bad steps each ended their own sequence with {REFUSED.name}, and no other"


async def _check_huge(draft: Subject, talk: Conversation) -> str:
    what = "a step that asks for 2^30 tokens"
    tokens = draft.prompt()
    await talk.say((1, draft.options()), (1, _step(tokens, count=1 << 30)))
    answer = await talk.answer()
    if isinstance(answer, Ending):
        check_ending(answer, what)
        return f"{what} is refused with {REFUSED.name}"
    if len(answer) > draft.max_length:
        raise ProtocolError(f"{what} had an answer beyond the sequence's max_length")
    return f"{what} was answered with {len(answer)}"


async def _check_opening(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    await talk.say((1, _step(tokens)))
    await talk.must_end("a step without an Open")
    await talk.ask(tokens, sequence=2)
    await talk.say((2, draft.options()))
    await talk.must_end("a second Open", 2)
    return "a step without an Open and a second Open are refused"


async def _check_missing(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    first = await talk.ask(tokens)
    whole = wire.requests_to_proto([(2, draft.options()), (2, _step(tokens))])
    lacking: dict[str, Callable[[ProposeRequest], None]] = {
        "a part without content": lambda message: message.parts[1].ClearField("step"),
        "a step without its committed tokens": lambda message: message.parts[1].step.ClearField("committed"),
        "a step without a question": lambda message: message.parts[1].step.ClearField("propose"),
        "an Open without sampling parameters": lambda message: message.parts[0].open.ClearField("sampling"),
    }
    for number, (what, clear) in enumerate(lacking.items(), start=2):
        message = ProposeRequest()
        message.CopyFrom(whole)
        clear(message)
        for part in message.parts:
            part.sequence = number
        await talk.write(message.SerializeToString())
        await talk.must_end(what, number)
    _must_equal(await talk.ask(tokens, len(tokens)), first, "beside sequences that were refused")
    return f"{len(lacking)} messages that lack a part each ended their own sequence with {REFUSED.name}, and no other"


async def _check_unnumbered(draft: Subject, talk: Conversation) -> str:
    await talk.write(wire.requests_to_proto([(0, draft.options())]).SerializeToString())
    if (code := await talk.end_of_stream()) is not REFUSED:
        raise ProtocolError(f"sequence 0 ended the stream with {code.name}; it must be {REFUSED.name}")
    await draft.fresh(draft.prompt())
    return f"sequence 0 ends the stream with {REFUSED.name}; the next stream is served"


async def _check_unknown(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    message = wire.requests_to_proto([(1, draft.options()), (1, _step(tokens))]).SerializeToString()
    # Field 1000 of the message, with three bytes
    await talk.write(message + b"\xc2\x3e\x03new")
    await talk.proposal(len(tokens))
    return "a field that it does not know is passed over"


# ---- ends


async def _check_finish(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    await talk.ask(tokens)
    await talk.say((1, Finish(len(tokens))))
    await talk.must_end("a Finish", code=grpc.StatusCode.OK)
    return "a Finish is answered by the sequence's end, code 0"


async def _check_stale(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    await talk.say((1, draft.options()), (1, _step(tokens)), (1, Finish(len(tokens))))
    await talk.proposal(len(tokens))
    await talk.must_end("a Finish", code=grpc.StatusCode.OK)
    # Said before the coordinator knew of the end
    await talk.say((1, _step(tokens)), (1, Finish(len(tokens))), (1, Cancel()))
    await talk.ask(tokens, sequence=2)
    if not talk.is_silent(1):
        raise ProtocolError("it answered a sequence that had ended")
    return "what comes for a sequence that has ended is passed over"


async def _check_cancel(draft: Subject, talk: Conversation) -> str:
    tokens = draft.prompt()
    await talk.say((1, draft.options()), (1, _step(tokens)), (2, draft.options()), (2, _step(tokens)))
    await talk.say((1, Cancel()))
    await talk.proposal(len(tokens), sequence=2)
    await talk.ask(tokens, sequence=3)  # the second may have been answered before the cancel was read
    await draft.fresh(tokens)
    return "a cancelled sequence ends alone"


async def _check_half_closed(draft: Subject, talk: Conversation) -> str:
    await talk.ask(draft.prompt())
    await talk.call.done_writing()
    await talk.end_of_stream()
    await draft.fresh(draft.prompt())
    return "a stream that ends without a Finish ends its sequences; the next stream is served"


# ---- drafting ahead


_BUDGET = AheadBudget(branch_count=4, token_count=3)


async def _check_ahead(draft: Subject, talk: Conversation) -> str:
    if not draft.model.drafts_ahead:
        return "it does not draft ahead, so no budget is granted"
    tokens = draft.prompt()
    pending = PendingOutcomes(draft.vocabulary_size, RowKind.TOKEN)
    step = ProposeStep(Delta(0, tokens), _COUNT, _BUDGET)
    await talk.say((1, draft.options(ahead=_BUDGET)), (1, step))
    proposal = await talk.proposal(len(tokens))
    pending.expect(len(tokens), proposal.token_ids, _BUDGET)
    found = await _collect_outcomes(talk, pending)
    # The round that follows is verified already: nothing is asked for, and nothing but outcomes comes.
    accepted = found.accepted_counts[0]
    following = found.next_token_ids[0]
    base = len(tokens)
    tokens += [*proposal.token_ids[:accepted], following]
    found_ahead = pending.outcome(tokens, 0.0)
    assert isinstance(found_ahead, Hit | Coming), "the first outcome was drafted for"
    drafted = found_ahead.proposal
    pending.expect(len(tokens), drafted.token_ids, _BUDGET)
    step = ProposeStep(Delta(base, [*tokens[base:], *drafted.token_ids]), 0, _BUDGET, len(drafted))
    await talk.say((1, step))
    await _collect_outcomes(talk, pending)
    # A question ends drafting ahead; stale outcomes may be under way, no more than were granted.
    pending.expect(len(tokens), (), None)
    await talk.say((1, _step(tokens, len(tokens))))
    await talk.proposal(len(tokens), outcomes=pending)
    return f"{_BUDGET.branch_count} x {_BUDGET.token_count} granted twice: outcomes came within them, also unasked"


async def _collect_outcomes(talk: Conversation, pending: PendingOutcomes) -> DraftedOutcomes:
    """The first depth of a round's outcomes, after all its depths have come."""
    first: DraftedOutcomes | None = None
    depth = 0
    while first is None or depth < _BUDGET.token_count:
        answer = await talk.next(1)
        if not isinstance(answer, DraftedOutcomes):
            what = "a proposal" if isinstance(answer, Proposal) else describe_ending(answer)
            raise ProtocolError(f"outcomes were granted, and {what} came instead")
        if pending.add(answer, time.monotonic()):
            first = first or answer
            depth = answer.depth + 1 + len(answer.lead_token_ids)
    return first


async def _check_budgets(draft: Subject, talk: Conversation) -> str:
    if not draft.model.drafts_ahead:
        return "it does not draft ahead, so no budget is granted"
    wrong = (AheadBudget(MAX_BRANCHES + 1, 1), AheadBudget(1, 1 << 20), AheadBudget(-1, 1))
    for number, budget in enumerate(wrong, start=1):
        await talk.say((number, draft.options(ahead=budget)))
        await talk.must_end(f"a budget of {budget.branch_count} x {budget.token_count}", number)
    return f"budgets out of range are refused with {REFUSED.name}"


_CHECKS = name_checks(
    check_health,
    _check_model,
    _check_reading,
    _check_proposals,
    _check_token_rows,
    _check_distributions,
    _check_token_logits,
    _check_order,
    _check_idempotence,
    _check_rollback,
    _check_unchanged,
    _check_malformed,
    _check_huge,
    _check_opening,
    _check_missing,
    _check_unnumbered,
    _check_unknown,
    _check_finish,
    _check_stale,
    _check_cancel,
    _check_half_closed,
    _check_ahead,
    _check_budgets,
)

SUITE = Suite(DraftClient, Subject, Conversation, _CHECKS)
"""All that a draft service is checked for."""
