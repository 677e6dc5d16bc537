"""A draft model's proposal in the making."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.core.jobs import Continue, Done, Extended, Failed, Job, non_finite
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.rows import (
    TORCH_SAMPLER,
    HostArray,
    Sampler,
    apply_masks,
    apply_penalties,
    parameters_for,
    to_device,
    to_host,
)
from tandem.errors import InvalidRequestError
from tandem.model.grammar import GrammarState, MaskArray
from tandem.model.sampling.noise import Purpose, stream_key
from tandem.model.types import (
    DraftOptions,
    FloatArray,
    IntArray,
    Proposal,
    RowKind,
    SamplingParams,
    SparseDistribution,
)

Conclusion = Done[Proposal] | Failed | Continue


def check_room(cached: CachedSequence, length: int, token_count: int) -> None:
    """Refuse a proposal of more tokens than fit behind the first `length` ones, before any of them is drawn."""
    room = cached.max_length - length + 1  # the draft does not read the last token
    if token_count > max(room, 0):
        raise InvalidRequestError(
            f"{token_count} tokens were asked for after {length}, but the sequence's limit is {cached.max_length}"
        )


def with_defaults(options: DraftOptions, top_k: int, support_mass: float) -> DraftOptions:
    """The options with a service's `draft_top_k` and `draft_support_mass` where they leave these to it."""
    return replace(
        options,
        draft_top_k=options.draft_top_k or top_k,
        draft_support_mass=options.draft_support_mass or support_mass,
    )


def known_to_target(logits: Tensor, vocabulary_size: int) -> Tensor:
    """The logits of the ids that the target has, so many: the draft may have more rows than the tokenizer has ids.
    0: all."""
    if not 0 < vocabulary_size < logits.shape[-1]:
        return logits
    return logits[..., :vocabulary_size].contiguous()


class SharedTokens:
    """The tokens that a draft and a target with other ids have in common (token-level intersection)."""

    def __init__(self, draft_ids: IntArray, target_ids: IntArray) -> None:
        """Ids of the same tokens, shape [S] both."""
        self.draft_host_ids = draft_ids
        self.target_host_ids = target_ids
        self.draft_ids = torch.from_numpy(draft_ids)
        self.target_ids = torch.from_numpy(target_ids)

    def restrict(self, logits: Tensor) -> Tensor:
        """The logits of these tokens alone, [R, S]: their softmax is the draft's distribution restricted to them and
        normalised anew."""
        if self.draft_ids.device != logits.device:
            self.draft_ids, self.target_ids = to_device(
                [self.draft_host_ids, self.target_host_ids], logits.device
            )
        return logits.index_select(-1, self.draft_ids)

    @cached_property
    def columns(self) -> dict[int, int]:
        """The column of each of the target's ids in `restrict`."""
        return {token_id: i for i, token_id in enumerate(self.target_host_ids.tolist())}


