"""Drafting in another tokenizer's tokens: what is sent is exactly what was drawn from."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem.drafting.proposal import (
    Conclusion,
    Drafting,
    SharedTokens,
    propose_head,
    propose_where_logits_are,
)
from tandem.engine.core.jobs import Continue, Extended, Job
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError, InvalidRequestError, ServiceUnavailableError
from tandem.model.types import (
    Delta,
    DraftOptions,
    Grammar,
    GrammarKind,
    ModelInfo,
    Proposal,
    ProposeStep,
    RowKind,
    SamplingParams,
    TargetTokenizer,
    VocabularyMapping,
)
from tandem.model.vocabulary import Vocabulary, vocabulary_hash
from tandem_draft.proposers import DraftedSequence
from tandem_draft.proposers.mapped import MappedSequence
from tandem_draft.proposers.mapping import MAX_TARGETS, Vocabularies
from tandem_draft.proposers.sequence import StandaloneSequence
from tandem_draft.proposers.standalone import StandaloneProposer
from tests.paths import DEMO_TARGET, DEVICE
from tests.service.other_tokenizer import renumbered
from tests.unit.draft_service.test_ahead import (
    BUDGET,
    K,
    Round,
    assert_as_if_asked,
    outcomes_of,
    proposed,
    proposing,
)
from tests.unit.draft_service.test_standalone import SAMPLED, OtherProcess, job, logits_of, proposals
from tests.unit.tandem.tiny_tokenizers import END, content_of, tokenizer_of

SHARED_DRAFT = np.array([1, 4, 5, 9, 20, 33, 49])
SHARED_TARGET = np.array([70, 3, 5, 81, 2, 66, 0])
GREEDY = SamplingParams(temperature=0.0)


def shared_job(sampling: SamplingParams, kind: RowKind, *, count: int = 1) -> Job[Drafting]:
    made = job(sampling, kind, count=count, draft_top_k=5)
    made.payload.shared = SharedTokens(SHARED_DRAFT, SHARED_TARGET)
    return made


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_distribution_is_the_draft_s_own_restricted_and_normalised_anew(temperature: float) -> None:
    """Over all tokens: softmax over the whole vocabulary, the shared tokens' part of it, divided by its sum."""
    logits = logits_of(1).double()
    made = job(SamplingParams(temperature=temperature, seed=3), RowKind.SUPPORT, draft_top_k=50)
    made.payload.shared = SharedTokens(SHARED_DRAFT, SHARED_TARGET)
    (proposal,) = proposals([made], logits)
    (distribution,) = proposal.distributions
    whole = torch.softmax(logits[0] / temperature, dim=-1).numpy()
    # What travels is binary32, and the token is drawn from what travels.
    part = (whole[SHARED_DRAFT] / whole[SHARED_DRAFT].sum()).astype(np.float32).astype(np.float64)
    part /= part.sum()
    expected = dict(zip(SHARED_TARGET.tolist(), part.tolist(), strict=True))
    found = dict(zip(distribution.token_ids.tolist(), distribution.probs.tolist(), strict=True))
    assert found.keys() == expected.keys()
    for token_id, prob in found.items():
        assert prob == pytest.approx(expected[token_id], abs=1e-12)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert proposal.token_ids[0] in found


@pytest.mark.parametrize("kind", [RowKind.TOKEN, RowKind.SUPPORT])
def test_the_noise_is_that_of_the_target_s_ids(kind: RowKind) -> None:
    """A model with the target's ids draws the same tokens from the same logits, so `strict` loses nothing."""
    logits = logits_of(1)
    own = torch.full((1, 90), -torch.inf)
    own[0, SHARED_TARGET] = logits[0, SHARED_DRAFT]
    for seed in range(20):
        sampling = replace(SAMPLED, seed=seed)
        (mapped,) = proposals([shared_job(sampling, kind)], logits)
        (direct,) = proposals([job(sampling, kind, draft_top_k=5)], own)
        assert mapped.token_ids == direct.token_ids


