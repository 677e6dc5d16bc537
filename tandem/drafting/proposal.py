"""A draft model's proposal in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engine.core.jobs import Continue, Done, Failed, Job, non_finite
from tandem.engine.kv_cache.sequence import Sequence as CachedSequence
from tandem.engine.rows import TORCH_SAMPLER, Sampler, apply_masks, apply_penalties
from tandem.errors import InvalidRequestError
from tandem.model.grammar import GrammarState, MaskArray
from tandem.model.sampling.noise import Purpose, stream_key
from tandem.model.types import DraftOptions, IntArray, Proposal, RowKind, SamplingParams, SparseDistribution

Outcome = Done[Proposal] | Failed | Continue


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
        self.draft_ids, self.target_ids = torch.from_numpy(draft_ids), torch.from_numpy(target_ids)

    def restricted(self, logits: Tensor) -> Tensor:
        """The logits of these tokens alone, [R, S]: their softmax is the draft's distribution restricted to them and
        normalised anew."""
        if self.draft_ids.device != logits.device:
            self.draft_ids, self.target_ids = (
                self.draft_ids.to(logits.device),
                self.target_ids.to(logits.device),
            )
        return logits.index_select(-1, self.draft_ids)

    @cached_property
    def columns(self) -> dict[int, int]:
        """The column of each of the target's ids in `restricted`."""
        return {token_id: i for i, token_id in enumerate(self.target_ids.tolist())}


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

    @property
    def next_key(self) -> int:
        """Key of the next token's noise: the target's own key where the draft should anticipate the target's sample."""
        seed, position = self.options.sampling.seed, self.base_length + len(self.token_ids)
        if self.options.row_kind is RowKind.TOKEN:
            return stream_key(seed, position, Purpose.TARGET)
        return stream_key(seed, position, Purpose.PROPOSAL, self.base_length)

    def outcome(self) -> Outcome:
        if len(self.token_ids) < self.token_count and not self.is_cut:
            return Continue(self.last_read)
        logits = np.array(self.token_logits, dtype=np.float32) if self.options.with_token_logits else None
        return Done(Proposal(self.base_length, tuple(self.token_ids), tuple(self.distributions), logits))

    def truncate_sampling(self, candidate_count: int) -> SamplingParams:
        """The request's sampling parameters with the draft's own limit, for so many tokens.

        A top-k that keeps all of them is left out.
        """
        sampling, most = self.options.sampling, self.options.draft_top_k
        top_k = min(sampling.top_k or most, most)
        if top_k >= candidate_count:
            top_k = 0
        return SamplingParams(sampling.temperature, top_k, sampling.top_p, sampling.min_p, sampling.seed)


def propose_head(
    ready: Sequence[Job[Drafting]], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Outcome]:
    """Head of the draft's engine: each row of logits becomes one more token of a proposal."""
    return extend_drafts(_with_tokens(ready), logits, sampler)


def propose_where_logits_are(ready: Sequence[Job[Drafting]], logits: Any) -> list[Outcome]:
    """See `propose_head`, for logits that another engine's worker keeps (`tandem.engine_vllm.engine.RemoteLogits`)."""
    own = [
        drafting
        if drafting.grammar is None
        else replace(drafting, grammar=None, before=None, mask=_mask(drafting))
        for drafting in _with_tokens(ready)
    ]
    outcomes, draftings = logits.apply(_extend_copies, own)
    for job, drafting in zip(ready, draftings, strict=True):
        job.payload = replace(drafting, grammar=job.payload.grammar, before=job.payload.before, mask=None)
    found: list[Outcome] = outcomes
    return found


def _with_tokens(ready: Sequence[Job[Drafting]]) -> list[Drafting]:
    for job in ready:
        drafting = job.payload
        if drafting.grammar is not None and drafting.before is None:
            tokens = job.sequence.token_ids
            drafting.before = tokens[drafting.options.prompt_length : drafting.base_length]
        if drafting.options.sampling.penalizes and drafting.context is None:
            drafting.context = job.sequence.token_ids[: drafting.base_length]
    return [job.payload for job in ready]


def _extend_copies(draftings: Sequence[Drafting], logits: Tensor) -> tuple[list[Outcome], Sequence[Drafting]]:
    """Outcomes and the proposals themselves, which may be copies: the worker may be in another process."""
    return extend_drafts(draftings, logits), draftings


