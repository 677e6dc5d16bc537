"""Checks of target services.

Each check is a function that returns what it found, or raises the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import numpy as np
from tokenizers import Tokenizer

from tandem.acceptance.rounds import Round
from tandem.acceptance.strategies import rule_of
from tandem.errors import ProtocolError
from tandem.model.types import (
    MAX_LEAD,
    AcceptanceTerms,
    Cancel,
    Delta,
    DenseRow,
    Finish,
    Pending,
    RowKind,
    SamplingParams,
    SupportRow,
    TargetOptions,
    TokenRow,
    Verification,
    VerifyStep,
    common_length,
)
from tandem.model.vocabulary import vocabulary_hash
from tandem.telemetry.logs import escape
from tandem.v1.target_pb2 import VerifyRequest, VerifyResponse
from tandem.wire import target as wire
from tandem.wire.features import PassedStates
from tandem.wire.status import Ending
from tandem_coordinator.decoding.tokenization import TOKENIZER_FILE
from tandem_coordinator.transport.conformance import conversation
from tandem_coordinator.transport.conformance.checks import Suite, check_health, name_checks
from tandem_coordinator.transport.conformance.conversation import PROMPT_LENGTH, REFUSED, describe_ending
from tandem_coordinator.transport.proposals import check_proposal
from tandem_coordinator.transport.target_client import TargetClient, check_rows

_PROPOSED = 3
"""Tokens of a proposal."""
_LOGIT_TOLERANCE = 0.05
"""Logits of one position may differ by as much between two ways of computing them."""
_MASS_TOLERANCE = 0.02
"""Masses may differ by as much, and single probabilities by a tenth: what the tolerance of logits leaves of them."""
_TEMPERATURE = 0.7
_CREDITS = 2

Said = wire.Answer | Pending


class Subject(conversation.Subject):
    """The target service that is tested."""

    __slots__ = ()

    def options(self, temperature: float = 0.0) -> TargetOptions:
        sampling = SamplingParams(temperature=temperature, seed=7)
        return TargetOptions("conformance", sampling, self.max_length, prompt_length=PROMPT_LENGTH)


class Conversation(conversation.Conversation[wire.Request, Said]):
    """One stream to a target service."""

    service = "target service"
    method = "/tandem.v1.TargetService/Verify"

    def _encode(self, requests: Iterable[tuple[int, wire.Request]]) -> bytes:
        return wire.requests_to_proto(requests).SerializeToString()

    def _decode(self, content: bytes) -> Iterable[tuple[int, Said | Ending | ProtocolError]]:
        for sequence, answer in wire.answers_from_proto(VerifyResponse.FromString(content)):
            if not isinstance(answer, PassedStates):  # nobody has asked for any
                yield sequence, answer

    async def ask(self, step: VerifyStep, sequence: int = 1) -> Verification:
        """The answer to a step, as a coordinator would take it."""
        await self.say((sequence, step))
        return await self.verification(step, sequence)

    async def verification(self, step: VerifyStep, sequence: int = 1, led: int = 0) -> Verification:
        """The answer to a step that was asked for, or to one so many steps behind it."""
        answer = await self.next(sequence)
        while isinstance(answer, Pending):
            answer = await self.next(sequence)
        if isinstance(answer, Ending):
            raise ProtocolError(
                f"it ended sequence {sequence} instead of answering: {describe_ending(answer)}"
            )
        check_label(answer, step.serial, led)
        found = answer.verification(step)
        wanted = step.delta.length - (step.row_count - 1)
        if step.row_count and found.base_length != wanted:
            raise ProtocolError(f"its rows begin at {found.base_length}; they must begin at {wanted}")
        check_rows(found, self._subject.model.vocabulary_size)
        return found


def check_label(answer: wire.Answer, serial: int, led: int) -> None:
    """An answer must say which step it is for: a coordinator drops any other."""
    if (answer.serial, answer.led) != (serial, led):
        raise ProtocolError(
            f"its answer is for {_describe_label(answer.serial, answer.led)}; it must be for "
            f"{_describe_label(serial, led)}"
        )


def _describe_label(serial: int, led: int) -> str:
    return f"step {serial}" if not led else f"the step {led} behind step {serial}"


def _step(
    tokens: Sequence[int], base: int = 0, proposed: int = 0, kind: RowKind = RowKind.TOKEN, serial: int = 0
) -> VerifyStep:
    """Rows for the last tokens, which are proposed, and for the one after them."""
    return VerifyStep(Delta(base, list(tokens[base:])), kind, proposed + 1, serial=serial)


def _token_ids(found: Verification) -> list[int]:
    return [row.token_id for row in found.rows if isinstance(row, TokenRow)]


def _logits(found: Verification) -> np.ndarray:
    return np.stack([row.logits for row in found.rows if isinstance(row, DenseRow)])


async def _check_model(target: Subject, _: Conversation) -> str:
    model = target.model
    if not (model.vocabulary_size and model.tokenizer_hash and model.max_length > 0):
        raise ProtocolError("it must name its vocabulary's size, its tokenizer's hash and its maximum length")
    head = f"a head of its own ({model.drafting_method})" if model.drafting_method else "no head of its own"
    return (
        f"{model.name}: {model.vocabulary_size} tokens, sequences of up to {model.max_length} tokens, {head}"
    )


async def _check_tokenizer(target: Subject, _: Conversation) -> str:
    files = await TargetClient(target.channel).tokenizer_files()
    content = files.get(TOKENIZER_FILE)
    if not content:
        raise ProtocolError(f"GetTokenizer sent no {TOKENIZER_FILE}")
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception, whatever the cause
        raise ProtocolError(f"its {TOKENIZER_FILE} cannot be read: {error}") from error
    found = vocabulary_hash(tokenizer)
    named = target.model.tokenizer_hash
    if found != named:
        raise ProtocolError(
            f"GetModelInfo names the tokenizer_hash {escape(named[:12])}; it must be that of the {TOKENIZER_FILE} that "
            f"GetTokenizer sends, {found[:12]}"
        )
    names = ", ".join(map(escape, sorted(files)))
    return f"GetTokenizer sends {names}; the tokenizer has the hash that GetModelInfo names"


async def _check_rows(target: Subject, talk: Conversation) -> str:
    tokens = target.prompt()
    await talk.say((1, target.options()), (2, target.options()))
    named = _token_ids(await talk.ask(_step(tokens, proposed=_PROPOSED)))
    dense = _logits(await talk.ask(_step(tokens, proposed=_PROPOSED, kind=RowKind.DENSE), 2))
    for row, token_id in enumerate(named):
        if dense[row].max() - dense[row][token_id] > _LOGIT_TOLERANCE:
            raise ProtocolError(
                f"token row {row} names {token_id} at temperature 0; the largest logit is {dense[row].argmax()}'s"
            )
    return f"{len(named)} rows for {_PROPOSED} tokens; token rows name the largest logits of dense rows"


async def _check_supports(target: Subject, talk: Conversation) -> str:
    """Rows with a support against the softmax of dense rows, which temperature alone changes."""
    tokens = target.prompt()
    options = target.options(_TEMPERATURE)
    support = np.arange(0, target.model.vocabulary_size, 7)[:64]
    proposed = tokens[-_PROPOSED:]
    supports = tuple(np.unique([*support, each]) for each in proposed)
    await talk.say((1, options), (2, options))
    dense = _logits(await talk.ask(_step(tokens, proposed=_PROPOSED, kind=RowKind.DENSE)))
    step = replace(_step(tokens, proposed=_PROPOSED, kind=RowKind.SUPPORT), supports=supports)
    found = await talk.ask(step, 2)
    weights = np.exp((dense - dense.max(axis=1, keepdims=True)).astype(np.float64) / _TEMPERATURE)
    expected = weights / weights.sum(axis=1, keepdims=True)
    for index, (row, ids) in enumerate(zip(found.rows, supports, strict=False)):
        assert isinstance(row, SupportRow), "check_rows has seen to it"
        apart = float(np.abs(row.probs - expected[index][ids]).max())
        if np.any(np.abs(row.probs - expected[index][ids]) > 0.1 * expected[index][ids] + 1e-4):
            raise ProtocolError(
                f"support row {index}: a probability is {apart:.3g} from that of the dense row"
            )
        outside = 1.0 - float(expected[index][ids].sum())
        if abs(row.outside_mass - outside) > _MASS_TOLERANCE:
            raise ProtocolError(
                f"support row {index}: {row.outside_mass:.3g} lie outside; it must be {outside:.3g}"
            )
        if row.outside_token_id in ids:
            raise ProtocolError(
                f"support row {index}: its token outside the support, {row.outside_token_id}, is in it"
            )
    return f"support rows hold the probabilities of dense rows, at temperature {_TEMPERATURE:g}"


async def _check_rollback(target: Subject, talk: Conversation) -> str:
    tokens = target.prompt()
    wrong = [*tokens[:-_PROPOSED], *tokens[:_PROPOSED]]
    await talk.say((1, target.options()), (2, target.options()))
    whole = _logits(await talk.ask(_step(tokens, kind=RowKind.DENSE)))
    await talk.ask(_step(wrong, proposed=_PROPOSED, serial=1), 2)
    base = len(tokens) - _PROPOSED
    again = _logits(await talk.ask(_step(tokens, base, kind=RowKind.DENSE, serial=2), 2))
    apart = float(np.abs(whole - again).max())
    if apart > _LOGIT_TOLERANCE:
        raise ProtocolError(f"a rejected proposal left a trace: logits differ by {apart:.3g}")
    return "a rejected proposal leaves no trace"


async def _check_seeds(target: Subject, talk: Conversation) -> str:
    options = target.options(_TEMPERATURE)
    await talk.say((1, options), (2, options))
    step = _step(target.prompt(), proposed=_PROPOSED)
    first = _token_ids(await talk.ask(step, 1))
    second = _token_ids(await talk.ask(step, 2))
    if first != second:
        raise ProtocolError(f"two sequences with one seed: it drew {second}, and before {first}")
    return "one seed gives the same token rows"


@dataclass(frozen=True, slots=True)
class _Answered:
    """A step and its answer."""

    step: VerifyStep
    found: Verification


async def _follow(talk: Conversation, answered: list[_Answered], most: int, sequence: int = 1) -> None:
    """Add what the target does by itself behind the last of these steps, until it has taken so many."""
    while (announced := answered[-1].found.goes_on) is not None and len(answered) <= most:
        if announced.own_tokens is not None:
            raise ProtocolError("it goes on with its head behind given tokens; the outcome must be given too")
        step = answered[-1].step
        found = answered[-1].found
        rows = _token_ids(found)
        proposed = step.delta.token_ids[len(step.delta.token_ids) - (step.row_count - 1) :]
        kept = common_length(proposed, rows)
        outcome = (found.base_length + kept, rows[kept])
        said = (announced.delta.base_length, announced.delta.token_ids[0])
        if said != outcome:
            raise ProtocolError(
                f"it goes on with token {said[1]} at {said[0]}; its rows say {outcome[1]} at {outcome[0]}"
            )
        tokens = announced.delta.token_ids
        following = VerifyStep(announced.delta, RowKind.TOKEN, len(tokens), serial=answered[0].step.serial)
        led = len(answered)
        answered.append(_Answered(following, await talk.verification(following, sequence, led)))


async def _lead(
    target: Subject, talk: Conversation, temperature: float, sequence: int = 1
) -> list[_Answered]:
    """The first step of a sequence, with credits, and those that the target takes by itself behind it."""
    await talk.say((sequence, target.options(temperature)))
    step = replace(_step(target.prompt(), proposed=_PROPOSED, serial=1), lead=_CREDITS)
    answered = [_Answered(step, await talk.ask(step, sequence))]
    await _follow(talk, answered, _CREDITS, sequence)
    return answered


async def _check_repeated(target: Subject, talk: Conversation) -> str:
    """A step with the serial of the last one: its answer may have been lost, and those that followed it."""
    answered = await _lead(target, talk, _TEMPERATURE)
    await talk.say((1, answered[0].step))
    for led, before in enumerate(answered):
        first = _token_ids(before.found)
        try:
            again = _token_ids(await talk.verification(before.step, led=led))
        except ProtocolError as error:
            raise ProtocolError(f"a step that was asked again: {error}") from error
        if again != first:
            raise ProtocolError(f"a step that was asked again: it answered {again}, and before {first}")
    await talk.must_be_silent("a step that was asked again: it answered more often than before")
    await talk.say((2, _step(target.prompt(), serial=1)))
    unknown = "a step with a serial for a sequence that it does not know"
    await talk.must_end(unknown, 2, grpc.StatusCode.UNAVAILABLE)
    following = f", and so have the {len(answered) - 1} that follow by themselves" if answered[1:] else ""
    return f"a step that is asked again has the same answer{following}"


async def _check_finish(target: Subject, talk: Conversation) -> str:
    tokens = target.prompt()
    for sequence in (1, 2, 3):
        await talk.say((sequence, target.options()))
        await talk.ask(_step(tokens, serial=1), sequence)
    await talk.say((1, Finish(len(tokens))), (2, Cancel()))
    await talk.must_end("a Finish", code=grpc.StatusCode.OK)
    # Said before the coordinator knew of the end
    await talk.say((1, _step(tokens)), (1, Finish(len(tokens))), (2, Cancel()))
    await talk.ask(_step([*tokens, tokens[0]], len(tokens), serial=2), 3)
    await talk.must_be_silent("it answered a sequence that had ended")
    await talk.must_be_silent("it answered a Cancel, to which nothing is said", 2)
    return "a Finish is answered by an Ending and a Cancel by nothing; other sequences go on"


def _list_mistakes(target: Subject) -> dict[str, Callable[[VerifyRequest], None]]:
    """Changes of a message that holds an Open and a step, each of which ends the sequence."""
    size = target.model.vocabulary_size
    too_many = target.prompt() * target.max_length
    mistakes: dict[str, Callable[[VerifyRequest], None]] = {
        "a step without an Open": lambda message: message.parts.__delitem__(0),
        "a second Open": lambda message: message.parts[1].open.CopyFrom(message.parts[0].open),
        "an Open without sampling parameters": lambda message: message.parts[0].open.ClearField("sampling"),
        "a part without content": lambda message: message.parts[1].ClearField("step"),
        "a step without its committed tokens": lambda message: message.parts[1].step.ClearField("committed"),
        "a step without a proposal": lambda message: message.parts[1].step.ClearField("given"),
        "a base length that it was not sent": lambda message: _set_base_length(message, 9),
        "a negative base length": lambda message: _set_base_length(message, -1),
        "an id outside the vocabulary": lambda message: _add_tokens(message, [size]),
        "a negative id": lambda message: _add_tokens(message, [-1]),
        "more tokens than max_length": lambda message: _add_tokens(message, too_many[: target.max_length]),
        f"a lead of {MAX_LEAD + 1} credits": lambda message: _set_credits(message, MAX_LEAD + 1),
        "a lead of -1 credits": lambda message: _set_credits(message, -1),
    }
    if not target.model.drafting_method:
        mistakes["own_head without a head"] = lambda message: message.parts[1].step.own_head.SetInParent()
    return mistakes


def _set_base_length(message: VerifyRequest, length: int) -> None:
    message.parts[1].step.committed.base_length = length


def _add_tokens(message: VerifyRequest, token_ids: Sequence[int]) -> None:
    message.parts[1].step.committed.token_ids.extend(token_ids)


def _set_credits(message: VerifyRequest, count: int) -> None:
    message.parts[1].step.lead.credits = count


async def _check_refusals(target: Subject, talk: Conversation) -> str:
    tokens = target.prompt()
    mistakes = _list_mistakes(target)
    await talk.say((1, target.options()))
    await talk.ask(_step(tokens, serial=1))
    for sequence, (what, change) in enumerate(mistakes.items(), start=2):
        message = wire.requests_to_proto([(sequence, target.options()), (sequence, _step(tokens))])
        change(message)
        await talk.write(message.SerializeToString())
        await talk.must_end(what, sequence)
    await talk.ask(_step([*tokens, tokens[0]], len(tokens), serial=2))
    await talk.say((0, target.options()))
    code = await talk.end_of_stream()
    if code is not REFUSED:
        raise ProtocolError(f"sequence 0 ended the stream with {code.name}; it must be {REFUSED.name}")
    return f"{len(mistakes)} mistakes each ended their own sequence with {REFUSED.name}, and sequence 0 the stream"


async def _check_unasked(target: Subject, talk: Conversation) -> str:
    tokens = target.prompt()
    await talk.say((1, target.options()))
    await talk.ask(_step(tokens))
    await talk.must_be_silent("lead is not set; an answer came that nobody asked for")
    await _lead(target, talk, 0.0, sequence=2)
    # Before all that it may have gone on with
    base = len(tokens) // 2
    await talk.ask(_step([*tokens[:base], tokens[0]], base, serial=2), 2)
    await talk.must_be_silent("a step without credits ends a lead; an answer came that nobody asked for", 2)
    return "without credits nothing comes unasked"


async def _check_lead(target: Subject, talk: Conversation) -> str:
    """Rounds that begin by themselves, and that are asked for when they have begun already."""
    answered = await _lead(target, talk, 0.0)
    count = len(answered) - 1
    await talk.must_be_silent(f"it had {_CREDITS} credits and took {count} steps; another answer came")
    if not count:
        return "it leads no rounds: each is asked for"
    *others, last = answered[1:]
    for serial, led in enumerate(others, start=2):
        await talk.say((1, replace(led.step, serial=serial)))
        await talk.must_be_silent("it answered a round twice: by itself, and when it was asked for")
    await talk.say((1, replace(last.step, serial=count + 1, lead=_CREDITS)))
    await _follow(talk, answered, count + _CREDITS)
    await talk.must_be_silent(
        f"a round that it had begun was asked for with {_CREDITS} credits, and it took {len(answered) - 1 - count} "
        "steps behind it; another answer came"
    )
    return f"with {_CREDITS} credits it took {count} steps by itself, each with the last one's outcome, each said once"


async def _check_own_head(target: Subject, talk: Conversation) -> str:
    if not target.model.drafting_method:
        return "it has no head of its own"
    tokens = target.prompt()
    proposals = []
    options = replace(target.options(), acceptance=AcceptanceTerms("greedy"))
    for sequence in (1, 2):
        await talk.say((sequence, options))
        await talk.ask(_step(tokens, serial=1), sequence)
        delta = Delta(len(tokens), tokens[:1])
        asked = VerifyStep(delta, RowKind.TOKEN, 1, serial=2, own_tokens=_PROPOSED)
        await talk.say((sequence, asked))
        answer = await talk.next(sequence)
        if isinstance(answer, Ending):
            raise ProtocolError(f"a step with own_head ended with {describe_ending(answer)}")
        if isinstance(answer, Pending) or answer.proposal is None:
            raise ProtocolError("a step with own_head came back without the proposal that was verified")
        check_label(answer, asked.serial, 0)
        proposed = list(answer.proposal.token_ids)
        if len(proposed) > _PROPOSED:
            raise ProtocolError(f"own_head.max_tokens is {_PROPOSED}; it proposed {len(proposed)}")
        wanted = len(tokens) + 1
        if answer.proposal.base_length != wanted or answer.base_length != wanted:
            raise ProtocolError(
                f"its head's proposal extends {answer.proposal.base_length} tokens and the rows {answer.base_length}; "
                f"it must be {wanted}"
            )
        check_rows(
            answer.verification(replace(asked, row_count=len(proposed) + 1)), target.model.vocabulary_size
        )
        proposals.append(proposed)
    if proposals[0] != proposals[1]:
        raise ProtocolError(
            f"its head proposed {proposals[1]}, and before {proposals[0]} behind the same tokens"
        )
    return f"its head proposes {len(proposals[0])} of {_PROPOSED} tokens, the same behind the same tokens"


async def _check_own_lead(target: Subject, talk: Conversation) -> str:
    """Led rounds with proposals of the head against what the rule decides, as a coordinator does."""
    if not target.model.drafting_method:
        return "it has no head of its own"
    tokens = target.prompt()
    led = 0
    others = 0
    for sequence, (name, temperature) in enumerate(_LED_RULES, start=1):
        terms = AcceptanceTerms(name)
        options = replace(target.options(temperature), acceptance=terms)
        rule = rule_of(terms, options.sampling)
        await talk.say((sequence, options))
        first = await talk.ask(_step(tokens, serial=1), sequence)
        (row,) = first.rows
        assert isinstance(row, TokenRow), "check_rows has seen to it"
        step = rule.own_step(Delta(len(tokens), [row.token_id]), rule.row_kinds[0], 2, _CREDITS, _PROPOSED)
        await talk.say((sequence, step))
        unasked: list[VerifyStep] = []
        for number in range(1 + _CREDITS):
            answer = await talk.next(sequence)
            if not isinstance(answer, wire.Answer) or answer.proposal is None:
                raise ProtocolError(
                    f"{name}: no answer with its head's proposal came to a step with own_head"
                )
            check_label(answer, 2, number)
            proposal = answer.proposal
            check_proposal(
                talk.service,
                proposal,
                step.delta.length,
                _PROPOSED,
                target.model.vocabulary_size,
                with_token_logits=False,
            )
            verification = answer.verification(rule.step_with(step, proposal))
            if verification.goes_on is None:
                break
            decided = rule.accept(Round(proposal, verification, options.sampling))
            outcome = Delta(verification.base_length + decided.accepted_count, (decided.next_token_id,))
            others += verification.goes_on.delta != outcome
            led += 1
            step = rule.own_step(verification.goes_on.delta, rule.row_kinds[0], 3, 0, _PROPOSED)
            unasked.append(step)
        if unasked:
            await talk.say((sequence, unasked[0]))
            await talk.must_be_silent(
                f"{name}: it answered a round twice: by itself, and when it was asked for", sequence
            )
    if not led:
        return "it does not go on behind proposals of its head: each round is asked for"
    differing = (
        f"; {others} of them with another outcome than the rule's, which wastes a step" if others else ""
    )
    return f"it went on behind {led} proposals of its head by {', '.join(name for name, _ in _LED_RULES)}{differing}"


_LED_RULES = (("greedy", 0.0), ("strict", _TEMPERATURE), ("residual", _TEMPERATURE))

_CHECKS = name_checks(
    check_health,
    _check_model,
    _check_tokenizer,
    _check_rows,
    _check_supports,
    _check_rollback,
    _check_seeds,
    _check_repeated,
    _check_finish,
    _check_refusals,
    _check_unasked,
    _check_lead,
    _check_own_head,
    _check_own_lead,
)

SUITE = Suite(TargetClient, Subject, Conversation, _CHECKS)
"""All that a target service is checked for."""