def test_the_draft_goes_on_with_its_own_id() -> None:
    logits = logits_of(1)
    made = shared_job(GREEDY, RowKind.TOKEN, count=2)
    (outcome,) = propose_head([made], logits)
    assert isinstance(outcome, Continue)
    likeliest = int(logits[0, SHARED_DRAFT].argmax())
    assert outcome.token_id == SHARED_DRAFT[likeliest]
    assert made.payload.token_ids == [SHARED_TARGET[likeliest]]


def test_sequences_of_several_targets_share_a_step() -> None:
    def jobs() -> list[Job[Drafting]]:
        kinds = ((SAMPLED, RowKind.SUPPORT), (GREEDY, RowKind.TOKEN))
        return [make(*kind) for kind in kinds for make in (shared_job, job)]

    logits = logits_of(4)
    alone = [proposals([each], logits[i : i + 1])[0] for i, each in enumerate(jobs())]
    assert [each.token_ids for each in proposals(jobs(), logits)] == [each.token_ids for each in alone]


# ---- sequences


class Scripted(StandaloneSequence):
    """A draft that goes on with a text."""

    def __init__(self, own: Vocabulary, text: str, room: int = 1000) -> None:
        self._own = own
        self._room = room
        self.text = text
        self.token_ids: list[int] = []

    def room(self, length: int) -> int:
        return self._room - length + 1

    async def draw(
        self,
        delta: Delta,
        count: int,
        base_length: int | None = None,
        shared: SharedTokens | None = None,
        before: list[int] | None = None,
    ) -> Proposal:
        assert delta.base_length <= len(self.token_ids)
        assert base_length is not None
        self.token_ids[delta.base_length :] = delta.token_ids
        written = b"".join(map(self._own.text, self.token_ids)).decode()
        assert self.text.startswith(written)
        return Proposal(base_length, tuple(self._own.encode(self.text[len(written) :])[:count]))


TEXT = "The committee met 今天 in the spring, and 👩 said that its report was read by nobody at all."


def info(kind: str) -> ModelInfo:
    tokenizer = tokenizer_of(kind)
    return ModelInfo(kind, "", tokenizer.get_vocab_size(), vocabulary_hash(tokenizer), 64, "")


def sent(kind: str) -> TargetTokenizer:
    model = info(kind)
    return TargetTokenizer(model.tokenizer_hash, model.vocabulary_size, content_of(kind).encode())


@pytest.fixture
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    """Those of the draft `gpt2`."""
    path = tmp_path_factory.mktemp("draft") / "tokenizer.json"
    path.write_text(content_of("gpt2"))
    return Vocabularies(path, info("gpt2"))


def options(kind: str, mapping: VocabularyMapping = VocabularyMapping.SLEM) -> DraftOptions:
    return DraftOptions("r", GREEDY, tokenizer_hash=info(kind).tokenizer_hash, vocabulary_mapping=mapping)


async def scripted(
    vocabularies: Vocabularies, text: str = TEXT, kind: str = "small", room: int = 1000
) -> tuple[MappedSequence, Scripted, Vocabulary]:
    """A sequence for a target of this kind, the draft that writes the text, and the target's vocabulary."""
    await vocabularies.add(sent(kind))
    mapped, _ = vocabularies.mapped(options(kind))
    drafted = Scripted(mapped.vocabulary.draft, text, room)
    return MappedSequence(drafted, mapped), drafted, mapped.vocabulary.target