@dataclass(slots=True)
class Drafting:
    """A proposal in the making."""

    base_length: int
    """Length of the sequence, in the target's tokens."""
    token_count: int
    options: DraftOptions
    """With the service's defaults; see `with_defaults`."""
    grammar: GrammarState | None = None
    """The grammar of the completion; proposals hold to it, so that they are accepted as often as without. It stays
    in the process that has the sequence."""
    mask: MaskArray | None = None
    """The grammar's, of the next token, for a process without the grammar."""
    before: list[int] | None = None
    """The completion's tokens before the proposal, for the grammar; set with the first row at the latest."""
    context: list[int] | None = None
    """All of the sequence's tokens before the proposal, for its penalties; set with the first row at the latest. None
    where nothing is penalized."""
    shared: SharedTokens | None = None
    """The tokens to draw among where draft and target have other ids; None: all, and ids are the same."""
    token_ids: list[int] = field(default_factory=list)
    """Ids of the target's."""
    last_read: int = -1
    """The draft's own id of the last of them."""
    distributions: list[SparseDistribution] = field(default_factory=list)
    token_logits: list[float] = field(default_factory=list)
    is_cut: bool = False
    """True if the grammar leaves no token that the draft knows: a head may know a part of the vocabulary."""

    def key(self, further: int) -> int:
        """Key of the noise of the token so many positions behind the next one: the target's own key where the draft
        should anticipate the target's sample."""
        seed = self.options.sampling.seed
        position = self.base_length + len(self.token_ids) + further
        if self.options.row_kind is RowKind.TOKEN:
            return stream_key(seed, position, Purpose.TARGET)
        return stream_key(seed, position, Purpose.PROPOSAL, self.base_length)

    @property
    def is_free(self) -> bool:
        """True if its next token needs nothing that the host knows: neither a grammar nor counts of tokens."""
        return self.grammar is None and self.mask is None and not self.options.sampling.penalizes

    def outcome(self) -> Conclusion:
        if len(self.token_ids) < self.token_count and not self.is_cut:
            return Continue(self.last_read)
        logits = np.array(self.token_logits, dtype=np.float32) if self.options.with_token_logits else None
        return Done(Proposal(self.base_length, tuple(self.token_ids), tuple(self.distributions), logits))

    def truncate_sampling(self, candidate_count: int) -> SamplingParams:
        """The request's sampling parameters with the draft's own limit, for so many tokens.

        A top-k that keeps all of them is left out.
        """
        sampling = self.options.sampling
        most = self.options.draft_top_k
        top_k = min(sampling.top_k or most, most)
        if top_k >= candidate_count:
            top_k = 0
        return SamplingParams(sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed)


def propose_head(
    ready: Sequence[Job[Drafting]], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Conclusion]:
    """Head of the draft's engine: each row of logits becomes one more token of a proposal."""
    return extend_drafts(_with_tokens(ready), logits, sampler)


class LogitsElsewhere(Protocol):
    """Logits that another engine's workers keep, and may go on from (`tandem.engine_vllm.engine.RemoteLogits`)."""

    def room(self, sequence: CachedSequence) -> int:
        """Tokens behind the sequence's last one that the workers can run by themselves."""

    def draft(
        self, begin: Callable[[Any, Tensor, Sequence[int]], TokenDraws], payload: Any, counts: Sequence[int]
    ) -> list[Drawn]:
        """Draw so many tokens behind each row, where the logits are, and run all but the last through the model."""


def propose_where_logits_are(ready: Sequence[Job[Drafting]], logits: Any) -> list[Conclusion | Extended]:
    """See `propose_head`, for `LogitsElsewhere`: as many tokens of each proposal as can be drawn without the host."""
    own = [
        drafting
        if drafting.grammar is None
        else replace(drafting, grammar=None, before=None, mask=_mask(drafting))
        for drafting in _with_tokens(ready)
    ]
    counts = [_count_free(job, drafting, logits) for job, drafting in zip(ready, own, strict=True)]
    outcomes: list[Conclusion | Extended] = []
    for job, drawn in zip(ready, logits.draft(TokenDraws, own, counts), strict=True):
        job.payload = replace(
            drawn.drafting, grammar=job.payload.grammar, before=job.payload.before, mask=None
        )
        outcomes.append(Extended(drawn.read_ids, drawn.outcome) if drawn.read_ids else drawn.outcome)
    return outcomes


def _count_free(job: Job[Drafting], drafting: Drafting, logits: LogitsElsewhere) -> int:
    """Number of tokens of a proposal that can be drawn in a row: all that it lacks, where there is room."""
    lacking = drafting.token_count - len(drafting.token_ids)
    return min(lacking, 1 + logits.room(job.sequence)) if drafting.is_free and lacking > 1 else 1


def _with_tokens(ready: Sequence[Job[Drafting]]) -> list[Drafting]:
    for job in ready:
        drafting = job.payload
        if drafting.grammar is not None and drafting.before is None:
            tokens = job.sequence.token_ids
            drafting.before = tokens[drafting.options.prompt_length : drafting.base_length]
        if drafting.options.sampling.penalizes and drafting.context is None:
            drafting.context = job.sequence.token_ids[: drafting.base_length]
    return [job.payload for job in ready]