def extend_drafts(
    draftings: Sequence[Drafting], logits: Tensor, sampler: Sampler = TORCH_SAMPLER
) -> list[Outcome]:
    """Draw one more token for each proposal, from logits [len(draftings), vocabulary_size]."""
    vocabularies: dict[tuple[int, int], list[int]] = {}
    for i, drafting in enumerate(draftings):
        vocabulary = id(drafting.shared), drafting.options.vocabulary_size
        vocabularies.setdefault(vocabulary, []).append(i)
    if len(vocabularies) > 1:
        found: dict[int, Outcome] = {}
        for own in vocabularies.values():
            found.update(
                zip(own, extend_drafts([draftings[i] for i in own], logits[own], sampler), strict=True)
            )
        return [found[i] for i in range(len(draftings))]
    shared = draftings[0].shared
    logits = known_to_target(logits, draftings[0].options.vocabulary_size)
    unmasked = logits
    logits = _apply_grammars(draftings, logits if shared is None else shared.restricted(logits), shared)
    logits = _apply_penalties(draftings, logits)
    if all(drafting.options.sampling.is_greedy for drafting in draftings):
        columns: list[int] = sampler.argmax(logits).tolist()
    else:
        columns = _draw(draftings, logits, sampler, None if shared is None else shared.target_ids)
    return [
        _with_token(drafting, column, logits[i], unmasked[i])
        for i, (drafting, column) in enumerate(zip(draftings, columns, strict=True))
    ]


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


def _with_token(drafting: Drafting, column: int, logits: Tensor, unmasked: Tensor) -> Outcome:
    """Extend a proposal by the token of this column; -1 stands for logits that are not finite."""
    if column < 0:
        is_masked = drafting.grammar is not None or drafting.mask is not None
        drafting.is_cut = is_masked and bool(
            unmasked.isfinite().any() and not unmasked.isnan().any() and (logits == -torch.inf).all()
        )
        if drafting.is_cut:
            return drafting.outcome()
        return non_finite(drafting.base_length + len(drafting.token_ids))
    shared = drafting.shared
    drafting.token_ids.append(column if shared is None else int(shared.target_ids[column]))
    drafting.last_read = column if shared is None else int(shared.draft_ids[column])
    if drafting.options.with_token_logits:
        drafting.token_logits.append(float(logits[column]))
    return drafting.outcome()


def _draw(draftings: Sequence[Drafting], logits: Tensor, sampler: Sampler, ids: Tensor | None) -> list[int]:
    """Draw a column for each row, -1 where its logits are not finite, and record the distributions that travel.

    Logits are [len(draftings), V]. `ids` are the target's of each column, which key its noise; None: columns are ids.
    """
    found = [-1] * len(draftings)
    sparse = [i for i, d in enumerate(draftings) if d.options.row_kind is RowKind.SUPPORT]
    full = [i for i, d in enumerate(draftings) if d.options.row_kind is not RowKind.SUPPORT]
    if sparse:
        own = logits if len(sparse) == len(draftings) else logits[sparse]
        _draw_sparse([draftings[i] for i in sparse], own, sparse, found, sampler, ids)
    if full:
        probs = sampler.probabilities(logits[full], [draftings[i].options.sampling for i in full])
        drawn = sampler.sample_tokens(probs, _keys([draftings[i] for i in full], logits), ids).tolist()
        for i, column in zip(full, drawn, strict=True):
            found[i] = column
    return found


def _draw_sparse(
    draftings: Sequence[Drafting],
    logits: Tensor,
    indices: Sequence[int],
    found: list[int],
    sampler: Sampler,
    all_ids: Tensor | None,
) -> None:
    """Draw from the top of each distribution, which then is the whole distribution.

    A draft may use any distribution, as long as it draws from the one that it reports. So only the top logits are
    warped, and no sum over the vocabulary is needed.
    """
    width = min(max(drafting.options.draft_top_k for drafting in draftings), logits.shape[-1])
    top_logits, columns = sampler.topk(logits, width)
    probs = sampler.probabilities(top_logits, [drafting.truncate_sampling(width) for drafting in draftings])
    # The distribution travels in binary32, so the token must be drawn from binary32 probabilities.
    probs = _of_mass(probs.float().double(), [drafting.options.draft_support_mass for drafting in draftings])
    token_ids = columns if all_ids is None else all_ids[columns]
    drawn = sampler.sample(probs, _keys(draftings, logits), token_ids).tolist()
    rows, ids = probs.cpu().numpy(), token_ids.cpu().numpy()
    # Probabilities descend, so those that are kept come first. Where the first is NaN, so are the others.
    counts = np.where(rows[:, 0] > 0.0, (rows > 0.0).sum(axis=1), 0).tolist()
    with np.errstate(invalid="ignore"):
        shares = rows / rows.sum(axis=1, keepdims=True)
    for number, (drafting, i, count, winner) in enumerate(
        zip(draftings, indices, counts, drawn, strict=True)
    ):
        if count:
            drafting.distributions.append(SparseDistribution(ids[number, :count], shares[number, :count]))
            found[i] = int(columns[number, winner])


def _of_mass(probs: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep the fewest columns that hold each row's mass, up to 1, and set the others to 0. Probs are float64 [R, M],
    descending. Sampling needs no sum of one."""
    if min(masses) >= 1.0:
        return probs
    wanted = torch.tensor(masses, dtype=probs.dtype, device=probs.device)[:, None]
    return torch.where(probs.cumsum(-1) - probs < wanted, probs, 0.0)


def _keys(draftings: Sequence[Drafting], like: Tensor) -> Tensor:
    return torch.tensor([drafting.next_key for drafting in draftings], dtype=torch.int64, device=like.device)
