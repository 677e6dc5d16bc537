"""Faults of a draft cost the speed-up and never the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest

from tandem.serving.interceptors import Context
from tandem.types import FinishReason, GenerationRequest
from tandem.v1 import draft_pb2, types_pb2
from tandem.wire import draft as draft_wire
from tests.service.clients import complete, until
from tests.service.fake_rows import VOCABULARY_SIZE
from tests.service.fakes import FakeDraft, FakeTarget, cluster, refusal

PATIENCE_SECONDS = 0.05
TEST_SECONDS = 30.0
"""Bound on a completion, which shows a hang."""


class Hanging(FakeDraft):
    """Never answers."""

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> None:
        await asyncio.Event().wait()


class HangingLater(FakeDraft):
    """Stops answering in the middle of a stream."""

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> draft_pb2.ProposeResponse:
        if len(self.requested) > 2:
            await asyncio.Event().wait()
        return self.proposal(tokens, count)


class Late(FakeDraft):
    """Answers once after the coordinator's patience is over, and in time before and after."""

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> draft_pb2.ProposeResponse:
        if len(self.requested) == 2:
            await asyncio.sleep(3 * PATIENCE_SECONDS)
        return self.proposal(tokens, count)


class Refusing(FakeDraft):
    """Refuses sequences for lack of room."""

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> None:
        raise refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


class Dying(FakeDraft):
    """Fails in the middle of a stream."""

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> draft_pb2.ProposeResponse:
        if len(self.requested) > 2:
            raise refusal(grpc.StatusCode.UNAVAILABLE, "gone")
        return self.proposal(tokens, count)


class Leaving(FakeDraft):
    """Ends the stream without an error."""

    async def respond(
        self, tokens: Sequence[int], count: int, context: Context
    ) -> draft_pb2.ProposeResponse | None:
        return None if len(self.requested) > 2 else self.proposal(tokens, count)


class GarbledColumns(FakeDraft):
    """Sends invalid columns."""

    def __init__(self, garble: Callable[[draft_pb2.DistributionColumns], object]) -> None:
        super().__init__()
        self._garble = garble

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> draft_pb2.ProposeResponse:
        proposal = draft_wire.proposal_from_proto(self.proposal(tokens, count))
        message = draft_wire.proposal_to_proto(proposal, with_columns=True)
        if count and len(self.requested) > 2:
            self._garble(message.columns)
        return message


class Garbled(FakeDraft):
    """Sends invalid answers."""

    def __init__(self, garble: Callable[[draft_pb2.ProposeResponse], object]) -> None:
        super().__init__()
        self._garble = garble

    async def respond(self, tokens: Sequence[int], count: int, context: Context) -> draft_pb2.ProposeResponse:
        proposal = self.proposal(tokens, count)
        if count and len(self.requested) > 2:
            self._garble(proposal)
        return proposal


def _set_first_id(token_id: int) -> Callable[[draft_pb2.ProposeResponse], None]:
    def garble(proposal: draft_pb2.ProposeResponse) -> None:
        proposal.token_ids[0] = token_id
        for distribution in proposal.distributions[:1]:
            distribution.sparse.token_ids[0] = token_id

    return garble


