"""Mappings and transcripts over random texts and tokenizers of all kinds."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.model.types import Delta
from tandem.model.vocabulary import SAMPLE_TEXT, SharedVocabulary, Transcript, Vocabulary
from tests.unit.tandem.tiny_tokenizers import END, KINDS, byte_level, sentencepiece_bpe, tokenizer_of

PAIRS = [
    ("gpt2", "small"),
    ("small", "llama3"),
    ("llama3", "gemma"),
    ("gemma", "llama2"),
    ("unigram", "gpt2"),
]

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", " committee", " records", "\n", "\n\n    ", " = ", "):\n", "  ", " ", '{"id": 4']
        ),
        st.sampled_from(
            ["今天", "天气很好。", "👩🏽‍🚀", "é", "e\u0301", "\u3000", "\t", "\r\n", "\x00", "İ"]
        ),
        st.text(max_size=8),
        st.sampled_from(SAMPLE_TEXT),
    ),
    max_size=12,
).map("".join)
"""Names that people write, and names that nobody writes."""


@cache
def vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(kind))


@cache
def mapping(draft: str, target: str) -> SharedVocabulary:
    return SharedVocabulary(vocabulary(draft), vocabulary(target))


def text_of(own: Vocabulary, token_ids: list[int] | tuple[int, ...]) -> bytes:
    return b"".join(own.texts[token_id] for token_id in token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@settings(max_examples=30)
def test_the_texts_of_a_text_s_tokens_are_the_text(kind: str, text: str) -> None:
    own = vocabulary(kind)
    assert text_of(own, own.encode(text)) == text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_the_space_and_the_special_tokens_before_a_text_are_known(kind: str) -> None:
    whole = tokenizer_of(kind).encode("a b").ids
    own = vocabulary(kind)
    assert own.begins_with_space is (kind in ("gemma", "llama2", "unigram"))
    assert tuple(whole[: len(own.prefix)]) == own.prefix
    space = " " if own.begins_with_space else ""
    assert own.encode(space + "a b") == whole[len(own.prefix) :]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_shared_tokens_are_those_of_one_text(draft: str, target: str) -> None:
    shared = mapping(draft, target)
    pairs = [*zip(shared.draft_ids.tolist(), shared.target_ids.tolist(), strict=True)]
    for own, other in pairs:
        assert shared.draft.texts[own] == shared.target.texts[other] != b""
    for ids in zip(*pairs, strict=True):
        assert len({*ids}) == len(pairs)
    both = {*shared.draft.ids} & {*shared.target.ids}
    assert {shared.draft.texts[own] for own, _ in pairs} >= both
    assert {bytes((byte,)) for byte in range(256)} <= both
    assert shared.coverage.shared_tokens == len(pairs)
    assert 0.0 < shared.coverage.text_share <= 1.0


def test_a_vocabulary_with_itself_shares_all() -> None:
    shared = mapping("gpt2", "gpt2")
    assert shared.draft_ids.tolist() == shared.target_ids.tolist() == [*range(shared.draft.size)]
    assert shared.coverage.text_share == 1.0


@given(
    sizes=st.tuples(st.integers(270, 400), st.integers(330, 400)),
    texts=st.lists(TEXTS, min_size=1, max_size=4),
)
@settings(max_examples=5)
def test_tokenizers_trained_on_anything(sizes: tuple[int, int], texts: list[str]) -> None:
    own = byte_level(sizes[0], texts)
    other = sentencepiece_bpe(sizes[1], texts)
    shared = SharedVocabulary(Vocabulary(own), Vocabulary(other))
    for text in texts:
        transcript = Transcript(shared)
        transcript.apply(Delta(0, tuple(other.encode(text).ids)))
        # Sentencepiece's tokenizers do not tell a text from the same text behind a space.
        assert text_of(shared.draft, transcript.token_ids) == text.removeprefix(" ").encode()


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=20)
def test_a_transcript_depends_on_the_text_alone(draft: str, target: str, data: st.DataObject) -> None:
    """The draft's tokens are those of one delta, however the text was divided, and its deltas lead to them."""
    shared = mapping(draft, target)
    whole = tokenizer_of(target)
    transcript = Transcript(shared)
    seen = [*shared.draft.prefix]
    tokens = list[int]()
    for _ in range(data.draw(st.integers(1, 5))):
        base = data.draw(st.integers(0, len(tokens)))
        if data.draw(st.booleans()):
            new = whole.encode(data.draw(TEXTS), add_special_tokens=base == 0).ids
        else:
            new = data.draw(st.lists(st.integers(0, shared.target.size - 1), max_size=6))
        tokens[base:] = new
        delta = transcript.apply(Delta(base, tuple(new)))
        assert delta.base_length <= len(seen)
        seen[delta.base_length :] = delta.token_ids
        assert seen == transcript.token_ids
        once = Transcript(shared)
        once.apply(Delta(0, tuple(tokens)))
        assert once.token_ids == transcript.token_ids
        assert once.is_whole is transcript.is_whole
        assert transcript.length == len(tokens)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(text=TEXTS, cut=st.integers(0, 100))