@pytest.mark.parametrize("kind", ["small", "llama3", "gemma", "llama2"])
async def test_a_draft_that_writes_the_targets_text_is_right(vocabularies: Vocabularies, kind: str) -> None:
    sequence, _, _ = await scripted(vocabularies, kind=kind)
    tokens = tokenizer_of(kind).encode(TEXT).ids
    known = 0
    accepted = 12
    rounds = 0
    proposed_count = 0
    while accepted < len(tokens):
        proposal = await proposed(sequence, ProposeStep(Delta(known, tokens[known:accepted]), 4))
        assert proposal.base_length == accepted
        assert len(proposal) <= 4
        following = tokens[accepted:]
        right = next(
            (i for i, (a, b) in enumerate(zip(proposal.token_ids, following, strict=False)) if a != b),
            len(proposal),
        )
        # Only the last token of a proposal may be cut short, where the draft's last token ends within it.
        assert right >= len(proposal) - 1
        rounds += 1
        proposed_count += len(proposal)
        known = accepted
        accepted += right + 1
    assert proposed_count > rounds, "the draft proposed next to nothing"


async def test_a_rollback_reaches_the_draft(vocabularies: Vocabularies) -> None:
    sequence, drafted, target = await scripted(vocabularies, TEXT[:17] + " something else", "llama3")
    tokens = target.encode(TEXT)
    begin = target.encode(TEXT[:17])
    await sequence.propose(ProposeStep(Delta(0, target.encode(drafted.text)), 1))
    drafted.text = TEXT
    await sequence.propose(ProposeStep(Delta(len(begin), tokens[len(begin) :]), 0))
    assert drafted.token_ids == tokenizer_of("gpt2").encode(TEXT).ids


async def test_nothing_is_proposed_within_a_character(vocabularies: Vocabularies) -> None:
    sequence, _, target = await scripted(vocabularies, "a👩 b")
    tokens = target.encode("a👩 b")
    for length in range(1, 6):
        proposal = await proposed(sequence, ProposeStep(Delta(length - 1, tokens[length - 1 : length]), 4))
        assert bool(len(proposal)) is (length in (1, 5))


async def test_nothing_is_proposed_behind_what_the_draft_can_read(vocabularies: Vocabularies) -> None:
    sequence, drafted, target = await scripted(vocabularies, room=20)
    tokens = target.encode(TEXT)
    longest = 0
    for length in range(1, len(tokens)):
        proposal = await proposed(sequence, ProposeStep(Delta(length - 1, tokens[length - 1 : length]), 4))
        assert not len(proposal) or len(drafted.token_ids) <= 20
        longest = max(longest, len(drafted.token_ids))
    assert longest == 20


@pytest.mark.parametrize(
    ("mapping", "temperature", "with_logits", "writes_text"),
    [
        (VocabularyMapping.AUTO, 0.0, False, True),
        (VocabularyMapping.AUTO, 0.7, False, False),
        (VocabularyMapping.AUTO, 0.0, True, False),
        (VocabularyMapping.TLI, 0.0, False, False),
        (VocabularyMapping.SLEM, 0.7, False, True),
        (VocabularyMapping.SLEM, 0.7, True, False),
    ],
)
async def test_how_a_request_is_drafted_for(
    vocabularies: Vocabularies,
    mapping: VocabularyMapping,
    temperature: float,
    with_logits: bool,
    writes_text: bool,
) -> None:
    await vocabularies.add(sent("small"))
    asked = replace(
        options("small", mapping),
        sampling=SamplingParams(temperature=temperature),
        row_kind=RowKind.SUPPORT,
        with_token_logits=with_logits,
    )
    mapped, own = vocabularies.mapped(asked)
    assert (mapped.tokens is None) is writes_text
    assert own.sampling.is_greedy is (writes_text or temperature == 0.0)


# ---- drafting ahead

CODE = "def fibonacci(n):\n    a, b = 0, 1\n    for"
AHEAD = {
    "tli greedy": (VocabularyMapping.TLI, GREEDY, RowKind.TOKEN),
    "slem greedy": (VocabularyMapping.SLEM, GREEDY, RowKind.TOKEN),
    "tli strict": (VocabularyMapping.TLI, SAMPLED, RowKind.TOKEN),
    "tli support": (VocabularyMapping.TLI, SAMPLED, RowKind.SUPPORT),
}


