"""A request for a completion, and the completion as it is streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem.speculation_state import SpeculationState
from tandem.types.rounds import RowKind


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    """Who says it, in the words of the model's template: system, user or assistant."""
    content: str


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt and how to complete it. None stands for the coordinator's default."""

    prompt: str | tuple[int, ...]
    """Text, or token ids of the target's vocabulary."""
    max_tokens: int | None = None
    """Maximum tokens to generate; by default as many as max_length leaves room for."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    """Penalty over prompt and completion as transformers defines it; 1 is off."""
    frequency_penalty: float | None = None
    """Penalty over the completion as OpenAI and vLLM define it; 0 is off."""
    presence_penalty: float | None = None
    """Penalty over the completion as OpenAI and vLLM define it; 0 is off."""
    seed: int | None = None
    """Makes the completion reproducible; by default drawn at random."""
    stop: tuple[str, ...] = ()
    """The completion ends before the first of these strings."""
    num_speculative_tokens: int | None = None
    """Tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Acceptance rule, in MAX's or vLLM's spelling."""
    speculation: bool = True
    """False: the target works alone, through the same path."""
    row_kind: RowKind | None = None
    """Rows that the target answers with; by default the cheapest that the acceptance rule allows."""
    ignore_eos: bool = False
    """Do not end the completion at the model's end-of-sequence ids."""
    logprobs: int | None = None
    """Return each token's log probability, and those of this many of the target's most probable tokens, 0 to 20.

    This needs dense rows, which hold the whole vocabulary for each position. None: no log probabilities.
    """
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the target's logits of these ids, -100 to 100, as OpenAI defines it."""
    min_tokens: int = 0
    """Minimum tokens, as vLLM defines it: until then end-of-sequence and stop ids have no probability, and stop strings
    do not count."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion beside the model's end-of-sequence ids."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string, or the stop token's text, that ended it."""
    max_tokens_must_fit: bool = False
    """Refuse a `max_tokens` that max_length leaves no room for; by default the completion ends earlier."""


class FinishReason(Enum):
    """Reason for which a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class PositionStats:
    """Counts of the tokens proposed at one position."""

    drafted: int = 0
    reached: int = 0
    """Those whose predecessors in the proposal were all accepted."""
    accepted: int = 0


@dataclass(slots=True)
class AheadStats:
    """Counts of what drafting ahead did."""

    awaited: int = 0
    """Rounds whose proposal was to be drafted during the verification before them."""
    hits: int = 0
    """The rounds among these that found their proposal, because the draft had drafted for the outcome."""
    hits_by_rank: list[int] = field(default_factory=list)
    """Hits of the outcome that the draft drafted for first, second, and so on. At most 16; `hits` counts all."""
    saved_seconds: float = 0.0
    """Usual time to wait for a proposal, added up over the hits."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of what speculation did, for one request or for many."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[PositionStats] = field(default_factory=list)
    ahead: AheadStats = field(default_factory=AheadStats)


@dataclass(frozen=True, slots=True)
class Summary:
    """How a completion ended, with its statistics."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationStats
    request_id: str
    seed: int
    speculation_state: SpeculationState | None = None
    """State at the end of the completion; None where the service did not report it."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it; None when it was an end-of-sequence id or a limit."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable the target finds the tokens at a position, before temperature and truncation: natural logarithms."""

    logprob: float
    """Log probability of the token at this position."""
    top_token_ids: tuple[int, ...] = ()
    """The most probable tokens, the most probable first; as many as were asked for."""
    top_logprobs: tuple[float, ...] = ()
    """Their log probabilities, in the same order."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a completion."""

    text: str
    """Text that became certain; never ends inside a character or inside a possible stop string."""
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """For each token, whether the draft proposed it and the target accepted it."""
    text_lengths: tuple[int, ...]
    """For each token, how many characters of the text it completed."""
    summary: Summary | None = None
    """Set on the last chunk."""
    proposed: int = 0
    """Number of tokens that the draft proposed for this chunk, accepted or not; over all rounds that it joins."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, when the request asked for them."""
    drafted_ahead: bool = False
    """True if the proposal was drafted during the verification before it, so that nobody waited for it. A chunk that
    joins rounds: true if one of them had such a proposal."""