def extend_drafts(
    draftings: Sequence[Drafting], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Conclusion]:
    """Draw one more token for each proposal, from logits [len(draftings), vocabulary_size]."""
    draws = TokenDraws(draftings, logits, sampler=sampler)
    draws.draw(logits)
    return [drawn.outcome for drawn in draws.read()]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A proposal behind tokens that were drawn in a row."""

    drafting: Drafting
    """The proposal, which may be a copy: it may have been in another process."""
    outcome: Conclusion
    read_ids: tuple[int, ...]
    """The draft's own ids of all of these tokens but the last: the model has read them."""


class TokenDraws:
    """Draws tokens for some proposals where their logits are, position by position. The host waits once, to read them
    all."""

    def __init__(
        self,
        draftings: Sequence[Drafting],
        like: Tensor,
        counts: Sequence[int] | None = None,
        sampler: Sampler = TORCH_SAMPLER,
    ) -> None:
        """
        Args:
            like: Logits with the vocabulary and the device of those that are to come.
            counts: How many tokens are drawn for each; None: one. More than one only where the next token needs nothing
                that the host knows (`Drafting.is_free`).
        """
        self._draftings = draftings
        self._counts = [1] * len(draftings) if counts is None else counts
        self._sampler = sampler
        vocabularies: dict[tuple[int, int], list[int]] = {}
        for i, drafting in enumerate(draftings):
            vocabulary = id(drafting.shared), drafting.options.vocabulary_size
            vocabularies.setdefault(vocabulary, []).append(i)
        depth_count = max(self._counts, default=0)
        self._parts = [
            _Vocabulary(own, [draftings[i] for i in own], like, depth_count) for own in vocabularies.values()
        ]
        arrays = [array for part in self._parts for array in part.inputs(like.device)]
        given = iter(to_device(arrays, like.device))
        for part in self._parts:
            part.take_inputs(given)
        self._launched: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token of each proposal from logits [len(draftings), vocabulary_size], without waiting for the
        device; the draft's own ids of them, int64 [len(draftings)], -1 where logits are not finite."""
        if len(self._parts) == 1:
            (part,) = self._parts
            ids, launched = part.launch(logits, self._sampler)
            self._launched += launched
            return ids
        found = logits.new_empty(len(self._draftings), dtype=torch.int64)
        for part in self._parts:
            ids, launched = part.launch(logits[part.places], self._sampler)
            self._launched += launched
            found[part.places] = ids
        return found

    def read(self) -> list[Drawn]:
        """Bring what was drawn to the host, and extend the proposals by it."""
        found = iter(to_host(self._launched))
        read_ids: list[list[int]] = [[] for _ in self._draftings]
        outcomes: list[Conclusion | None] = [None] * len(self._draftings)
        for depth in range(max(self._counts, default=0)):
            for part in self._parts:
                wanted = [
                    depth < self._counts[i] and (depth == 0 or isinstance(outcomes[i], Continue))
                    for i in part.rows
                ]
                for i, outcome in zip(part.rows, part.read(found, wanted), strict=True):
                    if outcome is None:
                        continue
                    before = outcomes[i]
                    if isinstance(before, Continue):
                        read_ids[i].append(before.token_id)
                    outcomes[i] = outcome
        return [
            Drawn(drafting, outcome, tuple(ids))
            for drafting, outcome, ids in zip(self._draftings, outcomes, read_ids, strict=True)
            if outcome is not None
        ]