def _other_base(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.base_length -= 1


def _one_too_many(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.token_ids.extend([5] * 100)
    proposal.distributions.extend([proposal.distributions[0]] * 100)


def _no_sum(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.distributions[0].sparse.probabilities = b"\0\0\0\0"


def _cut_bytes(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.distributions[0].sparse.probabilities = b"\0"


def _unknown_support(proposal: draft_pb2.ProposeResponse) -> None:
    sparse = proposal.distributions[0].sparse
    sparse.token_ids.append(VOCABULARY_SIZE)
    sparse.probabilities += b"\0\0\0\0"


def _not_in_its_support(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.distributions[0].sparse.token_ids[0] += 1


def _repeated_support(proposal: draft_pb2.ProposeResponse) -> None:
    sparse = proposal.distributions[0].sparse
    sparse.token_ids.append(sparse.token_ids[0])
    sparse.probabilities += b"\0\0\0\0"


def _too_few_distributions(proposal: draft_pb2.ProposeResponse) -> None:
    proposal.distributions.append(proposal.distributions[0])


def _dense_of_another_size(proposal: draft_pb2.ProposeResponse) -> None:
    for distribution in proposal.distributions:
        distribution.dense_logits.shape.append(1)
        distribution.dense_logits.data_type = types_pb2.DATA_TYPE_FLOAT32
        distribution.dense_logits.data = b"\0\0\0\0"


def _column(name: str, content: bytes) -> Callable[[], FakeDraft]:
    return lambda: GarbledColumns(lambda columns: setattr(columns, name, content))


FAULTS: dict[str, Callable[[], FakeDraft]] = {
    "hanging": Hanging,
    "hanging later": HangingLater,
    "late": Late,
    "refusing": Refusing,
    "dying": Dying,
    "leaving": Leaving,
    "unknown id": lambda: Garbled(_set_first_id(VOCABULARY_SIZE)),
    "negative id": lambda: Garbled(_set_first_id(-1)),
    "another base": lambda: Garbled(_other_base),
    "one too many": lambda: Garbled(_one_too_many),
    "no sum": lambda: Garbled(_no_sum),
    "cut bytes": lambda: Garbled(_cut_bytes),
    "unknown support": lambda: Garbled(_unknown_support),
    "not in its support": lambda: Garbled(_not_in_its_support),
    "repeated support": lambda: Garbled(_repeated_support),
    "too few distributions": lambda: Garbled(_too_few_distributions),
    "dense of another size": lambda: Garbled(_dense_of_another_size),
    "a column of other sizes": _column("support_sizes", b"\1\0\0\0\2\0\0\0"),
    "a column of too few sizes": _column("support_sizes", b"\1\0\0\0"),
    "a column of cut sizes": _column("support_sizes", b"\1"),
    "no column of sizes": _column("support_sizes", b""),
    "a column without sums": _column("probabilities", bytes(8)),
    "a column of cut bytes": _column("probabilities", bytes(7)),
    "a column of unknown ids": _column("support_ids", b"\xff" * 8),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_faulty_draft_leaves_the_targets_own_tokens(fault: str, temperature: float) -> None:
    request = GenerationRequest(
        (10,), max_tokens=30, temperature=temperature, num_speculative_tokens=2, seed=1
    )
    async with (
        asyncio.timeout(TEST_SECONDS),
        cluster(FakeTarget(), FAULTS[fault](), PATIENCE_SECONDS) as client,
    ):
        completed = await complete(client, request)
        again = await complete(client, request)
    assert completed.token_ids == again.token_ids == tuple(range(11, 41))
    assert completed.finish_reason is FinishReason.LENGTH


async def test_a_late_answer_is_dropped_and_the_draft_is_used_again() -> None:
    """The late answer proposes tokens of a finished round; as an answer to a later round it would be invalid."""
    target, draft = FakeTarget(), Late()
    # The target must not finish before the draft answers again.
    target.step_seconds = PATIENCE_SECONDS / 2
    async with cluster(target, draft, PATIENCE_SECONDS) as client:
        completed = await complete(client, GenerationRequest((10,), max_tokens=50, temperature=0.0))
    assert len(draft.requested) > 2
    assert completed.stats.accepted == completed.stats.drafted > 0


async def test_a_lost_draft_stream_is_closed() -> None:
    draft = Hanging()
    async with cluster(FakeTarget(), draft, PATIENCE_SECONDS) as client:
        await complete(client, GenerationRequest((10,), max_tokens=5, temperature=0.0))
        await until(lambda: not draft.running, TEST_SECONDS)
    assert draft.opened == 1


async def test_a_draft_without_logits_is_not_used_for_logit_comparison() -> None:
    request = GenerationRequest(
        (10,), max_tokens=30, temperature=1.0, seed=1, rejection_sampling_strategy="logit-comparison"
    )
    draft = FakeDraft()
    async with asyncio.timeout(TEST_SECONDS), cluster(FakeTarget(), draft, PATIENCE_SECONDS) as client:
        completed = await complete(client, request)
    assert completed.token_ids == tuple(range(11, 41))
    assert completed.stats.accepted == 0
    assert draft.requested
