"""Targets with recurrent layers roll back with the states that vLLM keeps.

vLLM's kernels for CPUs go on from the wrong state, so these are its kernels for GPUs: on a CPU Triton's interpreter
runs them, in another process, where the kernels are chosen before anything else is imported.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf

import pytest
import pytest_asyncio

from tandem.engine.core.engine import RowEngine
from tandem.engine.interface import RowRequest
from tandem.engine_vllm.engine import ROLLED_BACK
from tandem.model.types import Delta, RowKind, TokenRow, VerifyStep
from tests.paths import DEVICE
from tests.unit.engine.tiny_models import MAX_LENGTH, VOCABULARY_SIZE
from tests.vllm.families import RECURRENT
from tests.vllm.models import GREEDY, Twin, prompts, text_of, together, twin_of

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_KERNELS = IS_INTERPRETED or DEVICE != "cpu"

pytestmark = pytest.mark.timeout(900)
in_the_loop = pytest.mark.asyncio(loop_scope="module")
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="run by the test in another process")

K = 4
"""Tokens of the proposals for which the engines have states."""
COUNT = 16
"""Tokens of a text."""
ENDS = [(length, accepted) for length in range(K + 1) for accepted in range(length + 1)]
"""Lengths of proposals, and how many of their tokens are accepted: each of them once."""


@pytest.mark.skipif(HAS_KERNELS, reason="the kernels are here")
def test_the_kernels_for_gpus_pass_in_another_process() -> None:
    command = (sys.executable, "-m", "pytest", "-v", "-W", "default", __file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{2 * len(RECURRENT)} passed" in done.stdout, done.stdout


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RECURRENT)
async def twin(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Twin]:
    with pytest.MonkeyPatch.context() as patch:
        if IS_INTERPRETED:
            from tests.vllm.gpu_kernels import take_gpu_kernels

            take_gpu_kernels(patch)
            patch.setitem(ROLLED_BACK, DEVICE, ROLLED_BACK["cuda"])
        async with twin_of(tmp_path_factory.mktemp(request.param), RECURRENT[request.param]()) as found:
            yield found


async def text_with_rejections(
    engine: RowEngine, prompt: SequenceOf[int], known: SequenceOf[int], seed: int
) -> tuple[list[int], int]:
    """The text after a prompt by proposals of which so many tokens are right as `ENDS` says, in an order of the seed,
    and the number of tokens that should have been computed."""
    ends = random.Random(seed).sample(ENDS, len(ENDS))
    sequence = await engine.open(MAX_LENGTH, scope="a scope")
    text = list(prompt)
    base = 0
    computed = len(prompt) - 1
    try:
        while (done := len(text) - len(prompt)) < len(known):
            length, accepted = ends[0]
            ends = [*ends[1:], ends[0]]
            right = known[done : done + length]
            proposal = [
                token if place < accepted else (token + 1) % VOCABULARY_SIZE
                for place, token in enumerate(right)
            ]
            step = VerifyStep(Delta(base, [*text[base:], *proposal]), RowKind.TOKEN, len(proposal) + 1)
            answer = await engine.run(sequence, RowRequest(step, GREEDY))
            found = [row.token_id for row in answer.rows if isinstance(row, TokenRow)]
            kept = min(accepted, len(proposal))
            assert found[:kept] == proposal[:kept]
            base = len(text)
            text += found[: kept + 1]
            computed += len(proposal) + 1
    finally:
        engine.release(sequence)
    return text[len(prompt) :], computed


@needs_kernels
@in_the_loop
async def test_texts_with_rejections_are_those_of_transformers(twin: Twin) -> None:
    """Token by token, and by proposals that end differently in one batch; nothing is computed twice for them."""
    texts = prompts(6)
    alone = [await text_of(twin.engine, prompt, COUNT) for prompt in texts]
    assert all(twin.is_greedy(prompt, text) for prompt, text in zip(texts, alone, strict=True))
    twin.records.clear()
    works = [
        text_with_rejections(twin.engine, prompt, known, seed)
        for seed, (prompt, known) in enumerate(zip(texts, alone, strict=True))
    ]
    found = await together(*works)
    assert [text[:COUNT] for text, _ in found] == alone
    assert max(record.sequence_count for record in twin.records) > 3
    assert sum(record.token_count for record in twin.records) == sum(computed for _, computed in found)
    # Longer proposals than there are states for
    others = [text_of(twin.engine, *each, seed=3) for each in zip(texts, [COUNT] * 6, alone, strict=True)]
    assert await together(*others) == alone


@needs_kernels
@in_the_loop
async def test_a_sequence_may_roll_back_to_where_no_state_is_left(twin: Twin) -> None:
    text = prompts(8)[7]
    steps = ((0, text), (60, [9, 8, 7]), (63, [5] * 40), (33, [11, 12]), (4, [1, 2, 3, 4]), (1, [50] * 9))
    sequence = await twin.engine.open(180)
    for base, tail in steps:
        text = [*text[:base], *tail]
        step = VerifyStep(Delta(base, tail), RowKind.TOKEN, 2)
        answer = await twin.engine.run(sequence, RowRequest(step, GREEDY))
        expected = twin.logits(text)[-2:].argmax(-1).tolist()
        assert [row.token_id for row in answer.rows if isinstance(row, TokenRow)] == expected
    twin.engine.release(sequence)