class _Vocabulary:
    """Proposals whose logits have the same columns."""

    def __init__(
        self, rows: Sequence[int], draftings: Sequence[Drafting], like: Tensor, depth_count: int
    ) -> None:
        """`rows` are those of the proposals among all of a step."""
        self.rows = list(rows)
        self._draftings = draftings
        self._shared = draftings[0].shared
        self._depth = 0
        self._wants_logits = any(drafting.options.with_token_logits for drafting in draftings)
        width = draftings[0].options.vocabulary_size or like.shape[-1]
        if self._shared is not None:
            width = len(self._shared.draft_ids)
        column_count = min(width, like.shape[-1])
        everyone = list(range(len(draftings)))
        ways: list[_Greedy]
        if all(drafting.options.sampling.is_greedy for drafting in draftings):
            ways = [_Greedy(everyone, draftings, depth_count, column_count)]
        else:
            sparse = [i for i in everyone if draftings[i].options.row_kind is RowKind.SUPPORT]
            full = [i for i in everyone if draftings[i].options.row_kind is not RowKind.SUPPORT]
            ways = []
            if sparse:
                ways.append(_Sparse(sparse, draftings, depth_count, column_count))
            if full:
                ways.append(_Full(full, draftings, depth_count, column_count))
        self._ways = ways
        self._logits: tuple[Tensor, Tensor] | None = None
        """The last ones, before and after grammars."""

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Numbers that are needed on the device, for all positions."""
        own = np.array(self.rows, dtype=np.int64)
        return [own, *(array for way in self._ways for array in way.inputs(device))]

    def take_inputs(self, given: Iterator[Tensor]) -> None:
        """Take them from there, in the same order."""
        self.places = next(given)
        for way in self._ways:
            way.take_inputs(given)

    def launch(self, logits: Tensor, sampler: Sampler) -> tuple[Tensor, list[Tensor]]:
        """The draft's own ids of the next tokens, and what the host reads."""
        shared = self._shared
        unmasked = known_to_target(logits, self._draftings[0].options.vocabulary_size)
        own = unmasked if shared is None else shared.restrict(unmasked)
        own = _apply_grammars(self._draftings, own, shared)
        own = _apply_penalties(self._draftings, own)
        self._logits = unmasked, own
        ids = None if shared is None else shared.target_ids
        launched = [
            way.launch(own if len(self._ways) == 1 else own[way.places], self._depth, sampler, ids)
            for way in self._ways
        ]
        self._depth += 1
        columns = launched[0][0]
        if len(self._ways) > 1:
            columns = columns.new_empty(len(self._draftings))
            for way, (own_columns, *_) in zip(self._ways, launched, strict=True):
                columns[way.places] = own_columns
        some = columns.clamp(min=0)
        chosen = [own.gather(1, some[:, None])[:, 0].float()] if self._wants_logits else []
        tensors = [columns, *chosen, *(each for _, *rest in launched for each in rest)]
        if shared is None:
            return columns, tensors
        return torch.where(columns < 0, columns, shared.draft_ids[some]), tensors

    def read(self, found: Iterator[HostArray], wanted: Sequence[bool]) -> list[Conclusion | None]:
        """Extend the wanted ones of the proposals by their tokens at the next position."""
        columns: list[int] = next(found).tolist()
        chosen = next(found).tolist() if self._wants_logits else [0.0] * len(columns)
        for way in self._ways:
            own = [wanted[i] and columns[i] >= 0 for i in way.rows]
            way.record(found, own)
        return [
            self._extend(i, column, logit) if is_wanted else None
            for i, (column, logit, is_wanted) in enumerate(zip(columns, chosen, wanted, strict=True))
        ]

    def _extend(self, row: int, column: int, logit: float) -> Conclusion:
        """Extend a proposal by the token of this column; -1 stands for logits that are not finite."""
        drafting = self._draftings[row]
        if column < 0:
            drafting.is_cut = self._is_cut(row)
            if drafting.is_cut:
                return drafting.outcome()
            return non_finite(drafting.base_length + len(drafting.token_ids))
        shared = drafting.shared
        drafting.token_ids.append(column if shared is None else int(shared.target_host_ids[column]))
        drafting.last_read = column if shared is None else int(shared.draft_host_ids[column])
        if drafting.options.with_token_logits:
            drafting.token_logits.append(logit)
        return drafting.outcome()

    def _is_cut(self, row: int) -> bool:
        """True if a grammar leaves no token that the draft knows, although its logits are good."""
        drafting = self._draftings[row]
        if (drafting.grammar is None and drafting.mask is None) or self._logits is None:
            return False
        unmasked, own = (logits[row] for logits in self._logits)
        return bool(unmasked.isfinite().any() and not unmasked.isnan().any() and (own == -torch.inf).all())


