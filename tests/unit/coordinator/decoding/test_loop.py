"""The round loop with scripted fakes: the output is the target's, whatever the draft proposes."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coordinator.decoding.completion import Completion, Detokenizer, Limits, StopStrings
from coordinator.decoding.loop import generate
from coordinator.rejection import KEYED, Round
from coordinator.rejection.rules import greedy
from tandem.types import Acceptance, Proposal, SamplingParams, TokenRow, Verification
from tests.paths import DEMO_TARGET

TOKENIZER = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class ScriptedTarget:
    """Continues a fixed text."""

    says: list[int]

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        rows = range(completion.length, completion.length + len(proposal) + 1)
        return Verification(completion.length, tuple(TokenRow(self.says[i]) for i in rows))


@dataclass
class ScriptedDrafter:
    """Proposes the script's tokens round by round, then nothing."""

    script: list[list[int]]

    async def propose(self, completion: Completion) -> Proposal:
        tokens = self.script.pop(0) if self.script else []
        return Proposal(completion.length, tuple(tokens[: completion.room - 1]))


def accept(proposal: Proposal, verification: Verification) -> Acceptance:
    return greedy([Round(proposal, verification, GREEDY)], KEYED)[0]


token_ids = st.integers(1, 3)


@given(
    st.lists(token_ids, min_size=30, max_size=30),
    st.lists(st.lists(token_ids, max_size=6), max_size=12),
    st.integers(1, 20),
)
async def test_the_output_is_the_targets_whatever_is_proposed(
    says: list[int], script: list[list[int]], max_tokens: int
) -> None:
    limits, detokenizer = Limits(1000, max_tokens), Detokenizer(TOKENIZER)
    completion = Completion((says[0],), limits, detokenizer, StopStrings(()), request_id="r", seed=0)
    drafter, target = ScriptedDrafter(script), ScriptedTarget(says)
    chunks = [chunk async for chunk in generate(completion, drafter, target, accept)]
    assert completion.token_ids == says[: 1 + max_tokens]
    assert [token for chunk in chunks for token in chunk.token_ids] == says[1 : 1 + max_tokens]