@pytest.fixture(scope="module")
def demo_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with 1200 of its tokens, under other ids."""
    return renumbered(tmp_path_factory.mktemp("draft"), 1200)


async def met(proposer: StandaloneProposer, options: DraftOptions) -> DraftOptions:
    """Send a draft the demo target's tokenizer; options of a sequence for that target."""
    content = (DEMO_TARGET / "tokenizer.json").read_bytes()
    tokenizer_hash = vocabulary_hash(Tokenizer.from_str(content.decode()))
    assert proposer.vocabularies is not None
    await proposer.vocabularies.add(TargetTokenizer(tokenizer_hash, 2048, content, (0,)))
    return replace(options, tokenizer_hash=tokenizer_hash)


@asynccontextmanager
async def demo(
    folder: Path, options: DraftOptions, *, keeps_logits: bool = False
) -> AsyncIterator[tuple[StandaloneProposer, DraftOptions]]:
    """The draft with other ids, and the options of sequences for the demo target."""
    model = load_model(folder, device=DEVICE, dtype="float32", threads=1)

    def head(ready: Sequence[Job[Drafting]], logits: Tensor) -> Sequence[Conclusion | Extended]:
        if keeps_logits:
            return propose_where_logits_are(ready, OtherProcess(logits))
        return propose_head(ready, logits)

    known = Vocabularies(folder / "tokenizer.json", model.info)
    async with proposing(model, head=head, vocabularies=known) as proposer:
        yield proposer, await met(proposer, options)


async def drafted_for(sequence: DraftedSequence, *, is_whole: bool) -> Round:
    """The tokens drafted ahead of a verification: all of them, or those that come without a pause."""
    columns = [await outcomes_of(sequence)]
    with suppress(TimeoutError):
        while len(columns) < K:
            columns.append(await asyncio.wait_for(outcomes_of(sequence), 60.0 if is_whole else 1.0))
    assert [each.depth for each in columns] == [*range(len(columns))]
    return Round(tuple(columns))


def asked(how: str, **options: Any) -> DraftOptions:
    """Options of a sequence that is drafted ahead for."""
    mapping, sampling, kind = AHEAD[how]
    options.setdefault("scope", "a scope")  # over vLLM a sequence without one has no branches
    return DraftOptions("r", sampling, row_kind=kind, ahead=BUDGET, vocabulary_mapping=mapping, **options)


