"""One completion as it grows: its committed tokens, the room that is left, and how it ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from coordinator.decoding.detokenization import Detokenizer, StopStrings
from coordinator.stats.speculation import record_round
from tandem.types import Acceptance, Chunk, FinishReason, NextToken, Proposal, SpeculationStats, Summary


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits at which a completion ends."""

    max_length: int
    """Maximum tokens of prompt and completion together."""
    max_tokens: int
    """Maximum tokens of the completion."""
    eos_token_ids: Collection[int] = ()
    """The model's ids that end it."""
    stop_token_ids: Collection[int] = ()
    """The request's ids that end it."""
    min_tokens: int = 0
    """Before so many tokens, only a limit ends the completion."""


class Completion:
    """The tokens of one request, from its prompt on."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        limits: Limits,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        *,
        request_id: str,
        seed: int,
    ) -> None:
        self.token_ids = list(prompt)
        """Prompt and committed tokens."""
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self._prompt_length = len(prompt)
        self._limits = limits
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._request_id = request_id
        self._seed = seed
        self._stop_reason: str | int | None = None

    @property
    def length(self) -> int:
        """Number of tokens, prompt included."""
        return len(self.token_ids)

    @property
    def room(self) -> int:
        """Number of tokens that may still be committed."""
        generated = self.length - self._prompt_length
        return min(self._limits.max_length - self.length, self._limits.max_tokens - generated)

    @property
    def has_begun(self) -> bool:
        """True if any token was committed."""
        return len(self.token_ids) > self._prompt_length

    @property
    def can_extend(self) -> bool:
        """True if another token may follow."""
        return self.finish_reason is None

    def extend(self, proposal: Proposal, acceptance: Acceptance) -> Chunk:
        """Commit the accepted tokens up to the completion's end, and drop those past it."""
        tokens = list(_kept(proposal, acceptance))
        texts: list[str] = []
        for token_id, _ in tokens:
            texts.append(self._commit(token_id))
            if self.finish_reason is not None:
                break
        drafted = tuple(was_drafted for _, was_drafted in tokens[: len(texts)])
        record_round(self.stats, drafted=len(proposal), accepted=sum(drafted))
        if self.finish_reason is not None:
            texts[-1] += self._remaining_text()
        chunk = Chunk(
            text="".join(texts),
            token_ids=tuple(token_id for token_id, _ in tokens[: len(texts)]),
            drafted=drafted,
            text_lengths=tuple(map(len, texts)),
            proposed=len(proposal),
            drafted_ahead=proposal.outcome_rank is not None,
        )
        return (
            chunk if self.finish_reason is None else replace(chunk, summary=self._summary(self.finish_reason))
        )

    def _commit(self, token_id: int) -> str:
        self.token_ids.append(token_id)
        if self.length - self._prompt_length <= self._limits.min_tokens:
            text = self._detokenizer.push(token_id)
        elif token_id in self._limits.eos_token_ids or token_id in self._limits.stop_token_ids:
            text = self._end_with(token_id)
        else:
            text = self._stop_strings.push(self._detokenizer.push(token_id))
            if self._stop_strings.met:
                self._stop(self._stop_strings.found)
        if self.finish_reason is None and self.room <= 0:
            self.finish_reason = FinishReason.LENGTH
        return text

    def _end_with(self, token_id: int) -> str:
        """End the completion with a token that ends it. A stop string that is included ends with that token's text."""
        self._stop(None if token_id in self._limits.eos_token_ids else token_id)
        return (
            self._stop_strings.push(self._detokenizer.push(token_id)) if self._stop_strings.included else ""
        )

    def _stop(self, reason: str | int | None) -> None:
        self.finish_reason, self._stop_reason = FinishReason.STOP, reason

    def _remaining_text(self) -> str:
        if self._stop_strings.met:
            return ""
        return self._stop_strings.push(self._detokenizer.finish()) + self._stop_strings.finish()

    def _summary(self, finish_reason: FinishReason) -> Summary:
        return Summary(
            finish_reason=finish_reason,
            prompt_tokens=self._prompt_length,
            completion_tokens=self.length - self._prompt_length,
            speculation=self.stats,
            request_id=self._request_id,
            seed=self._seed,
            stop_reason=self._stop_reason,
        )


def _kept(proposal: Proposal, acceptance: Acceptance) -> Iterator[tuple[int, bool]]:
    """The tokens that the rule keeps, each with whether the draft proposed it."""
    for token_id in proposal.token_ids[: acceptance.accepted_count]:
        yield token_id, True
    if acceptance.next_token is not NextToken.NONE:
        yield acceptance.next_token_id, False
