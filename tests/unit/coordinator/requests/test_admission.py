"""The clients that count as one peer, places and queue, and the bounds of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem.errors import CapacityError, DeadlineError, InvalidRequestError
from tandem.model.types import GenerationRequest, Grammar, GrammarKind
from tandem_coordinator.requests.admission import Admission, peer_of_grpc, peer_of_host
from tandem_coordinator.requests.validation import BoundedRequest
from tandem_coordinator.settings.coordinator import CoordinatorSettings


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.7:5000", "192.0.2.7"),
        ("ipv6:%5B::1%5D:5000", "::1"),
        ("ipv6:%5B2001:db8::1:2:3:4%5D:5000", "2001:db8::/64"),
        ("ipv6:%5B::ffff:192.0.2.7%5D:5000", "192.0.2.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
    ],
)
def test_the_peer_of_a_grpc_call_is_its_host(peer: str, address: str) -> None:
    assert peer_of_grpc(peer) == address


def test_a_host_name_is_its_own_peer() -> None:
    assert peer_of_host("192.0.2.7") == "192.0.2.7"
    assert peer_of_host("somewhere") == "somewhere"


@asynccontextmanager
async def occupied(admission: Admission, count: int) -> AsyncIterator[None]:
    """So many requests have places or wait for them."""

    async def stay() -> None:
        async with admission.place(None):
            await asyncio.Event().wait()

    guests = [asyncio.create_task(stay()) for _ in range(count)]
    await asyncio.sleep(0)
    yield
    for guest in guests:
        guest.cancel()
    await asyncio.gather(*guests, return_exceptions=True)


async def test_waiting_ends_at_the_deadline() -> None:
    admission = Admission(1, 1)
    async with occupied(admission, 1):
        with pytest.raises(DeadlineError, match=r"waited 0\.01 s"):
            async with admission.place(0.01):
                pass
        assert (admission.running, admission.queued) == (1, 0)


async def test_refusals_are_counted_by_the_limit_that_was_met() -> None:
    admission = Admission(1, 1, max_streams_per_peer=1)
    async with occupied(admission, 2):
        with pytest.raises(CapacityError):
            async with admission.place(None):
                pass
    with admission.stream("10.0.0.1"), pytest.raises(CapacityError), admission.stream("10.0.0.1"):
        pass
    assert admission.rejections == {"max_queued_requests": 1, "max_streams_per_peer": 1, "max_batches": 0}


async def test_a_refusal_says_when_the_queue_moves() -> None:
    now = 0.0
    admission = Admission(1, 1, clock=lambda: now)
    async with admission.place(None):
        now = 0.2
    async with occupied(admission, 2):
        assert (admission.running, admission.queued) == (1, 1)
        with pytest.raises(CapacityError, match="1 request runs and 1 wait") as refusal:
            async with admission.place(None):
                pass
    # Two are before it, each of 0.2 seconds.
    assert refusal.value.retry_after_seconds == pytest.approx(0.4)
    assert (admission.running, admission.queued) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (GenerationRequest("é" * 11), "the prompt has 22 bytes; it must be at most 20"),
        (GenerationRequest("a", stop=("a", "b", "c")), "stop has 3 strings; it must be at most 2"),
        (GenerationRequest("a", stop=("abcde",)), "stop holds a string of 5 characters; it must be at most 4"),
        (GenerationRequest((1,) * 8),
            "the prompt has 8 tokens; it must have at most 7, one less than max_length (8)"),
        (GenerationRequest("a", num_speculative_tokens=33), "num_speculative_tokens is 33; it must be at most 32"),
        (GenerationRequest("a", grammar=Grammar(GrammarKind.JSON_SCHEMA, " " * 6)),
            "the structured output's json_schema has 6 bytes; it must be at most 5"),
        (GenerationRequest("a", rejection_sampling_strategy="Typical_Acceptance"),
            "rejection_sampling_strategy is 'Typical_Acceptance'; this coordinator allows greedy, residual, block, "
            "strict, auto"),
        (GenerationRequest("a", rejection_sampling_strategy="synthetic"),
            "rejection_sampling_strategy is 'synthetic'; this coordinator allows greedy, residual, block, strict, "
            "auto"),
    ],
)  # fmt: skip
def test_a_request_above_the_bounds_is_refused(request_: GenerationRequest, sentence: str) -> None:
    bounds = CoordinatorSettings(
        target_address="localhost:1",
        max_prompt_bytes=20,
        max_stop_strings=2,
        max_stop_length=4,
        max_grammar_bytes=5,
    )
    with pytest.raises(InvalidRequestError) as refusal:
        BoundedRequest(request_, bounds, 8).check()
    assert str(refusal.value) == sentence
