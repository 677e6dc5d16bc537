"""Plays the protocol of target services (docs/protocol.md) against one, and says where it differs.

Each check is a function that returns what it found, or raises the difference.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.acceptance.rounds import Round
from tandem.acceptance.strategies import rule_of
from tandem.errors import ProtocolError, ServiceUnavailableError, TandemError
from tandem.model.admin import Finding
from tandem.model.types import (
    AcceptanceTerms,
    Cancel,
    Delta,
    DenseRow,
    Finish,
    ModelInfo,
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
from tandem.rpc.channels import errors_of
from tandem.v1.target_pb2 import VerifyResponse
from tandem.wire import target as wire
from tandem.wire.status import Ending
from tandem_coordinator.transport.proposals import check_proposal
from tandem_coordinator.transport.streams import Call
from tandem_coordinator.transport.target_client import TargetClient, check_rows

_NAME = "target service"
_PROPOSED = 3
"""Tokens of a proposal."""
_PROMPT_LENGTH = 24
_MAX_LENGTH = 128
"""Longest sequence that is played, where the model reads as much."""
_LOGIT_TOLERANCE = 0.05
"""Logits of one position may differ by as much between two ways of computing them."""
_MASS_TOLERANCE = 0.02
"""Masses may differ by as much, and single probabilities by a tenth: what the tolerance of logits leaves of them."""
_TEMPERATURE = 0.7
_CREDITS = 2
_SILENCE_SECONDS = 0.3
"""How long nothing may come where nothing was asked for."""

Said = wire.Answer | Pending | Ending


@dataclass(frozen=True, slots=True)
class TargetSubject:
    """The service that is tested."""

    channel: grpc.aio.Channel
    model: ModelInfo
    seconds: float
    """How long an answer may take."""

    @property
    def max_length(self) -> int:
        return min(_MAX_LENGTH, self.model.max_length)

    def prompt(self) -> list[int]:
        base = min(300, self.model.vocabulary_size // 2)
        span = self.model.vocabulary_size - base
        return [base + number % 5 % span for number in range(_PROMPT_LENGTH)]

    def options(self, temperature: float = 0.0) -> TargetOptions:
        sampling = SamplingParams(temperature=temperature, seed=7)
        return TargetOptions("conformance", sampling, self.max_length, prompt_length=_PROMPT_LENGTH)


class TargetConversation:
    """One stream to the service, on which requests are said as they are."""

    def __init__(self, target: TargetSubject) -> None:
        self._target = target
        self.call: Call = target.channel.stream_stream("/tandem.v1.TargetService/Verify")()
        self._arrived: defaultdict[int, deque[Said | ProtocolError]] = defaultdict(deque)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def say(self, *requests: tuple[int, wire.Request]) -> None:
        """Send requests in one message, each with the number of its sequence."""
        with errors_of(_NAME):
            await self.call.write(wire.requests_to_proto(requests).SerializeToString())

    async def next(self, sequence: int = 1, seconds: float | None = None) -> Said:
        """The next answer or end of a sequence."""
        arrived = self._arrived[sequence]
        limit = seconds or self._target.seconds
        try:
            async with asyncio.timeout(limit):
                while not arrived:
                    with errors_of(_NAME):
                        content = await self.call.read()
                    if not isinstance(content, bytes):
                        raise ProtocolError("it ended the stream")
                    for number, answer in wire.answers_from_proto(VerifyResponse.FromString(content)):
                        self._arrived[number].append(answer)
        except TimeoutError:
            raise ProtocolError(f"no answer to sequence {sequence} within {limit:g} s") from None
        except DecodeError:
            raise ProtocolError("its answer cannot be read; it must be a VerifyResponse") from None
        answer = arrived.popleft()
        if isinstance(answer, ProtocolError):
            raise answer
        return answer

    async def ask(self, step: VerifyStep, sequence: int = 1) -> Verification:
        """The answer to a step, as a coordinator would take it."""
        await self.say((sequence, step))
        return await self.verification(step, sequence)

    async def verification(self, step: VerifyStep, sequence: int = 1) -> Verification:
        answer = await self.next(sequence)
        while isinstance(answer, Pending):
            answer = await self.next(sequence)
        if isinstance(answer, Ending):
            raise ProtocolError(f"it ended sequence {sequence} instead of answering: {_words(answer)}")
        found = answer.verification(step)
        wanted = step.delta.length - (step.row_count - 1)
        if step.row_count and found.base_length != wanted:
            raise ProtocolError(f"its rows begin at {found.base_length}; they must begin at {wanted}")
        check_rows(found, self._target.model.vocabulary_size)
        return found

    async def must_end(
        self, what: str, sequence: int = 1, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    ) -> None:
        """A sequence must end because of this."""
        answer = await self.next(sequence)
        if not isinstance(answer, Ending):
            raise ProtocolError(f"{what}: it answered sequence {sequence}, which it must end")
        if answer.code is not code:
            raise ProtocolError(f"{what} ended with {_words(answer)}; it must be {code.name}")


def _words(ending: Ending) -> str:
    return f"{ending.code.name} {ending.sentence}".strip()


def _step(
    tokens: Sequence[int], base: int = 0, proposed: int = 0, kind: RowKind = RowKind.TOKEN, serial: int = 0
) -> VerifyStep:
    """Rows for the last tokens, which are proposed, and for the one after them."""
    return VerifyStep(Delta(base, list(tokens[base:])), kind, proposed + 1, serial=serial)


def _token_ids(found: Verification) -> list[int]:
    return [row.token_id for row in found.rows if isinstance(row, TokenRow)]


def _logits(found: Verification) -> np.ndarray:
    return np.stack([row.logits for row in found.rows if isinstance(row, DenseRow)])


async def _health(target: TargetSubject, _: TargetConversation) -> str:
    with errors_of(_NAME):
        answer = await health_pb2_grpc.HealthStub(target.channel).Check(
            health_pb2.HealthCheckRequest(), timeout=target.seconds
        )
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ProtocolError(f"grpc.health.v1.Health/Check says {answer.status}; it must be 1 (SERVING)")
    return "grpc.health.v1.Health/Check says SERVING"


async def _model(target: TargetSubject, _: TargetConversation) -> str:
    model = target.model
    if not (model.vocabulary_size and model.tokenizer_hash and model.max_length > 0):
        raise ProtocolError("it must name its vocabulary's size, its tokenizer's hash and its maximum length")
    head = f"a head of its own ({model.drafting_method})" if model.drafting_method else "no head of its own"
    return (
        f"{model.name}: {model.vocabulary_size} tokens, sequences of up to {model.max_length} tokens, {head}"
    )


async def _tokenizer(target: TargetSubject, _: TargetConversation) -> str:
    files = await TargetClient(target.channel).tokenizer_files()
    if not files.get("tokenizer.json"):
        raise ProtocolError("GetTokenizer sent no tokenizer.json")
    return f"GetTokenizer sends {', '.join(sorted(files))}"


async def _rows(target: TargetSubject, talk: TargetConversation) -> str:
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


async def _supports(target: TargetSubject, talk: TargetConversation) -> str:
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


async def _rollback(target: TargetSubject, talk: TargetConversation) -> str:
    tokens = target.prompt()
    wrong = [*tokens[:-_PROPOSED], *tokens[:_PROPOSED]]
    await talk.say((1, target.options()), (2, target.options()))
    whole = _logits(await talk.ask(_step(tokens, kind=RowKind.DENSE)))
    await talk.ask(_step(wrong, proposed=_PROPOSED), 2)
    base = len(tokens) - _PROPOSED
    again = _logits(await talk.ask(_step(tokens, base, kind=RowKind.DENSE), 2))
    apart = float(np.abs(whole - again).max())
    if apart > _LOGIT_TOLERANCE:
        raise ProtocolError(f"a rejected proposal left a trace: logits differ by {apart:.3g}")
    return "a rejected proposal leaves no trace"


async def _seeds(target: TargetSubject, talk: TargetConversation) -> str:
    options = target.options(_TEMPERATURE)
    await talk.say((1, options), (2, options))
    step = _step(target.prompt(), proposed=_PROPOSED)
    first = _token_ids(await talk.ask(step, 1))
    second = _token_ids(await talk.ask(step, 2))
    if first != second:
        raise ProtocolError(f"two sequences with one seed: it drew {second}, and before {first}")
    return "one seed gives the same token rows"


async def _repeated(target: TargetSubject, talk: TargetConversation) -> str:
    await talk.say((1, target.options(_TEMPERATURE)))
    step = _step(target.prompt(), proposed=_PROPOSED, serial=1)
    first = _token_ids(await talk.ask(step))
    second = _token_ids(await talk.ask(step))
    if first != second:
        raise ProtocolError(f"a step that was asked again: it answered {second}, and before {first}")
    return "a step that is asked again has the same answer"


async def _finish(target: TargetSubject, talk: TargetConversation) -> str:
    tokens = target.prompt()
    await talk.say((1, target.options()), (2, target.options()))
    await talk.ask(_step(tokens))
    await talk.say((1, Finish(len(tokens))), (2, Cancel()))
    await talk.must_end("a Finish", code=grpc.StatusCode.OK)
    return "a Finish is answered by an Ending"


async def _refusals(target: TargetSubject, talk: TargetConversation) -> str:
    tokens = target.prompt()
    await talk.say((1, target.options()))
    await talk.ask(_step(tokens))
    long = (tokens * target.max_length)[: target.max_length + 1]
    wrong = {
        "a base length that it was not sent": VerifyStep(Delta(9, [tokens[0]]), RowKind.TOKEN, 1),
        "an id outside the vocabulary": _step([*tokens, target.model.vocabulary_size]),
        "more tokens than max_length": _step(long),
    }
    if not target.model.drafting_method:
        wrong["own_head without a head"] = VerifyStep(Delta(0, tokens), RowKind.TOKEN, 1, own_tokens=2)
    for number, (what, step) in enumerate(wrong.items(), start=2):
        await talk.say((number, target.options()), (number, step))
        await talk.must_end(what, number)
    await talk.ask(_step([*tokens, tokens[0]], len(tokens)))
    return "what is wrong ends its sequence alone, with INVALID_ARGUMENT"


async def _must_be_silent(talk: TargetConversation, otherwise: str) -> None:
    try:
        await talk.next(seconds=_SILENCE_SECONDS)
    except ProtocolError as error:
        if "no answer" in str(error):
            return
        raise
    raise ProtocolError(otherwise)


async def _unasked(target: TargetSubject, talk: TargetConversation) -> str:
    await talk.say((1, target.options()))
    await talk.ask(_step(target.prompt()))
    await _must_be_silent(talk, "lead is not set; an answer came that nobody asked for")
    return "without credits nothing comes unasked"


async def _lead(target: TargetSubject, talk: TargetConversation) -> str:
    tokens = target.prompt()
    await talk.say((1, target.options()))
    step = replace(_step(tokens, proposed=_PROPOSED), lead=_CREDITS)
    found = await talk.ask(step)
    announced = found.goes_on
    count = 0
    while announced is not None and count < _CREDITS:
        if announced.own_tokens is not None:
            raise ProtocolError("it goes on with its head behind given tokens; the outcome must be given too")
        rows = _token_ids(found)
        proposed = step.delta.token_ids[len(step.delta.token_ids) - (step.row_count - 1) :]
        kept = common_length(proposed, rows)
        outcome = (found.base_length + kept, rows[kept])
        said = (announced.delta.base_length, announced.delta.token_ids[0])
        if said != outcome:
            raise ProtocolError(
                f"it goes on with token {said[1]} at {said[0]}; its rows say {outcome[1]} at {outcome[0]}"
            )
        step = VerifyStep(announced.delta, RowKind.TOKEN, len(announced.delta.token_ids))
        found = await talk.verification(step)
        count += 1
        announced = found.goes_on
    await _must_be_silent(talk, f"it had {_CREDITS} credits and took {count} steps; another answer came")
    if not count:
        return "it leads no rounds: each is asked for"
    return f"with {_CREDITS} credits it took {count} steps by itself, each with the outcome of the last"


async def _own_head(target: TargetSubject, talk: TargetConversation) -> str:
    if not target.model.drafting_method:
        return "it has no head of its own"
    tokens = target.prompt()
    proposals = []
    options = replace(target.options(), acceptance=AcceptanceTerms("greedy"))
    for sequence in (1, 2):
        await talk.say((sequence, options))
        await talk.ask(_step(tokens), sequence)
        asked = VerifyStep(Delta(len(tokens), tokens[:1]), RowKind.TOKEN, 1, own_tokens=_PROPOSED)
        await talk.say((sequence, asked))
        answer = await talk.next(sequence)
        if isinstance(answer, Ending):
            raise ProtocolError(f"a step with own_head ended with {_words(answer)}")
        if isinstance(answer, Pending) or answer.proposal is None:
            raise ProtocolError("a step with own_head came back without the proposal that was verified")
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


async def _own_lead(target: TargetSubject, talk: TargetConversation) -> str:
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
        first = await talk.ask(_step(tokens), sequence)
        (row,) = first.rows
        assert isinstance(row, TokenRow), "check_rows has seen to it"
        step = rule.own_step(Delta(len(tokens), [row.token_id]), rule.row_kinds[0], 0, _CREDITS, _PROPOSED)
        await talk.say((sequence, step))
        for _ in range(1 + _CREDITS):
            answer = await talk.next(sequence)
            if not isinstance(answer, wire.Answer) or answer.proposal is None:
                raise ProtocolError(
                    f"{name}: no answer with its head's proposal came to a step with own_head"
                )
            proposal = answer.proposal
            check_proposal(
                _NAME,
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
            step = rule.own_step(verification.goes_on.delta, rule.row_kinds[0], 0, _CREDITS, _PROPOSED)
    if not led:
        return "it does not go on behind proposals of its head: each round is asked for"
    differing = (
        f"; {others} of them with another outcome than the rule's, which wastes a step" if others else ""
    )
    return f"it went on behind {led} proposals of its head by {', '.join(name for name, _ in _LED_RULES)}{differing}"


_LED_RULES = (("greedy", 0.0), ("strict", _TEMPERATURE), ("residual", _TEMPERATURE))

_ALL = (
    _health, _model, _tokenizer, _rows, _supports, _rollback, _seeds, _repeated, _finish, _refusals, _unasked, _lead,
    _own_head, _own_lead,
)  # fmt: skip
TARGET_CHECKS = {check.__name__.strip("_").replace("_", " "): check for check in _ALL}
"""By name."""


async def target_conformance(channel: grpc.aio.Channel, seconds: float) -> list[Finding]:
    """Everything that a target service does as the protocol says, and what not."""
    try:
        async with asyncio.timeout(seconds):
            model = await TargetClient(channel).model_info()
    except TimeoutError:
        raise ServiceUnavailableError(f"{_NAME}: no answer within {seconds:g} s") from None
    target = TargetSubject(channel, model, seconds)
    findings = []
    for name, check in TARGET_CHECKS.items():
        try:
            async with TargetConversation(target) as talk:
                findings.append(Finding.ok(name, await check(target, talk)))
        except TandemError as error:
            findings.append(Finding.problem(name, str(error).removeprefix(f"{_NAME}: ")))
            if name == "model":
                break
    return findings
