"""One completion as it grows: its committed tokens, their text, the room that is left, and how it ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field, replace
from operator import itemgetter

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tandem.errors import InvalidRequestError, ProtocolError
from tandem.model.grammar import GrammarState
from tandem.model.types import Acceptance, Chunk, FinishReason, Grammar, Proposal, SpeculationStats, Summary
from tandem_coordinator.parsers.forms import REASONING_FORMS

# Decoders write this for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text incrementally. Bytes of an unfinished character wait for the ids that finish it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._waiting.append(token_id)
            return ""
        self._waiting.clear()
        return text

    def show_prompt(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token of a prompt completes. Special tokens are shown, except for those that the tokenizer
        itself puts before every text."""
        added = self._tokenizer.encode("").ids
        has_added = [*token_ids[: len(added)]] == added
        first = len(added) if has_added and len(added) < len(token_ids) else 0
        shown = Detokenizer(self._tokenizer, skip_special_tokens=False)
        texts = [""] * first + [shown.push(token_id) for token_id in token_ids[first:]]
        texts[-1] += shown.finish()
        return texts

    def finish(self) -> str:
        """Text of the ids that still wait, without bytes that never became a character."""
        text: str = self._tokenizer.decode(self._waiting, skip_special_tokens=self._skips)
        self._waiting.clear()
        return text.rstrip(_REPLACEMENT)


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back text that may begin one."""

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        """Look for these strings. With `included`, the text ends after the stop string, otherwise before it."""
        self.stop = stop
        self.included = included
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to be part of the completion."""
        if not self.stop:
            return text
        text = self._held + text
        starts = [(start, string) for string in self.stop if (start := text.find(string)) >= 0]
        if starts:
            # Of two that begin together, the one that the request named first.
            start, self.found = min(starts, key=itemgetter(0))
            self._held = ""
            return text[: start + len(self.found) * self.included]
        held = max((_overlap(text, string) for string in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        text = self._held
        self._held = ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without being all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


class ThinkSpans:
    """Follows one completion through its think spans."""

    def __init__(self, start_id: int, end_id: int) -> None:
        self._start_id = start_id
        self._end_id = end_id
        self._followed = 0
        self._is_inside = False

    def inside(self, committed: Sequence[int], proposed: Sequence[int]) -> list[bool]:
        """For each proposed token, whether it lies inside a think span. The marker that ends a span belongs to it.

        Of the committed tokens, prompt included, the call reads only those added since the last one.
        """
        for token_id in committed[self._followed :]:
            self._is_inside = self._after(self._is_inside, token_id)
        self._followed = len(committed)
        states = [self._is_inside]
        for token_id in proposed[:-1]:
            states.append(self._after(states[-1], token_id))
        return states[: len(proposed)]

    def before(self, grammar: Grammar, prompt: Sequence[int]) -> Grammar:
        """The grammar with a span in which the completion is free before it: the one that the prompt has begun, or one
        that the completion may begin. A prompt that has just ended a span wants no other."""
        last = next(
            (token_id for token_id in reversed(prompt) if token_id in (self._start_id, self._end_id)), None
        )
        # Last tokens of a prompt, in which templates write an empty think span where no thought is wanted
        if self._end_id in prompt[-8:] and last == self._end_id:
            return grammar
        return replace(
            grammar,
            think_start_token_id=self._start_id,
            think_end_token_id=self._end_id,
            is_thinking=last == self._start_id,
        )

    def _after(self, is_inside: bool, token_id: int) -> bool:
        return token_id != self._end_id and (is_inside or token_id == self._start_id)


def think_spans(tokenizer: Tokenizer) -> ThinkSpans | None:
    """Spans between marks of reasoning that are tokens of this tokenizer; None when it has no such tokens."""
    for form in REASONING_FORMS:
        for start, end in zip(form.starts, form.ends, strict=True):
            start_id = tokenizer.token_to_id(start)
            end_id = tokenizer.token_to_id(end)
            if start_id is not None and end_id is not None:
                return ThinkSpans(start_id, end_id)
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits at which a completion ends."""

    max_length: int
    """Maximum tokens of prompt and completion together."""
    max_tokens: int
    eos_token_ids: Collection[int] = ()
    """The model's ids that end it."""
    stop_token_ids: Collection[int] = ()
    """The request's ids that end it."""
    min_tokens: int = 0
    """Before so many tokens, only a limit ends the completion."""


@dataclass(eq=False)
class Completion:
    """The tokens of one request, from its prompt on."""

    prompt: InitVar[tuple[int, ...]]
    _limits: Limits
    _detokenizer: Detokenizer
    _stop_strings: StopStrings
    _request_id: str
    _seed: int
    grammar: GrammarState | None = None
    max_forced: int = 0
    """Most tokens that are proposed because the grammar lets nothing else follow."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    _stop_reason: str | int | None = field(default=None, init=False)

    def __post_init__(self, prompt: tuple[int, ...]) -> None:
        self.token_ids = list(prompt)
        """Prompt and committed tokens."""
        self._prompt_length = len(prompt)
        limits = self._limits
        self._end_token_ids = frozenset((*limits.eos_token_ids, *limits.stop_token_ids))
        self.room = min(limits.max_length - len(prompt), limits.max_tokens)
        """Number of tokens that may still be committed."""
        self._room_of_first_end = self.room - limits.min_tokens
        """With less room than this, tokens and stop strings may end it."""

    def go_on_after(self, token_ids: Sequence[int]) -> None:
        """Commit tokens that an earlier stream has delivered, with their text."""
        self._commit_up_to_end(token_ids)
        if self.finish_reason is not None:
            raise InvalidRequestError("delivered_token_ids end the completion; nothing is left to generate")

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return len(self.token_ids)

    @property
    def has_begun(self) -> bool:
        return len(self.token_ids) > self._prompt_length

    @property
    def can_extend(self) -> bool:
        return self.finish_reason is None

    def forced(self) -> Proposal | None:
        """A proposal of the tokens that the grammar forces, which no model needs to be asked for; None if it leaves a
        choice."""
        if self.grammar is None or self.room <= 1:
            return None
        tokens = self.grammar.forced(min(self.max_forced, self.room - 1))
        return Proposal(self.length, tuple(tokens)) if tokens else None

    def echoed(self) -> Chunk:
        """The prompt as a chunk, which is the last one where the completion may have no token."""
        texts = self._detokenizer.show_prompt(self.token_ids)
        if self.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        return Chunk(
            text="".join(texts),
            token_ids=tuple(self.token_ids),
            drafted=(False,) * len(texts),
            text_lengths=tuple(map(len, texts)),
            summary=None if self.finish_reason is None else self._summary(self.finish_reason),
        )

    def possible(self, proposal: Proposal) -> Proposal:
        """The proposal, cut before a token that the grammar forbids, which would be rejected, and all behind it.

        One that was drawn from distributions stays as it is: the recovered token makes up for what they give to
        forbidden tokens.
        """
        if self.grammar is None or proposal.distributions:
            return proposal
        count = self.grammar.allowed_count(proposal.token_ids)
        return proposal if count == len(proposal) else proposal.cut(count)

    def extend(
        self, proposal: Proposal, acceptance: Acceptance, *, ahead: bool = False, is_forced: bool = False
    ) -> Chunk:
        """Commit the accepted tokens up to the completion's end, and drop those past it.

        Args:
            proposal: What was verified.
            acceptance: The part of it that is kept.
            ahead: True if it was drafted ahead.
            is_forced: True if the grammar forced it, so that no draft proposed it.
        """
        token_ids = acceptance.kept(proposal)
        if self._may_end(token_ids):
            texts = self._commit_up_to_end(token_ids)
        else:
            self.token_ids += token_ids
            self.room -= len(token_ids)
            texts = list(map(self._detokenizer.push, token_ids))
        count = len(texts)
        proposed = 0 if is_forced else len(proposal.token_ids)
        accepted = min(acceptance.accepted_count, proposed, count)
        return Chunk(
            text="".join(texts),
            token_ids=token_ids[:count],
            drafted=(True,) * accepted + (False,) * (count - accepted),
            text_lengths=tuple(map(len, texts)),
            summary=None if self.finish_reason is None else self._summary(self.finish_reason),
            proposed=proposed,
            drafted_ahead=ahead,
        )

    def _may_end(self, token_ids: Sequence[int]) -> bool:
        """False if none of these tokens can end it, as is the case in nearly every round."""
        is_plain = len(token_ids) < self.room and not self._stop_strings.stop and self.grammar is None
        return not (is_plain and self._end_token_ids.isdisjoint(token_ids))

    def _commit_up_to_end(self, token_ids: Sequence[int]) -> list[str]:
        texts = []
        for token_id in token_ids:
            texts.append(self._commit(token_id))
            if self.finish_reason is not None:
                texts[-1] += self._remaining_text()
                break
        return texts

    def _commit(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        self.room -= 1
        if self.room >= self._room_of_first_end:
            text = self._detokenizer.push(token_id)
        elif token_id in self._end_token_ids:
            text = self._end_with(token_id)
        else:
            text = self._stop_strings.push(self._detokenizer.push(token_id))
            if self._stop_strings.found is not None:
                self._stop(self._stop_strings.found)
        if self.grammar is not None:
            self._constrain(self.grammar, token_id)
        if self.room <= 0 and self.finish_reason is None:
            self.finish_reason = FinishReason.LENGTH
        return text

    def check_grammar(self, proposed: Sequence[int]) -> None:
        """Raise an InvalidRequestError where the grammar is beyond the limits at a token of this proposal or behind it,
        as a target has said."""
        if self.grammar is not None:
            completed = self.token_ids[self._prompt_length :]
            self.grammar.masks(completed, proposed)
            self.grammar.follow(completed)

    def _constrain(self, grammar: GrammarState, token_id: int) -> None:
        """Check a token that was committed, and end the completion where the grammar lets nothing follow."""
        if not grammar.follow(self.token_ids[self._prompt_length :]):
            raise ProtocolError(
                f"target service: its token id {token_id} is forbidden by the request's grammar"
            )
        if grammar.is_over and self.finish_reason is None:
            self._stop(None)

    def _end_with(self, token_id: int) -> str:
        """End the completion with a token that ends it. A stop string that is included ends with that token's text."""
        self._stop(None if token_id in self._limits.eos_token_ids else token_id)
        return (
            self._stop_strings.push(self._detokenizer.push(token_id)) if self._stop_strings.included else ""
        )

    def _stop(self, reason: str | int | None) -> None:
        self.finish_reason = FinishReason.STOP
        self._stop_reason = reason

    def _remaining_text(self) -> str:
        if self._stop_strings.found is not None:
            return ""
        return self._stop_strings.push(self._detokenizer.finish()) + self._stop_strings.finish()

    def _summary(self, finish_reason: FinishReason) -> Summary:
        return Summary(
            finish_reason=finish_reason,
            prompt_tokens=self._prompt_length,
            completion_tokens=self.length - self._prompt_length,
            speculation=SpeculationStats(),  # filled in by who counts the rounds
            request_id=self._request_id,
            seed=self._seed,
            stop_reason=self._stop_reason,
        )