class _Greedy:
    """Takes the most probable tokens."""

    def __init__(
        self, rows: Sequence[int], draftings: Sequence[Drafting], depth_count: int, column_count: int
    ) -> None:
        """`rows` are those of the proposals that are drawn like this, among `draftings`."""
        self.rows = list(rows)
        self._draftings = [draftings[i] for i in rows]
        self._depth_count = depth_count
        self._given: list[Tensor] = []

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        """Numbers that are needed on the device."""
        return [np.array(self.rows, dtype=np.int64)]

    def take_inputs(self, given: Iterator[Tensor]) -> None:
        """Take them from there."""
        self.places = next(given)

    def launch(self, logits: Tensor, depth: int, sampler: Sampler, ids: Tensor | None) -> list[Tensor]:
        """The column of each row of the logits, -1 where it is not finite; then what else the host reads.

        `ids` are the target's of each column, which key its noise; None: columns are ids.
        """
        return [sampler.argmax(logits)]

    def record(self, found: Iterator[HostArray], wanted: Sequence[bool]) -> None:
        """Read what was launched behind the columns, and note what travels with the wanted ones of the proposals."""

    def _keys(self) -> IntArray:
        """Of the noise of each position and proposal, int64 [positions, proposals]."""
        keys = [[each.key(depth) for each in self._draftings] for depth in range(self._depth_count)]
        return np.array(keys, dtype=np.int64)


class _Full(_Greedy):
    """Draws from distributions over the whole vocabulary."""

    def __init__(
        self, rows: Sequence[int], draftings: Sequence[Drafting], depth_count: int, column_count: int
    ) -> None:
        super().__init__(rows, draftings, depth_count, column_count)
        self._sampling = [drafting.options.sampling for drafting in self._draftings]

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        return [*super().inputs(device), self._keys(), *parameters_for(self._sampling, device)]

    def take_inputs(self, given: Iterator[Tensor]) -> None:
        super().take_inputs(given)
        self._given = [next(given)]
        if self._given[0].device.type != "cpu":
            self._given.append(next(given))

    def launch(self, logits: Tensor, depth: int, sampler: Sampler, ids: Tensor | None) -> list[Tensor]:
        keys, *parameters = self._given
        probs = sampler.probabilities(logits, self._sampling, *parameters)
        return [sampler.sample_tokens(probs, keys[depth], ids)]


class _Sparse(_Full):
    """Draws from the top of each distribution, which then is the whole distribution.

    A draft may use any distribution, as long as it draws from the one that it reports. So only the top logits are
    warped, and no sum over the vocabulary is needed.
    """

    def __init__(
        self, rows: Sequence[int], draftings: Sequence[Drafting], depth_count: int, column_count: int
    ) -> None:
        super().__init__(rows, draftings, depth_count, column_count)
        own = self._draftings
        self._width = min(max(drafting.options.draft_top_k for drafting in own), column_count)
        self._sampling = [drafting.truncate_sampling(self._width) for drafting in own]
        self._keeps_all = all(drafting.options.draft_support_mass >= 1.0 for drafting in own)

    def inputs(self, device: torch.device) -> list[IntArray | FloatArray]:
        masses = np.array([drafting.options.draft_support_mass for drafting in self._draftings])
        return [masses, *super().inputs(device)]

    def take_inputs(self, given: Iterator[Tensor]) -> None:
        self._masses = next(given)
        super().take_inputs(given)

    def launch(self, logits: Tensor, depth: int, sampler: Sampler, ids: Tensor | None) -> list[Tensor]:
        keys, *parameters = self._given
        top_logits, columns = sampler.topk(logits, self._width)
        probs = sampler.probabilities(top_logits, self._sampling, *parameters)
        # The distribution travels in binary32, so the token must be drawn from binary32 probabilities.
        probs = probs.float().double()
        if not self._keeps_all:
            probs = _of_mass(probs, self._masses)
        token_ids = columns if ids is None else ids[columns]
        winners = sampler.sample(probs, keys[depth], token_ids)
        drawn = columns.gather(1, winners[:, None])[:, 0]
        return [torch.where(probs[:, 0] > 0.0, drawn, -1), probs, token_ids]

    def record(self, found: Iterator[HostArray], wanted: Sequence[bool]) -> None:
        rows = next(found)
        ids = next(found)
        # Probabilities descend, so those that are kept come first.
        counts = (rows > 0.0).sum(axis=1).tolist()
        with np.errstate(invalid="ignore"):
            shares = rows / rows.sum(axis=1, keepdims=True)
        for number, (drafting, is_wanted) in enumerate(zip(self._draftings, wanted, strict=True)):
            if is_wanted:
                count = counts[number]
                drafting.distributions.append(SparseDistribution(ids[number, :count], shares[number, :count]))


