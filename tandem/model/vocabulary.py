"""Two tokenizers, side by side: what text each id stands for, and which ids mean the same.

A draft with another tokenizer than its target's can propose in two ways, both lossless (Timor et al. 2025,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv
2502.05202):

- *token-level intersection* (their Algorithm 4): the draft draws among the tokens that both vocabularies have,
- *string-level exact match* (their Algorithm 2): the target's tokenizer splits the text that the draft has written.

Either way the draft reads the sequence so far in its own tokens (`Transcript`). Text is bytes here, since a token may
hold a part of a character.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.model.grammar import known_tokens
from tandem.model.types import Coverage, Delta, IntArray


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """SHA-256, in hexadecimal, of the mapping from token to id, added tokens included (`ModelInfo.tokenizer_hash`)."""
    digest = hashlib.sha256()
    pairs = tokenizer.get_vocab(with_added_tokens=True).items()
    for token, token_id in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{token_id}\t{json.dumps(token)}\n".encode())
    return digest.hexdigest()


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SEGMENT = re.compile(r".{64,255}?(?:(?<=\S)(?= \S)|(?<=\w)(?=\n))|.{1,256}", re.DOTALL)
"""A segment of a transcript, tokenized by itself: it ends before a word, where no tokenizer that splits text into words
has a token across, so segments give the tokens of the whole. A text without such places, such as Chinese, is cut after
256 characters. Cutting at each word would take 13 us for each."""
_LOOKAHEAD_BYTES = 5
"""The end of a segment depends on two characters behind it: a space or newline, and one of up to four bytes."""


class Vocabulary:
    """A tokenizer, as the texts that its ids stand for."""

    def __init__(self, tokenizer: Tokenizer, model_size: int | None = None, owner: str = "the") -> None:
        """Read a tokenizer. It must not be used otherwise, since it tokenizes parts of texts from here on. Ids from
        `model_size` on are unknown to the model; `owner` is for the error: the draft's or the target's."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        size = (1 << 31) if model_size is None else model_size
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i < size}
        pieces = {piece: i for piece, i in tokenizer.get_vocab(with_added_tokens=True).items() if i < size}
        self._tokenizer = tokenizer
        self._has_unknown = len(pieces) < tokenizer.get_vocab_size(with_added_tokens=True)
        self.prefix: tuple[int, ...] = tuple(tokenizer.encode("").ids)
        """Special tokens that it puts before each text."""
        self.size = max(pieces.values(), default=-1) + 1
        """One more than the highest id."""
        self.texts: list[bytes] = [b""] * self.size
        """The text of each id, by id; for a special token its name, which a tokenizer takes for the token."""
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        """Ids that end a text or say who speaks, by name."""
        self._byte_ids: list[int] = []
        """Ids that stand for a byte where no other token has it."""
        try:
            known = known_tokens(tokenizer.to_str(), slices=[])
        except ValueError as error:
            raise ConfigurationError(
                f"{owner} tokenizer cannot be mapped; it must be byte-level or of sentencepiece's kind: {error}"
            ) from None
        for piece, i in pieces.items():
            # The library begins marks of its own with this byte
            self.texts[i] = known.decode_bytes([i]) or b"\xff"
            if _BYTE_TOKEN.fullmatch(piece) and len(self.texts[i]) == 1:
                self._byte_ids.append(i)
        for i, token in added.items():
            self.texts[i] = token.content.encode()
        self.begins_with_space = self._text_of(tokenizer.encode("a", add_special_tokens=False).ids) == b" a"
        """True if it puts a space before each text."""
        self._forget_prefix()

    def _forget_prefix(self) -> None:
        if self._tokenizer.normalizer is not None:
            steps = [step for step in steps_of(self._tokenizer.normalizer) if step["type"] != "Prepend"]
            self._tokenizer.normalizer = _restore(normalizers.Sequence([]), "normalizers", steps)
        if self._tokenizer.pre_tokenizer is not None:
            steps = [
                {**step, **_NO_PREFIX.get(step["type"], {})}
                for step in steps_of(self._tokenizer.pre_tokenizer)
            ]
            self._tokenizer.pre_tokenizer = _restore(pre_tokenizers.Sequence([]), "pretokenizers", steps)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """An id for each text that some token stands for, special tokens aside."""
        found: dict[bytes, int] = {}
        special = set(self.special_ids.values())
        byte_ids = set(self._byte_ids)
        for i in (*(i for i in range(self.size) if i not in byte_ids), *self._byte_ids):
            if self.texts[i] and i not in special:
                found.setdefault(self.texts[i], i)
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a part of a text, with nothing put before."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [token_id for token_id in ids if token_id < self.size] if self._has_unknown else ids

    def text(self, token_id: int) -> bytes:
        """The text of an id; empty for one that the tokenizer does not know."""
        return self.texts[token_id] if 0 <= token_id < self.size else b""

    def _text_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self.text(token_id) for token_id in token_ids])