async def assert_ahead_is_what_would_be_proposed(proposer: StandaloneProposer, options: DraftOptions) -> None:
    """After an answer, a hit and a miss."""
    target = Vocabulary(Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")))
    async with proposer.sequence(options) as sequence:
        tokens = target.encode(CODE)
        drafted = list[int]()
        hits = 0
        step = ProposeStep(Delta(0, tuple(tokens)), K, BUDGET)
        for number in range(4):
            answer = await sequence.propose(step)
            drafted = drafted if answer is None else [*answer.token_ids]
            writes_text = options.vocabulary_mapping is VocabularyMapping.SLEM
            found = await drafted_for(sequence, is_whole=not writes_text)
            await assert_as_if_asked(
                proposer,
                options,
                (*tokens, *drafted),
                found,
                count=len(drafted),
                may_be_shorter=writes_text,  # a text may have become fewer of the target's tokens than that
            )
            rank = max(range(len(found.outcomes)), key=lambda rank: len(found.tokens(rank)))
            if number % 3 == 2:  # a miss
                accepted = 0
                token_id = target.encode(" x")[0]
                continuation = list[int]()
            else:
                (accepted, token_id) = found.outcomes[rank]
                continuation = [*found.tokens(rank)]
                hits += 1
            base = len(tokens)
            new = [*drafted[:accepted], token_id, *continuation]
            tokens = [*tokens, *drafted[:accepted], token_id]
            drafted = continuation
            if continuation:
                step = ProposeStep(Delta(base, tuple(new)), 0, BUDGET, len(continuation))
            else:
                step = ProposeStep(Delta(base, tuple(new)), K, BUDGET)
    assert hits >= 3


@pytest.mark.parametrize("how", AHEAD)
async def test_what_is_drafted_ahead_is_what_would_be_proposed(demo_draft: Path, how: str) -> None:
    """So the text of a seed does not depend on which proposals came in time."""
    async with demo(demo_draft, asked(how)) as (proposer, options):
        await assert_ahead_is_what_would_be_proposed(proposer, options)


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize("how", AHEAD)
async def test_proposals_hold_to_the_target_s_grammar(demo_draft: Path, how: str, keeps_logits: bool) -> None:
    """Asked for or drafted ahead; a text that is written freely ends where the grammar forbids it. Also where
    tokens are drawn by a worker, which has no grammar."""
    target = Vocabulary(Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")))
    prompt = target.encode("x = [")
    grammar = Grammar(GrammarKind.REGEX, r"[0-9]+(, [0-9]+)*")
    own = asked(how, prompt_length=len(prompt), grammar=grammar)
    async with (
        demo(demo_draft, own, keeps_logits=keeps_logits) as (proposer, options),
        proposer.sequence(options) as sequence,
    ):
        tokens = [*prompt, *target.encode("1")]
        answer = await proposed(sequence, ProposeStep(Delta(0, tuple(tokens)), K, BUDGET))
        written = [[*answer.token_ids]]
        if own.vocabulary_mapping is VocabularyMapping.TLI:
            assert len(answer) == K
            found = await drafted_for(sequence, is_whole=True)
            written += [
                [*answer.token_ids[:accepted], token_id, *found.tokens(rank)]
                for rank, (accepted, token_id) in enumerate(found.outcomes)
            ]
    for token_ids in written:
        text = b"".join(map(target.text, token_ids)).decode().partition(END)[0]
        assert re.fullmatch(r"1[0-9]*(, [0-9]+)*,? ?", "1" + text), text


# ---- tokenizers of targets


async def test_the_tokenizers_of_the_last_targets_are_kept(vocabularies: Vocabularies) -> None:
    await vocabularies.add(sent("small"))
    known = vocabularies.coverage(info("small").tokenizer_hash)
    assert known is not None
    assert 256 <= known.shared_tokens <= known.draft_tokens
    for i in range(MAX_TARGETS):
        tokenizer = tokenizer_of("small")
        tokenizer.add_tokens([f"<target {i}>"])
        own = TargetTokenizer(vocabulary_hash(tokenizer), 400, tokenizer.to_str().encode())
        await vocabularies.add(own)
    assert vocabularies.coverage(info("small").tokenizer_hash) is None
    with pytest.raises(ServiceUnavailableError, match="is not known; it has to be sent first"):
        vocabularies.mapped(options("small"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "not a tokenizer that can be read"),
        (content_of("llama3").encode(), "sent as .* but its hash is"),
        (
            b'{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}',
            "sent as",
        ),
    ],
)
async def test_a_wrong_tokenizer_is_refused(vocabularies: Vocabularies, content: bytes, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        await vocabularies.add(replace(sent("small"), content=content))


async def test_an_answered_proposal_is_no_part_of_the_sequence(vocabularies: Vocabularies) -> None:
    """Also where outcomes of its verification are drafted ahead: what was kept of it has to be sent."""
    sequence, _, target = await scripted(vocabularies)
    tokens = target.encode(TEXT)
    answer = await proposed(sequence, ProposeStep(Delta(0, tuple(tokens[:5])), 4, BUDGET))
    assert len(answer) > 1
    with pytest.raises(InvalidRequestError, match="starts at token 6, but the sequence has 5"):
        await sequence.propose(ProposeStep(Delta(6, tuple(tokens[6:7])), 4, BUDGET))