@settings(max_examples=20)
def test_a_transcript_has_no_part_of_a_character(draft: str, target: str, text: str, cut: int) -> None:
    shared = mapping(draft, target)
    tokens = tokenizer_of(target).encode(text).ids[: cut or None]
    transcript = Transcript(shared)
    transcript.apply(Delta(0, tuple(tokens)))
    written = text_of(shared.target, tokens[len(shared.target.prefix) :])
    if shared.target.begins_with_space:
        written = written.removeprefix(b" ")
    read = written.decode(errors="ignore")
    own = transcript.token_ids
    assert tuple(own[: len(shared.draft.prefix)]) == shared.draft.prefix
    space = b" " if shared.draft.begins_with_space and read else b""
    assert text_of(shared.draft, own[len(shared.draft.prefix) :]) == space + read.encode()
    assert transcript.is_whole is (read.encode() == written)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
def test_a_transcript_of_usual_text_has_the_draft_s_own_tokens(draft: str, target: str) -> None:
    for text in SAMPLE_TEXT[:4]:
        transcript = Transcript(mapping(draft, target))
        transcript.apply(Delta(0, tuple(tokenizer_of(target).encode(text).ids)))
        assert transcript.token_ids == tokenizer_of(draft).encode(text).ids


def test_text_is_tokenized_anew_only_near_its_end() -> None:
    shared = mapping("gpt2", "small")
    transcript = Transcript(shared)
    tokens = vocabulary("small").encode(SAMPLE_TEXT[0] * 20)
    transcript.apply(Delta(0, tuple(tokens)))
    delta = transcript.apply(Delta(len(tokens), tuple(vocabulary("small").encode(" and"))))
    assert len(transcript.token_ids) - delta.base_length < 150


def test_special_tokens_keep_their_meaning() -> None:
    shared = mapping("gpt2", "llama3")
    end = shared.target.special_ids[END]
    own = shared.draft.special_ids[END]
    transcript = Transcript(shared)
    transcript.apply(Delta(0, (*shared.target.encode("one"), end, *shared.target.encode("two"))))
    assert transcript.token_ids == [*shared.draft.encode("one"), own, *shared.draft.encode("two")]
    assert shared.retokenize([*shared.draft.encode(" one"), own, 40]) == (*shared.target.encode(" one"), end)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(text=TEXTS)
@settings(max_examples=20)
def test_the_draft_s_text_is_the_same_in_the_target_s_tokens(draft: str, target: str, text: str) -> None:
    shared = mapping(draft, target)
    written = [i for i in shared.draft.encode(text) if i not in shared.draft.special_ids.values()]
    read = text_of(shared.draft, written).decode(errors="ignore")
    assert text_of(shared.target, shared.retokenize(written)) == read.encode()


def test_a_part_of_a_character_ends_what_the_draft_writes() -> None:
    shared = mapping("small", "gemma")
    written = shared.draft.encode("a👩")
    assert text_of(shared.target, shared.retokenize(written[:-1])) == b"a"
    assert shared.retokenize(written) == (*shared.target.encode("a👩"),)


def test_a_gap_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="starts at token 3, but the sequence has 0 tokens"):
        Transcript(mapping("gpt2", "gemma")).apply(Delta(3, (1,)))


def test_a_tokenizer_whose_text_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="decoder"):
        Vocabulary(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