_NO_PREFIX: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer as tokenizer.json describes them, those of sequences one after the other."""
    waiting: list[dict[str, Any]] = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        if step["type"] != "Sequence":
            yield step
            continue
        (inner,) = (value for value in step.values() if isinstance(value, list))
        waiting[:0] = inner


def _restore(component: Any, inner: str, steps: Sequence[dict[str, Any]]) -> Any:
    """A sequence of steps, from what tokenizer.json would say of them."""
    component.__setstate__(json.dumps({"type": "Sequence", inner: [*steps]}).encode())
    return component


class SharedVocabulary:
    """Tokens that a draft's vocabulary and a target's have in common."""

    def __init__(self, draft: Vocabulary, target: Vocabulary) -> None:
        self.draft = draft
        self.target = target
        pairs = [(own, target.ids[text]) for text, own in draft.ids.items() if text in target.ids]
        shared_names = draft.special_ids.keys() & target.special_ids.keys()
        pairs += [(draft.special_ids[name], target.special_ids[name]) for name in shared_names]
        shared = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        self.draft_ids: IntArray = shared[:, 0].copy()
        """The draft's ids of tokens that the target has too, ascending; shape [S]."""
        self.target_ids: IntArray = shared[:, 1].copy()
        """The target's ids of the same tokens, all of them distinct; shape [S]."""
        self._special_ids = frozenset(draft.special_ids.values())
        self._first_ids: dict[int, int | None] = {}

    @cached_property
    def coverage(self) -> Coverage:
        draft_ids = {*self.draft_ids.tolist()}
        tokens = [token_id for text in SAMPLE_TEXT for token_id in self.draft.encode(text)]
        return Coverage(
            len(draft_ids),
            self.draft.size,
            self.target.size,
            sum(token_id in draft_ids for token_id in tokens) / max(len(tokens), 1),
        )

    def seconds_per_token(self) -> float:
        """Time what is done for a proposed token, in rounds of four over a sample text."""
        tokens = [token_id for text in SAMPLE_TEXT for token_id in self.target.encode(text)]
        transcript = Transcript(self)
        places = range(0, len(tokens), 4)
        began = time.perf_counter()
        for base in places:
            transcript.apply(Delta(base, tuple(tokens[base : base + 4])))
            self.retokenize(transcript.token_ids[-4:])
        return (time.perf_counter() - began) / max(4 * len(places), 1)

    def retokenize(self, draft_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The target's tokens for what the draft has written, up to its first special token or part of a character.

        Of a special token that the target has too, the target's own comes last.
        """
        end = next((i for i, token_id in enumerate(draft_token_ids) if token_id in self._special_ids), None)
        written = b"".join([self.draft.text(token_id) for token_id in draft_token_ids[:end]])
        try:
            text = written.decode()
            cut = False
        except UnicodeDecodeError as error:
            text = written[: error.start].decode()
            cut = True
        found = self.target.encode(text)
        if end is not None and not cut and (own := self.shared_id(draft_token_ids[end])) is not None:
            found.append(own)
        return tuple(found)

    def shared_id(self, draft_token_id: int) -> int | None:
        """The target's id of a token of the draft's; None where it has no such token."""
        at = int(np.searchsorted(self.draft_ids, draft_token_id))
        is_shared = at < len(self.draft_ids) and self.draft_ids[at] == draft_token_id
        return int(self.target_ids[at]) if is_shared else None

    def first_id(self, draft_token_id: int) -> int | None:
        """The target's first token of what one of the draft's says; None where that is no whole character."""
        if draft_token_id not in self._first_ids:
            said = self.retokenize([draft_token_id])
            self._first_ids[draft_token_id] = said[0] if said else None
        return self._first_ids[draft_token_id]


class Transcript:
    """A target's sequence in the draft's tokens.

    The draft's tokens are a function of the text alone, however many deltas brought it, so proposals do not depend on
    how the sequence grew. A character that is not whole yet is left out.
    """

    def __init__(self, mapping: SharedVocabulary) -> None:
        self._draft = mapping.draft
        self._target = mapping.target
        self._text = bytearray()
        self._prefix_length = 0
        """The first tokens, which the target's tokenizer puts before each text."""
        self._ends = array("q")
        """Bytes of the text up to each of the target's tokens, that one included."""
        self._starts = [0]
        """Where the segments begin, in bytes."""
        self._counts = [len(self._draft.prefix)]
        """The draft's tokens before each segment."""
        self.token_ids: list[int] = [*self._draft.prefix]
        """The draft's tokens."""
        self.is_whole = True
        """False while the text ends within a character."""

    @property
    def length(self) -> int:
        """Number of the target's tokens."""
        return len(self._ends)

    def apply(self, delta: Delta) -> Delta:
        """Apply a delta of the target's tokens; the delta of the draft's tokens that follows from it."""
        if not 0 <= delta.base_length <= self.length:
            raise InvalidRequestError(
                f"the delta starts at token {delta.base_length}, but the sequence has {self.length} tokens; "
                "send the missing ones from base_length 0"
            )
        del self._ends[delta.base_length :]
        self._prefix_length = min(self._prefix_length, delta.base_length)
        kept_bytes = self._ends[-1] if self._ends else 0
        del self._text[kept_bytes:]
        for token_id in delta.token_ids:
            self._text += self._text_of(token_id)
            self._ends.append(len(self._text))
        while len(self._starts) > 1 and self._starts[-1] + _LOOKAHEAD_BYTES > kept_bytes:
            self._starts.pop()
            self._counts.pop()
        start = self._starts.pop()
        kept = self._counts.pop()
        del self.token_ids[kept:]
        self.is_whole, found = _tokenize(self._draft, bytes(self._text[start:]), start)
        for begin, tokens in found:
            self._starts.append(begin)
            self._counts.append(len(self.token_ids))
            self.token_ids += tokens
        return Delta(kept, tuple(self.token_ids[kept:]))

    @property
    def end(self) -> TranscriptEnd:
        """The end of the text, as far as tokens that follow may change how it is tokenized."""
        index = len(self._starts) - 1
        while index and self._starts[index] + _LOOKAHEAD_BYTES > len(self._text):
            index -= 1
        start = self._starts[index]
        return TranscriptEnd(self._draft, start, bytes(self._text[start:]), self._counts[index])

    def _text_of(self, token_id: int) -> bytes:
        position = len(self._ends)
        text = self._target.text(token_id)
        if position != self._prefix_length:
            return text
        if self._target.prefix[position : position + 1] == (token_id,):
            self._prefix_length += 1
            return b""
        return text.removeprefix(b" ") if self._target.begins_with_space else text


@dataclass(frozen=True, slots=True)
class TranscriptEnd:
    """The last segment of a transcript, to see what tokens it has with other text behind it."""

    _draft: Vocabulary
    _start: int
    _text: bytes
    count: int
    """The draft's tokens before the segment."""

    def tokens(self, more: bytes) -> list[int] | None:
        """The draft's tokens of the segment and this text; None if the text ends within a character."""
        is_whole, found = _tokenize(self._draft, self._text + more, self._start)
        return [token_id for _, tokens in found for token_id in tokens] if is_whole else None


def _tokenize(draft: Vocabulary, text: bytes, start: int) -> tuple[bool, list[tuple[int, list[int]]]]:
    """The segments of a text that begins so many bytes behind the whole's begin, one at least: where each begins, and
    its tokens. A part of a character at the end is left out; False if there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    found = []
    for segment in _SEGMENT.findall(decoder.decode(text)) or [""]:
        content = segment.encode("utf-8", "surrogateescape")
        space = " " if start == 0 and content and draft.begins_with_space else ""
        # A byte that begins no character, which sampling may produce, becomes U+FFFD.
        found.append((start, draft.encode(space + content.decode("utf-8", "replace"))))
        start += len(content)
    return not decoder.getstate()[0], found


SAMPLE_TEXT = (
    "The committee met twice in the spring of 1987, and its report, which ran to four hundred pages, was read by "
    'almost nobody. "I don\'t think it matters," she said, "as long as we keep the records." Prices rose by 3.5%.',
    'def fibonacci(n: int) -> int:\n    """Return the n-th number."""\n    a, b = 0, 1\n    for _ in range(n):\n'
    '        a, b = b, a + b\n    return a\n\n\nif __name__ == "__main__":\n    print(fibonacci(20))',
    '{"id": 4711, "name": "Ada Lovelace", "tags": ["math", "engine"], "address": {"city": "London", "zip": null}}',
    "Die Sitzung begann um zehn Uhr. Nous sommes arrivés hier soir. La reunión terminó sin acuerdo.",
    "今天天气很好。我们去公园散步。東京は日本の首都です。",
)
"""A sample for `Coverage`: what servers of language models are asked for most."""
