"""The nouns of speculative decoding.

Nothing here knows of gRPC or torch: `tandem.wire` is where these types meet protobuf.

None of them is changed once it is made, but statistics. Those that are made for each step of each sequence are not
frozen all the same, since a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.model.speculation_state import SpeculationState

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

MIN_TEMPERATURE = 1e-4
"""Lowest temperature above 0: a logit divided by less may exceed the range of binary32."""
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Bounds for the same reason."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for drawing tokens from logits: penalties, then temperature, then top-k, then top-p, then min-p.

    The order is that of the logits processors in Hugging Face transformers.
    """

    temperature: float = 1.0
    """Divides the logits. 0 is greedy, and the fields below have no effect."""
    top_k: int = 0
    """Keep only the highest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep only the smallest set of most probable tokens with at least this mass; 1 keeps all."""
    min_p: float = 0.0
    """Keep only tokens with at least this share of the highest probability; 0 keeps all."""
    seed: int = 0
    """Keys all randomness of the sequence, together with a position and a purpose. A signed 64-bit integer."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that occurred, in the prompt too, and multiplies the negative; 1 is off."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time that the completion holds it; 0 is off."""
    presence_penalty: float = 0.0
    """Taken off a token's logit once if the completion holds it; 0 is off."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """True if a token's logit depends on whether it occurred before."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def without_penalties(self) -> SamplingParams:
        return replace(self, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters that hold where a request names none. None: the value of `SamplingParams`, or no limit."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Maximum tokens of a completion, also where the request asks for more."""

    def __str__(self) -> str:
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{name} {value:g}" for name, value in named if value is not None) or "none"


MAX_LOGIT_BIAS = 100.0
"""OpenAI's bound, for both signs."""


@dataclass(frozen=True, slots=True)
class LogitAdjustments:
    """A request's changes to the target's logits, before penalties, temperature and truncation.

    The target applies them, so every kind of row describes the changed distribution, and acceptance is exact for it
    whatever the draft proposes.
    """

    biases: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these ids (OpenAI's `logit_bias`)."""
    min_tokens: int = 0
    """At positions before so many tokens of the completion, `suppressed_token_ids` have no probability (vLLM's)."""
    suppressed_token_ids: tuple[int, ...] = ()
    """The ids that would end the completion."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these ids have a probability; empty: all have (vLLM's)."""
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the completion does not hold: the last id of each has no probability where the others
    stand before it (vLLM's `bad_words`)."""

    def __bool__(self) -> bool:
        suppresses = self.min_tokens > 0 and bool(self.suppressed_token_ids)
        return bool(self.biases or self.allowed_token_ids or self.forbidden_sequences) or suppresses

    @property
    def reads_tokens(self) -> bool:
        """True if they depend on the tokens before a position."""
        return any(len(sequence) > 1 for sequence in self.forbidden_sequences)

    def leaves_no_token(self, vocabulary_size: int) -> bool:
        """True if a position may come at which no id has a probability."""
        taken = {sequence[-1] for sequence in self.forbidden_sequences}
        if self.min_tokens > 0:
            taken.update(self.suppressed_token_ids)
        if self.allowed_token_ids:
            return taken.issuperset(self.allowed_token_ids)
        return len(taken) >= vocabulary_size


class GrammarKind(Enum):
    """Notation of a grammar."""

    JSON_OBJECT = "json_object"
    """Any JSON object; the source is empty."""
    JSON_SCHEMA = "json_schema"
    """A JSON schema."""
    REGEX = "regex"
    """A regular expression for the whole text, in the syntax of Rust's regex crate."""
    CHOICE = "choice"
    """A JSON list of the texts to choose from."""
    GRAMMAR = "grammar"
    """A context-free grammar, in llama.cpp's notation (GBNF) or in Lark's."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that a completion may be.

    The target masks its logits with it, so every kind of row describes the masked distribution, and acceptance is exact
    for it whatever the draft proposes.
    """

    kind: GrammarKind
    source: str = ""
    think_start_token_id: int | None = None
    """With this token a completion may begin a span that is free up to `think_end_token_id`; None for no span."""
    think_end_token_id: int | None = None
    is_thinking: bool = False
    """True if the prompt ends within such a span."""


@dataclass(slots=True)
class Delta:
    """Sets the tail of a sequence: ``tokens[base_length:] = token_ids``."""

    base_length: int
    token_ids: Sequence[int]

    @property
    def length(self) -> int:
        return self.base_length + len(self.token_ids)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class RowKind(Enum):
    """Kind of row: how much of a distribution travels for one position."""

    TOKEN = "token"
    """One id: the argmax at temperature 0, else a sample made with the noise that both models share."""
    SUPPORT = "support"
    """Probabilities on a small support, and what exact rejection sampling needs to know of the rest."""
    DENSE = "dense"
    """Logits of the whole vocabulary."""


@dataclass(slots=True, eq=False)
class SparseDistribution:
    """Distribution that a proposed token was drawn from: probabilities of a few tokens that sum to one."""

    token_ids: IntArray
    """Distinct ids, shape [support_size]."""
    probs: FloatArray
    """Probabilities of `token_ids`, shape [support_size]."""


@dataclass(slots=True)
class StepCost:
    """Cost of the engine's steps behind an answer."""

    seconds: float
    sequences: int
    """Sequences that shared a step, this one included; the maximum over all steps."""
    tokens: int
    """Tokens of all sequences in all these steps."""


@dataclass(slots=True, eq=False)
class Proposal:
    """Tokens that the draft expects the target to produce next."""

    base_length: int
    """Length of the sequence that the proposal extends."""
    token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    """Distribution that each token was drawn from. Empty for a deterministic proposal, whose distributions are
    one-hot."""
    token_logits: Float32Array | None = None
    """Each token's logit before temperature, shape [K]. None unless the step requested it."""
    cost: StepCost | None = None

    def cut(self, count: int) -> Proposal:
        """The proposal's first `count` tokens, without a cost: a proposal of fewer tokens begins alike."""
        if count >= len(self.token_ids):
            return self
        logits = None if self.token_logits is None else self.token_logits[:count]
        tokens = self.token_ids[:count]
        distributions = self.distributions[:count]
        return Proposal(self.base_length, tokens, distributions, logits)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class TokenRow:
    """One token id of the target at a position."""

    token_id: int


@dataclass(frozen=True, slots=True, eq=False)
class RowStatistics:
    """Statistics of a whole row that its support does not contain."""

    entropy: float
    """Shannon entropy, in nats."""
    max_prob: float
    argmax_token_id: int
    """The token that has it; the lowest id among equals."""
    ranks: IntArray
    """For each id of the support, how many tokens are more probable; shape [support_size]."""
    logits: Float32Array
    """For each id of the support, its logit before temperature; shape [support_size]."""


@dataclass(slots=True, eq=False)
class SupportRow:
    """The target's distribution at a position, as far as exact rejection sampling needs it.

    Outside the draft's support the residual max(target - draft, 0) is the target's own distribution, so its mass and
    one sample of it suffice.
    """

    token_ids: IntArray
    """The requested support, shape [support_size]; empty for a position past the proposal."""
    probs: FloatArray
    """The target's probabilities there, shape [support_size]."""
    outside_mass: float
    outside_token_id: int
    """A sample of the target restricted to outside the support; -1 when there is no mass there."""
    statistics: RowStatistics | None = None
    """Set when the step requested it."""
    outside_prob: float | None = None
    """Probability of `outside_token_id`, 0 when there is none, if the step requested a sample with
    `RECOVERY` keys. None: it is a sample with `TARGET` keys."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseRow:
    """Logits of the target at a position, before temperature and truncation."""

    logits: Float32Array
    """Shape [vocabulary_size]."""


TargetRow = TokenRow | SupportRow | DenseRow


def own_token_ids(row: TargetRow) -> tuple[int, ...]:
    """The tokens that a row names: its token; or its support, then its token outside (-1 where there is none), and then
    its argmax where it has statistics."""
    if isinstance(row, TokenRow):
        return (row.token_id,)
    assert isinstance(row, SupportRow), "a dense row names no tokens"
    own = (*row.token_ids.tolist(), row.outside_token_id)
    return own if row.statistics is None else (*own, row.statistics.argmax_token_id)


@dataclass(slots=True)
class RowLogprobs:
    """Natural logarithms of a row's probabilities, before temperature and truncation."""

    top_token_ids: tuple[int, ...]
    """The most probable tokens, the most probable first."""
    top_logprobs: tuple[float, ...]
    token_logprobs: tuple[float, ...]
    """Of the token of a token row; of a support row's ids, and then of its token outside."""
    raw_logprobs: tuple[float, ...] = ()
    """Of the same tokens, and then of the row's argmax where it has statistics, by the model alone: before a request's
    adjustments, grammar and penalties as well. Empty where the sequence does not want them, and so are the next."""
    processed_logprobs: tuple[float, ...] = ()
    """The same by the distribution that the row describes."""


class GoesOn(NamedTuple):
    """A step that a target takes by itself."""

    delta: Delta
    """The token that ends the outcome, and the given proposal behind it."""
    own_tokens: int | None = None
    """Maximum tokens that the target's own head proposes behind them; None: what is proposed is given."""


class CacheCounts(NamedTuple):
    """The part that a target's KV cache has played for a sequence."""

    cached_tokens: int
    """Tokens of its first step that had been computed before, for a sequence of the same scope."""
    preemptions: int = 0
    """Number of times that it gave its room to another sequence, and was computed again."""


@dataclass(slots=True, eq=False)
class Verification:
    """The target's answer to a proposal: one row for each proposed token and one for the token after them."""

    base_length: int
    """Length of the sequence whose next token the first row describes."""
    rows: tuple[TargetRow, ...]
    """K + 1 rows, all of one kind."""
    cost: StepCost | None = None
    proposal: Proposal | None = None
    """The proposal that was verified, if the coordinator did not give it: the target took the step by itself, or its
    own head proposed."""
    goes_on: GoesOn | None = None
    """The step that the target takes by itself behind this one, as far as its lead allows. None: it takes none."""
    serial: int = 0
    """Serial of the step that was asked. The stream that sends a verification fills it in, and the next field."""
    led: int = 0
    """How many steps behind that one the target took this one by itself; 0 for the answer to the step."""
    cache: CacheCounts | None = None
    """Counts of the sequence so far; None where they have not changed, or the target does not say."""
    logprobs: tuple[RowLogprobs, ...] = ()
    """Those of each row, where the sequence wants them."""
    features: HiddenStates | None = None
    """The states that the sequence asked for, where they come with this verification; sent before it."""


class NextToken(Enum):
    """Origin of the token after the accepted run."""

    BONUS = "bonus"
    """Everything proposed was accepted; the target supplied one more."""
    RECOVERED = "recovered"
    """A proposed token was rejected; this one stands in its place."""
    NONE = "none"
    """The rule supplies no token here."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The part of a proposal that is kept."""

    accepted_count: int
    next_token_id: int
    """The token after them; -1 when `next_token` is NONE."""
    next_token: NextToken

    def kept(self, proposal: Proposal) -> tuple[int, ...]:
        """The tokens by which the sequence grows."""
        accepted = proposal.token_ids[: self.accepted_count]
        return accepted if self.next_token is NextToken.NONE else (*accepted, self.next_token_id)


MAX_LEAD = 8
MAX_BRANCHES = 64
MAX_AHEAD_TOKENS = 64
"""Bound of a budget's tokens for each branch."""


@dataclass(frozen=True, slots=True)
class AheadBudget:
    """Bounds of what a draft drafts ahead of one verification."""

    branch_count: int
    token_count: int


ENDED = -1
"""In the place of the next token of a drafted continuation: there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftedOutcomes:
    """One depth of the continuations of some outcomes, the likeliest outcome first.

    An outcome of a round is (a, t): the first a proposed tokens are accepted, and token t follows them.
    """

    base_length: int
    """Length of the sequence that the round's proposal extends."""
    depth: int
    """Number of tokens of each continuation that were pushed before."""
    token_ids: tuple[int, ...]
    """The next token of each continuation, `ENDED` where there is none; fewer where the last ones were given up."""
    accepted_counts: tuple[int, ...] = ()
    next_token_ids: tuple[int, ...] = ()
    """a and t of each outcome; given with the first depth only."""
    distributions: tuple[SparseDistribution, ...] = ()
    """Distribution that each of `token_ids` was drawn from; empty for deterministic proposals."""
    lead_token_ids: tuple[int, ...] = ()
    """Tokens of the first continuation behind this depth's, where the draft is ahead with it."""
    cost: StepCost | None = None


class VocabularyMapping(Enum):
    """How a draft proposes tokens of another tokenizer than its own; see `tandem.model.vocabulary`."""

    AUTO = "auto"
    """The one that fits the request."""
    TLI = "tli"
    """Token-level intersection: the draft draws among the tokens that both vocabularies have."""
    SLEM = "slem"
    """String-level exact match: the target's tokenizer splits the text that the draft has written."""


@dataclass(frozen=True, slots=True)
class TargetTokenizer:
    """The tokenizer of a target, for a draft with another one."""

    hash: str
    """See `ModelInfo.tokenizer_hash`."""
    vocabulary_size: int
    """The target's: no ids from here on are proposed."""
    content: bytes
    """tokenizer.json."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a completion of the target's."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The part of a draft's vocabulary that a target's covers."""

    shared_tokens: int
    draft_tokens: int
    target_tokens: int
    text_share: float
    """Share of the draft's tokens that both have in a sample of prose, code, JSON and several languages. It estimates
    the share of the draft's probability that token-level intersection keeps."""
    build_seconds: float = 0.0
    """How long the mapping took to build, once for each target."""
    token_seconds: float = 0.0
    """Seconds that it takes for each proposed token."""

    def __str__(self) -> str:
        return (
            f"the target has {self.shared_tokens:,} of the draft's {self.draft_tokens:,} tokens, "
            f"{self.text_share:.0%} of those in a sample text; it took {self.build_seconds:.1f} s to map and takes "
            f"{1e6 * self.token_seconds:.0f} us a proposed token"
        )


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Options with which a sequence opens on either service."""

    request_id: str
    sampling: SamplingParams
    max_length: int = 0
    """Maximum tokens of the sequence; 0 means the model's own maximum."""
    traceparent: str = ""
    client: str = ""
    """Whose sequence it is: clients share places fairly. Empty: not known."""
    scope: str = ""
    """The sequences with which it shares what services keep of texts: those of the same scope
    (`tandem.serving.scopes`). Empty: none."""
    prompt_length: int = 0
    """Length of the prompt, with which the sequence begins; a grammar is for the other tokens, and so are frequency and
    presence."""
    grammar: Grammar | None = None
    """The grammar of the completion; None for any text. A draft without a model need not heed it."""


@dataclass(frozen=True, slots=True)
class DraftOptions(SequenceOptions):
    """Options with which a sequence opens on a draft service."""

    row_kind: RowKind = RowKind.TOKEN
    """Kind of distribution that travels with each proposed token."""
    draft_top_k: int = 0
    """For RowKind.SUPPORT, how many of its most probable tokens the draft keeps; 0 means the service's default."""
    with_token_logits: bool = False
    ahead: AheadBudget | None = None
    """The largest budget that a step will grant; None where none does."""
    tokenizer_hash: str = ""
    """Tokenizer of the sequence's tokens; empty for the draft's own."""
    vocabulary_mapping: VocabularyMapping = VocabularyMapping.AUTO
    draft_support_mass: float = 0.0
    """Share of the probability of these tokens that the draft's distribution holds; 0 means the service's default."""
    noise_is_unknown: bool = False
    """True if the target draws with noise that the draft cannot compute, as an engine other than Tandem's does."""
    vocabulary_size: int = 0
    """Number of ids that the target has: no other is proposed. 0 means the draft's own."""


MAX_FEATURE_BYTES = 1 << 16
"""Maximum bytes of hidden states in a part of a message, unless a single position has more."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a drafting head on another device reads of some of the target's tokens."""

    head: str
    """Fingerprint of the head."""
    first_position: int
    dtype: str
    """As torch names it."""
    shape: tuple[int, int]
    """Positions, and numbers of each."""
    data: bytes
    layer_ids: tuple[int, ...] = ()
    """Layers that lie beside each other; empty where the states went through the head's first projection."""

    def parts(self) -> Iterator[HiddenStates]:
        """The same in parts for messages."""
        count, width = self.shape
        row_bytes = len(self.data) // count
        step = max(MAX_FEATURE_BYTES // row_bytes, 1)
        for start in range(0, count, step):
            end = min(start + step, count)
            data = self.data[start * row_bytes : end * row_bytes]
            shape = end - start, width
            yield HiddenStates(
                self.head, self.first_position + start, self.dtype, shape, data, self.layer_ids
            )


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Asks a target for the hidden states that a head apart reads."""

    head: str
    """Fingerprint of the head."""
    prompt_window: int | None = None
    """How many of the prompt's last tokens are wanted, besides the last one; None: all."""


@dataclass(frozen=True, slots=True)
class TargetOptions(SequenceOptions):
    """Options with which a sequence opens on a target service."""

    adjustments: LogitAdjustments = field(default_factory=LogitAdjustments)
    end_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence: behind one of them a target does not go on by itself."""
    acceptance: AcceptanceTerms | None = None
    """How the coordinator decides; None: the target does not go on behind a proposal of its own head's."""
    draft_top_k: int = 0
    """How many of its most probable tokens the target's own head keeps, where the rule reads what tokens were drawn
    from; 0 means the service's default."""
    logprobs: int | None = None
    """Number of most probable tokens whose log probabilities come with each row, beside those of its own tokens; None:
    no log probabilities. Dense rows have none beside them."""
    sampled_logprobs: bool = False
    """True if each row comes with the `raw_logprobs` and `processed_logprobs` of its own tokens. Dense rows have none
    beside them."""
    weights_fingerprint: str = ""
    """Of the weights that must compute the sequence; empty for any."""
    features: FeatureRequest | None = None
    """The hidden states that come with verifications; None: none."""

    @property
    def reads_tokens(self) -> bool:
        """True if rows depend on the tokens before them beyond what the model computes of those."""
        return self.sampling.penalizes or self.adjustments.reads_tokens


class AcceptanceTerms(NamedTuple):
    """An acceptance rule, as far as a target needs it to propose for it and to decide as it does."""

    name: str
    epsilon: float = 0.0
    """`typical_epsilon`."""
    delta: float = 0.0
    """`typical_delta`."""


class OwnHead(NamedTuple):
    """Stands for a proposal that the target's own head makes at the beginning of the step that verifies it."""

    max_tokens: int


TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""Upper ends of the buckets in which numbers of tokens are counted."""


@dataclass(frozen=True, slots=True)
class TokenHistogram:
    """Things, such as the steps of an engine, counted by their number of tokens."""

    upper_bounds: tuple[int, ...] = TOKEN_BOUNDS
    counts: tuple[int, ...] = (0,) * (len(TOKEN_BOUNDS) + 1)
    """Things in each bucket, and then those above the last bound."""
    token_sum: int = 0
    """Tokens of all of them."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts and present values of a service's engine, with the sequences of all its callers together. Counts begin
    again with the process, and with other weights."""

    kv_cache_tokens: int
    """Room of the KV cache."""
    reserved_tokens: int
    """Of it, the pages that open sequences hold."""
    page_tokens: int
    """Room of a page; 0 for a cache without pages."""
    reuses_prefixes: bool
    prefix_query_tokens: int
    """Count of the tokens that sequences looked up in the prefix cache."""
    prefix_hit_tokens: int
    """Count of those of them that it held."""
    step_tokens: TokenHistogram
    """Steps, by the tokens that they computed."""


@dataclass(frozen=True, slots=True)
class DraftLoad:
    """How busy a draft service is, with the sequences of all its callers."""

    sequences: int = 0
    waiting: int = 0
    """Sequences that wait for a place."""
    is_full: bool = False
    """True if a new sequence would wait for a place, unless its client has few."""
    wait_seconds: float = 0.0
    """Present wait of a step, beyond its own steps of the engine."""


@dataclass(slots=True)
class ProposeStep:
    """Changes a sequence on the draft and asks for a proposal."""

    delta: Delta
    token_count: int
    """Tokens to propose; 0 only computes the KV cache."""
    ahead: AheadBudget | None = None
    proposed_count: int = 0
    """Number of last tokens that are a proposal which is being verified."""

    @property
    def is_answered(self) -> bool:
        """True if the step has an answer of its own; otherwise it asks for outcomes alone."""
        return self.ahead is None or self.token_count > 0


class Lead(NamedTuple):
    """The permission of a target to go on by itself behind a step, with its limits; see `VerifyStep`."""

    credits: int = 0
    min_proposed: int = 0
    alone_after_miss: bool = False


NO_LEAD = Lead()


@dataclass(slots=True)
class VerifyStep:
    """Changes a sequence on the target and asks for rows at its last positions."""

    delta: Delta
    row_kind: RowKind
    row_count: int
    """Rows to answer with; the last one is for the token after the sequence's end."""
    supports: tuple[IntArray, ...] = ()
    """For RowKind.SUPPORT, the ids of each row's support; rows past the end of the list have an empty one."""
    with_statistics: bool = False
    lead: int = 0
    """How many further steps the target may take by itself, each with the outcome of the last one: the tokens of its
    proposal up to the first that differs from its token row, and the token of that row."""
    min_proposed: int = 0
    """The fewest proposed tokens with which it takes them, as long as there is room for so many; 0: also with none."""
    alone_after_miss: bool = False
    """True if it also takes one with none behind an outcome that the draft did not draft for."""
    serial: int = 0
    """Counts the steps of a sequence, from 1. A step with the serial of the last one is that step, asked again."""
    own_tokens: int | None = None
    """Maximum tokens that the target's own head proposes behind the delta: a row for each of them comes before the
    last. None: the proposal is given, at the end of the delta."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Says that a step which was asked again has arrived and is not answered yet."""

    serial: int
    is_waiting: bool
    """True if it waits for room that other sequences have, which may take as long as they do."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Ends a sequence as planned."""

    token_count: int
    """How many of the first tokens the coordinator kept."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a sequence at once."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Durations of steps, measured when the engine is warm."""

    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Median seconds by the number of sequences and the tokens of each. Sizes that the engine does not serve are
    missing, and so are those of a large model that would have delayed the start for long."""
    version: int = 0
    """Seconds since 1970 when it was last measured: a later profile replaces an earlier one."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model."""

    version: int
    """Counts the weights that a service was given: higher ones are newer."""
    fingerprint: str
    """Of the checkpoint's files: services with the same one compute alike."""
    continued_fingerprints: tuple[str, ...] = ()
    """Those of earlier weights whose unfinished sequences may go on with these."""

    def may_continue(self, fingerprint: str) -> bool:
        """True if a sequence that was begun with weights of this fingerprint may go on with these."""
        return fingerprint == self.fingerprint or fingerprint in self.continued_fingerprints


class InFlight(Enum):
    """The fate of open sequences when a service's weights change or it falls asleep."""

    FINISH = "finish"
    """They end with the old weights, while new ones wait."""
    ABORT = "abort"
    """They end at once. Their requests go on where the old weights serve, or end as well."""
    RESTART = "restart"
    """They end at once, and their requests go on behind their tokens with the new weights."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Information about the model that a service serves."""

    name: str
    architecture: str
    vocabulary_size: int
    tokenizer_hash: str
    max_length: int
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    service_version: str = ""
    parameter_count: int = 0
    tensor_parallel_size: int = 1
    """Devices that the model is split over."""
    drafting_method: str = ""
    """Method of a target's own head; empty without one."""
    step_profile: StepProfile = StepProfile()
    """Empty where the service does not measure them."""
    drafts_ahead: bool = False
    """True if a draft drafts ahead where a step grants a budget."""
    maps_vocabularies: bool = False
    """True if a draft can draft for targets with other tokenizers."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """The model's own, from its generation_config.json."""
    instance_id: str = ""
    """Names the service's process: after a restart it is another one. Empty where the service does not say."""
    rope: str = ""
    """The rotary embedding in words, the same for models that encode positions alike. Empty where it is not known."""
    trained_length: int = 0
    """Positions that the model's config names; 0 where it is not known."""
    head_step_profile: StepProfile = StepProfile()
    """Durations of the steps of a target's own head; empty without one."""
    weights: Weights | None = None
    """The weights that serve now; None where the service does not say, or has none."""
    features_head: str = ""
    """Fingerprint of a drafting head: a target sends what it reads, a draft reads that. Empty: none."""
    feature_window: int | None = None
    """How many of a prompt's last tokens a draft with such a head wants hidden states of; None: of all."""

    @property
    def has_model(self) -> bool:
        """False for a service that drafts without one, which has no vocabulary either."""
        return self.vocabulary_size > 0


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat."""

    role: str
    """Who says it, in the words of the model's template: system, user or assistant."""
    content: str


class TruncationSide(Enum):
    """End of a prompt at which tokens are left out."""

    LEFT = "left"
    """Its beginning: the last tokens are kept."""
    RIGHT = "right"
    """Its end."""


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
    presence_penalty: float | None = None
    """Penalties over the completion as OpenAI and vLLM define them; 0 is off."""
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
    """Return each token's log probability, and those of this many of the target's most probable tokens, 0 to 20. None:
    no log probabilities."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the target's logits of these ids, -100 to 100, as OpenAI defines it."""
    min_tokens: int = 0
    """Minimum tokens, as vLLM defines it: until then end-of-sequence and stop ids have no probability, and stop strings
    do not count."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the completion beside the model's end-of-sequence ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """The completion holds only tokens of these ids, as vLLM defines it; empty: of all."""
    bad_words: tuple[str, ...] = ()
    """The completion holds none of these texts as the tokenizer splits them, as vLLM defines it."""
    include_stop_str_in_output: bool = False
    """Let the text end with the stop string, or the stop token's text, that ended it."""
    max_tokens_must_fit: bool = False
    """Refuse a `max_tokens` that max_length leaves no room for; by default the completion ends earlier."""
    grammar: Grammar | None = None
    """The grammar of the completion, a JSON schema for instance; None for any text. Think spans are the coordinator's
    to fill in."""
    delivered_token_ids: tuple[int, ...] = ()
    """Tokens of the completion that an earlier stream, which broke, has delivered: it goes on after them."""
    echo: bool = False
    """Begin with a chunk of the prompt, with its log probabilities if any are asked for."""
    with_special_tokens: bool = False
    """Write special tokens into the text."""
    probabilities: bool = False
    """Return how probable draft and target found each token, where the rows of the acceptance rule say so."""
    cache_salt: str | None = None
    """Keeps the request apart from the caller's requests with another salt or none: they share no prefix cache and no
    earlier answers, as in vLLM. Up to 256 characters."""
    prompt_logprobs: int | None = None
    """Return the log probability of each token of the prompt, and those of this many of the target's most probable
    tokens there, 0 to 20."""
    truncate_prompt_tokens: int | None = None
    """Keep only so many tokens of a longer prompt; -1: as many as leave room for a token. As in vLLM."""
    truncation_side: TruncationSide = TruncationSide.LEFT
    """The end of the prompt at which tokens are left out."""
    priority: int = 0
    """Of the requests that wait for a place, those with a lower value go first, as in vLLM."""
    sampled_logprobs: bool = False
    """Return `raw_logprobs` and `processed_logprobs` of each token, as vLLM names them. Not with rows of kind dense."""


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
class LeadStats:
    """Counts of what targets did before they were asked."""

    rounds: int = 0
    """Rounds that a target had begun by itself."""
    wasted: int = 0
    """Rounds that targets had begun by themselves and that were not wanted; known once the request has ended."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of what speculation did, for one request or for many."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    positions: list[PositionStats] = field(default_factory=list)
    ahead: AheadStats = field(default_factory=AheadStats)
    lead: LeadStats = field(default_factory=LeadStats)
    forced: int = 0
    """Tokens that a grammar left no choice about, so that no model proposed them; none of `drafted` or `accepted`."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """How long the parts of a completion took."""

    queue_seconds: float
    """Waiting for a place among the running requests."""
    first_token_seconds: float | None
    """From its place to its first token; None where it has none."""
    generation_seconds: float
    """From its first token to its last."""


@dataclass(frozen=True, slots=True)
class Summary:
    """End of a completion, with its statistics."""

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
    sampling: SamplingParams | None = None
    """The parameters that its tokens were drawn with, the defaults filled in; None where the service did not report
    them."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the target had computed before, for an earlier request of this caller's; None where it
    does not say."""
    weights: tuple[Weights, ...] = ()
    """The target's weights that made it, in order; more than one where a load let it go on with others. None where the
    target does not say."""
    timing: RequestTiming | None = None
    """How long its parts took; None where the service did not report it."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the target's probabilities at a position, before temperature and truncation."""

    logprob: float
    """Log probability of the token at this position; NaN for a prompt's first token, which nothing precedes."""
    top_token_ids: tuple[int, ...] = ()
    """The most probable tokens, the most probable first; as many as were asked for and have a probability."""
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """The token's place among all, 1 for the most probable; 0 where it is not known."""


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
    draft_probs: tuple[float, ...] = ()
    target_probs: tuple[float, ...] = ()
    """For each token, when the request asked for them: its probability by either model, after temperature and
    truncation. NaN where it is not known."""
    raw_logprobs: tuple[float, ...] = ()
    """For each token, when the request asked for them: natural logarithm of its probability by the target's model
    alone, before biases, grammar, penalties, temperature and truncation."""
    processed_logprobs: tuple[float, ...] = ()
    """The same by the distribution that all these make of it, from which every lossless rule draws."""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """On the first chunks, when the request asked for them: tokens of the prompt, and their log probabilities."""

    @staticmethod
    def join(chunks: Sequence[Chunk]) -> Chunk:
        """One chunk with the text and the tokens of successive chunks. Only the last may have a summary."""
        lists = (
            "token_ids",
            "drafted",
            "text_lengths",
            "logprobs",
            "draft_probs",
            "target_probs",
            "raw_logprobs",
            "processed_logprobs",
            "prompt_token_ids",
            "prompt_logprobs",
        )
        together: dict[str, Any] = {
            name: tuple(chain.from_iterable([getattr(chunk, name) for chunk in chunks])) for name in lists
        }
        return Chunk(
            text="".join(chunk.text for chunk in chunks),
            summary=chunks[-1].summary,
            proposed=sum(chunk.proposed for chunk in chunks),
            drafted_ahead=any(chunk.drafted_ahead for chunk in chunks),
            **together,
        )


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request of a batch."""

    index: int
    """Names it in its result."""
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The end of one request of a batch."""

    index: int
    pieces: tuple[Chunk, ...]
    """The whole completion, the last piece with its summary; empty where it failed."""
    error: Exception | None = None