def _apply_grammars(draftings: Sequence[Drafting], logits: Tensor, shared: SharedTokens | None) -> Tensor:
    """The logits, of the shared tokens or of all, with -inf for what the grammars forbid."""
    own = [i for i, each in enumerate(draftings) if each.grammar is not None or each.mask is not None]
    if not own:
        return logits
    rows = np.concatenate([_mask(draftings[i]) for i in own])
    if len(own) == len(draftings):
        return masked_tokens(logits, rows, shared)
    logits = logits.float()  # a copy or not: rows of other sequences stay as they are
    at = torch.tensor(own, device=logits.device)
    return logits.index_copy(0, at, masked_tokens(logits[own], rows, shared))


def _apply_penalties(draftings: Sequence[Drafting], logits: Tensor) -> Tensor:
    """The logits with the requests' penalties, as the target has them."""
    own = [i for i, each in enumerate(draftings) if each.context is not None]
    if not own:
        return logits
    rows = []
    for i in own:
        drafting = draftings[i]
        tokens = [*(drafting.context or ()), *drafting.token_ids]
        options = drafting.options
        rows.append(apply_penalties(logits[i : i + 1], tokens, options.prompt_length, options.sampling))
    at = torch.tensor(own, device=logits.device)
    return logits.float().index_copy(0, at, torch.cat(rows))


def masked_tokens(logits: Tensor, masks: MaskArray, shared: SharedTokens | None) -> Tensor:
    """`apply_masks`, where the columns may be the shared tokens; masks are by the target's ids."""
    if shared is None:
        return apply_masks(logits, masks)
    forbidden = apply_masks(torch.zeros(len(logits), 32 * masks.shape[1], device=logits.device), masks)
    return logits.float() + forbidden.index_select(-1, shared.target_ids)


def _mask(drafting: Drafting) -> MaskArray:
    if drafting.mask is not None:
        return drafting.mask
    assert drafting.grammar is not None
    return lenient_masks(drafting.grammar, [*(drafting.before or ()), *drafting.token_ids], ())


def lenient_masks(grammar: GrammarState, before: Sequence[int], proposed: Sequence[int]) -> MaskArray:
    """`GrammarState.masks`, all ids allowed where there are none: a proposal need not hold to the grammar."""
    try:
        return grammar.masks(before, proposed)
    except InvalidRequestError:
        return np.full((len(proposed) + 1, grammar.words), -1, dtype=np.int32)


def _of_mass(probs: Tensor, masses: Tensor) -> Tensor:
    """Keep the fewest columns that hold each row's mass, up to 1, and set the others to 0. Probs are float64 [R, M],
    descending; masses [R]. Sampling needs no sum of one."""
    return torch.where(probs.cumsum(-1) - probs < masses[:, None], probs, 0.0)
