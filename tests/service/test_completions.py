"""Completions from start to end, seen by a client of a coordinator over fake services."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from benchmarks.load.fakes import VOCABULARY_SIZE
from tandem.errors import InvalidRequestError
from tandem.types import FinishReason, GenerationRequest, PositionStats
from tests.paths import DEMO_TARGET
from tests.service.clients import complete, until
from tests.service.fakes import MAX_LENGTH, FakeDraft, FakeTarget, cluster, counting, fleet

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


def request(
    prompt: str | tuple[int, ...] = (10,),
    max_tokens: int | None = 11,
    *,
    temperature: float = 0.0,
    num_speculative_tokens: int = 4,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        seed=1,
    )


@TEMPERATURES
async def test_a_proposal_is_accepted_completely(temperature: float) -> None:
    async with cluster(FakeTarget(), draft := FakeDraft()) as client:
        completed = await complete(client, request(temperature=temperature))
    assert completed.token_ids == tuple(range(11, 22))
    # One token from the target while the draft reads the prompt, then twice four tokens and the bonus token.
    assert completed.drafted == (False, *[True] * 4, False, *[True] * 4, False)
    assert draft.requested == [0, 4, 4]
    assert completed.stats.rounds == 3
    assert completed.stats.positions == [PositionStats(2, 2, 2)] * 4


@TEMPERATURES
async def test_a_proposal_is_rejected_completely(temperature: float) -> None:
    async with cluster(FakeTarget(), FakeDraft(lambda tokens: 7)) as client:
        completed = await complete(client, request(temperature=temperature))
    assert completed.token_ids == tuple(range(11, 22))
    assert not any(completed.drafted)
    assert completed.stats.rounds == 11
    assert completed.stats.accepted == 0 < completed.stats.drafted


@TEMPERATURES
async def test_a_proposal_is_accepted_up_to_its_first_wrong_token(temperature: float) -> None:
    wrong_at_multiples_of_three = FakeDraft(lambda tokens: 7 if tokens[-1] % 3 == 2 else counting(tokens))
    async with cluster(FakeTarget(), wrong_at_multiples_of_three) as client:
        completed = await complete(client, request(temperature=temperature))
    assert completed.token_ids == tuple(range(11, 22))
    # 11 | 7 is refused: 12 | 13 14 and 7 refused: 15 | and so on: the target supplies the multiples of three.
    assert completed.drafted == tuple(n % 3 != 0 and n != 11 for n in range(11, 22))


@TEMPERATURES
@pytest.mark.parametrize("eos", [11, 12, 13, 15, 16])
async def test_tokens_after_an_end_of_sequence_are_dropped(eos: int, temperature: float) -> None:
    """The first token, the first of a proposal, one inside it, its last, and the bonus token."""
    async with cluster(FakeTarget(eos_token_ids=(3, eos)), FakeDraft()) as client:
        completed = await complete(client, request(temperature=temperature))
    assert completed.token_ids == tuple(range(11, eos + 1))
    assert completed.finish_reason is FinishReason.STOP
    assert completed.stats.accepted == sum(completed.drafted)


@pytest.mark.parametrize("max_tokens", range(1, 12))
async def test_max_tokens_is_exact_at_every_point_of_a_round(max_tokens: int) -> None:
    async with cluster(target := FakeTarget(), FakeDraft()) as client:
        completed = await complete(client, request(max_tokens=max_tokens))
    assert completed.token_ids == tuple(range(11, 11 + max_tokens))
    assert completed.finish_reason is FinishReason.LENGTH
    assert target.longest <= max_tokens, "the target never reads the last token"


@pytest.mark.parametrize("max_tokens", [None, 10 * MAX_LENGTH])
async def test_max_length_is_exact(max_tokens: int | None) -> None:
    async with cluster(target := FakeTarget(), draft := FakeDraft()) as client:
        completed = await complete(client, request(max_tokens=max_tokens))
    assert completed.token_ids == tuple(range(11, 10 + MAX_LENGTH))
    assert completed.finish_reason is FinishReason.LENGTH
    assert max(target.longest, draft.longest) < MAX_LENGTH


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("", "the prompt is empty"),
        ("x = 1\n" * MAX_LENGTH, f"it must have at most {MAX_LENGTH - 1}"),
        ((1, VOCABULARY_SIZE), f"the prompt holds token id {VOCABULARY_SIZE}"),
    ],
)
async def test_a_prompt_that_cannot_be_completed_is_refused(
    prompt: str | tuple[int, ...], sentence: str
) -> None:
    async with cluster(target := FakeTarget(), draft := FakeDraft()) as client:
        with pytest.raises(InvalidRequestError, match=sentence):
            await complete(client, request(prompt))
    assert target.opened == draft.opened == 0, "no service receives it"


async def test_streams_end_with_finish() -> None:
    async with cluster(target := FakeTarget(), draft := FakeDraft()) as client:
        await complete(client, request())
    assert (target.opened, target.finished, target.running) == (1, 1, 0)
    assert (draft.opened, draft.finished, draft.running) == (1, 1, 0)


@TEMPERATURES
async def test_log_probabilities_change_only_the_kind_of_row(temperature: float) -> None:
    async with cluster(FakeTarget(), FakeDraft()) as client:
        plain = [chunk async for chunk in client.generate(request(temperature=temperature))]
        chunks = [chunk async for chunk in client.generate(request(temperature=temperature, logprobs=2))]
    assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in plain]
    assert not any(chunk.logprobs for chunk in plain)
    for chunk in chunks:
        assert [position.top_token_ids for position in chunk.logprobs] == [
            (token_id, token_id + 1) for token_id in chunk.token_ids
        ]
        assert [position.logprob for position in chunk.logprobs] == [0.0] * len(chunk.token_ids)


async def test_logit_comparison_is_refused_for_a_draft_without_a_model() -> None:
    """The coordinator reads the drafting method from the draft's model info."""
    draft = FakeDraft()
    draft.model_info = replace(draft.model_info, architecture="ngram", vocabulary_size=0, max_length=0)
    wrong = replace(request(temperature=1.0), rejection_sampling_strategy="logit-comparison")
    async with cluster(target := FakeTarget(), draft) as client:
        with pytest.raises(InvalidRequestError, match="the draft service drafts by ngram"):
            await complete(client, wrong)
        assert target.opened == 0
        alone = await complete(client, replace(wrong, speculation=False))
    assert alone.token_ids == tuple(range(11, 22))


@pytest.mark.parametrize(
    ("too_large", "sentence"),
    [
        (request(tuple(range(MAX_LENGTH))), f"the prompt has {MAX_LENGTH} tokens"),
        (request("é" * 30), "the prompt has 60 bytes"),
        (request(stop=("a",) * 17), "the number of stop strings is 17"),
    ],
    ids=["token ids", "text", "stop strings"],
)
async def test_too_large_requests_are_refused_before_they_wait(
    too_large: GenerationRequest, sentence: str
) -> None:
    target = FakeTarget()
    target.step_seconds = 0.1
    async with fleet(target, max_concurrent_requests=1, max_prompt_bytes=50) as (client, _, service):
        running = asyncio.create_task(complete(client, request(max_tokens=50)))
        await until(lambda: target.running == 1, 20.0)
        with pytest.raises(InvalidRequestError, match=sentence):
            await complete(client, too_large)
        assert not running.done(), "the small request ran first"
        assert service.completions.admission.queued == 0
        running.cancel()
