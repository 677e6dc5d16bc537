"""A whole proposal in one CUDA graph: K steps of the draft and the draws between them, without returning to the host.

Replayed beside the same steps uncaptured before it is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draft_service.proposers.drafting import Drafting
from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.capture import CaptureOutcome, capture_each
from tandem.engine.backends.cuda_graphs.captured_steps import GraphContext, trial_lengths
from tandem.engine.backends.cuda_graphs.static_draw import COUNT, FIRST_KEY, draw
from tandem.engine.backends.cuda_graphs.static_inputs import StaticInputs
from tandem.engine.backends.cuda_graphs.static_step import StaticStep
from tandem.engine.backends.trial import trial_segments
from tandem.engine.core.finite import non_finite
from tandem.engine.core.jobs import Failed, Job
from tandem.engine.kv_cache.sequence import Segment
from tandem.sampling.noise import proposal_keys
from tandem.types import Proposal, RowKind, SparseDistribution


class CapturedProposals:
    """The captured proposals of one draft, one for each bucket and number of tokens."""

    def __init__(
        self,
        graphs: GraphContext,
        buckets: Sequence[Bucket],
        token_counts: Sequence[int],
        draft_top_k: int,
    ) -> None:
        """Capture the proposals.

        Args:
            graphs: Of the draft's engine.
            buckets: Shapes of a proposal's first step.
            token_counts: Tokens of a proposal. Of several in a batch, the longest one's steps run.
            draft_top_k: Maximum number of tokens of a distribution.
        """
        self.outcomes: list[CaptureOutcome]
        """Which proposals were captured, and why the others were not."""
        self._loops, self.outcomes = capture_each(
            "proposals",
            [_Shape(bucket, count) for bucket in buckets for count in token_counts],
            lambda shape: _Loop(graphs, shape.bucket, shape.token_count, draft_top_k),
            _Loop.error,
            graphs.reference.limit,
            graphs.model.device,
        )

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind a step's for which a sequence's pages must have room, for the longest of the proposals."""
        return max((loop.tokens_ahead for loop in self._loops), default=0)

    def takes(self, segment: Segment, job: Job[Drafting]) -> bool:
        """See `tandem.engine.core.jobs.MultiStepProposer`."""
        return any(loop.takes(segment, job) for loop in self._loops)

    def run(self, segments: Sequence[Segment], jobs: Sequence[Job[Drafting]]) -> list[Proposal | Failed]:
        """See `tandem.engine.core.jobs.MultiStepProposer`."""
        results: list[Proposal | Failed] = []
        while len(results) < len(jobs):
            first = len(results)
            loop = self._loop_for(jobs[first:])
            part = slice(first, first + loop.shape.bucket.sequences)
            results += loop.run(segments[part], jobs[part])
        return results

    def _loop_for(self, jobs: Sequence[Job[Drafting]]) -> _Loop:
        """The smallest that serves all of the jobs, or the one that serves most of them at once."""
        longest = max(job.payload.token_count for job in jobs)
        loops = [loop for loop in self._loops if loop.shape.token_count >= longest]
        for loop in loops:
            if loop.shape.bucket.sequences >= len(jobs):
                return loop
        return max(loops, key=lambda loop: loop.shape.bucket.sequences)


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    bucket: Bucket
    token_count: int

    def __str__(self) -> str:
        return f"{self.bucket}, {self.token_count} tokens"


class _Loop:
    def __init__(self, graphs: GraphContext, bucket: Bucket, token_count: int, draft_top_k: int) -> None:
        self.shape = _Shape(bucket, token_count)
        self._bucket = bucket
        self._arena = graphs.arena
        self._reference = graphs.reference
        self._dtype = graphs.model.dtype
        self._vocabulary_size = graphs.model.info.vocabulary_size
        self._token_count = token_count
        self._draft_top_k = min(draft_top_k, graphs.model.info.vocabulary_size)
        self._max_length = graphs.max_length
        self._spare_page = graphs.arena.spare_page
        self._inputs = StaticInputs(
            bucket,
            graphs.max_length,
            (FIRST_KEY + token_count) * bucket.sequences,
            graphs.model.device,
            graphs.arena.group_count,
        )
        self._first = StaticStep(graphs.model, graphs.arena, bucket, graphs.max_length)
        self._next = StaticStep(graphs.model, graphs.arena, Bucket(bucket.sequences, 1), graphs.max_length)
        with torch.inference_mode():
            self._replay = graphs.capture(self._work)

    @property
    def tokens_ahead(self) -> int:
        """Tokens that are written behind those of the first step."""
        return self._token_count - 1

    @torch.inference_mode()
    def error(self) -> float:
        """The error of the captured steps against the same steps uncaptured, in spreads of a logit.

        Positions count as long as both drew the same tokens before them. The arena must be empty.
        """
        lengths = trial_lengths(self._bucket, self._arena, self._max_length, self.tokens_ahead)
        with trial_segments(
            self._arena, self._vocabulary_size, lengths, self._dtype, self.tokens_ahead
        ) as segments:
            greedy = [0, _integer(1.0), 0, 0, self._token_count, *[0] * self._token_count]
            self._inputs.fill(segments, _by_row([greedy] * self._bucket.sequences), self._spare_page)
            ids, logits, _, probs = self._parts(self._replay()[:, : len(segments)].clone())
            plain_ids, plain_logits, plain_columns, plain_probs = self._parts(
                self._work()[:, : len(segments)]
            )
        is_comparable = torch.ones_like(ids, dtype=torch.bool)
        is_comparable[1:] = (ids == plain_ids)[:-1].cumprod(dim=0).bool()
        likeliest = plain_probs.amax(dim=-1)
        # Of two equally probable tokens, either may be drawn.
        likelihood = torch.where(plain_columns == ids[..., None], plain_probs, 0.0).sum(dim=-1)
        # A logit's error is the same share of its probability, as long as both are small.
        differences = (
            logits - plain_logits,
            (probs - plain_probs).abs().amax(dim=-1) / likeliest,
            (likeliest - likelihood) / likeliest,
        )
        nothing = torch.zeros(())
        return max(
            self._reference.in_spreads(difference[is_comparable], nothing) for difference in differences
        )

    def _parts(self, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and their logits, [token_count, sequences]; columns and probabilities, [..., draft_top_k]."""
        first_prob = 2 + self._draft_top_k
        logits, probs = (
            part.contiguous().view(torch.float32) for part in (drawn[..., 1], drawn[..., first_prob:])
        )
        return drawn[..., 0], logits, drawn[..., 2:first_prob], probs

    def takes(self, segment: Segment, job: Job[Drafting]) -> bool:
        """True if the job's proposal can be drawn here."""
        return (
            job.row_count == 1
            and segment.end == segment.sequence.length
            and segment.token_count <= self._bucket.width
            and segment.end + job.payload.token_count - 1
            <= min(segment.sequence.table.capacity, self._max_length)
            and self._can_draw(job.payload)
        )

    def _can_draw(self, drafting: Drafting) -> bool:
        sampling, kind = drafting.options.sampling, drafting.options.row_kind
        return (
            not drafting.token_ids
            and drafting.token_count <= self._token_count
            and (kind is RowKind.TOKEN if sampling.is_greedy else kind is RowKind.SUPPORT)
            and drafting.draft_top_k <= self._draft_top_k
        )

    def run(self, segments: Sequence[Segment], jobs: Sequence[Job[Drafting]]) -> list[Proposal | Failed]:
        """One proposal for each job; the sequences then hold all of its tokens but the last, as after single steps."""
        draftings = [job.payload for job in jobs]
        self._inputs.fill(segments, self._parameters(draftings), self._spare_page)
        drawn = self._replay().cpu().numpy()
        proposals = [self._proposal(drafting, drawn[:, i]) for i, drafting in enumerate(draftings)]
        for segment, proposal in zip(segments, proposals, strict=True):
            if isinstance(proposal, Failed):
                continue  # the engine restarts the sequence
            for token_id in proposal.token_ids[:-1]:
                segment.sequence.append(token_id)
            segment.sequence.advance(segment.token_count + len(proposal) - 1)
        return proposals

    def _parameters(self, draftings: Sequence[Drafting]) -> list[int]:
        """Inputs of the draws, [FIRST_KEY + token_count, sequences], row after row."""
        columns = []
        for drafting in draftings:
            sampling = drafting.truncated()
            keys = proposal_keys(sampling.seed, drafting.base_length, self._token_count)
            bits = map(
                _integer, (sampling.temperature, sampling.top_p * drafting.support_mass, sampling.min_p)
            )
            columns.append([*bits, sampling.top_k, drafting.token_count, *keys.tolist()])
        columns += [[0] * len(columns[0])] * (self._bucket.sequences - len(columns))
        return _by_row(columns)

    def _work(self) -> Tensor:
        """Output of the capture: int32 [token_count, sequences, 2 + 2 * draft_top_k], as `draw` makes them."""
        inputs, count = self._inputs, self._bucket.sequences
        parameters = inputs.extra.view(-1, count)
        logits = self._first.logits(inputs.token_ids, inputs.page_tables, inputs.starts, inputs.widths)
        rows = torch.arange(count, device=logits.device) * self._bucket.width + (inputs.widths - 1).clamp(
            min=0
        )
        token_ids, drawn = draw(logits.index_select(0, rows), parameters, 0, self._draft_top_k)
        steps = [drawn]
        ends = inputs.starts + inputs.widths
        for step in range(1, self._token_count):
            # A sequence whose proposal is complete becomes padding: it needs no page for more than it asked for.
            widths = (parameters[COUNT] > step).long()
            starts = (ends + step - 1) * widths
            logits = self._next.logits(token_ids[:, None], inputs.page_tables, starts, widths)
            token_ids, drawn = draw(logits, parameters, step, self._draft_top_k)
            steps.append(drawn)
        return torch.stack(steps)

    def _proposal(self, drafting: Drafting, drawn: np.ndarray) -> Proposal | Failed:
        """The proposal made of a sequence's draws, int32 [token_count, 2 + 2 * draft_top_k].

        It is a failure when a logit is not finite.
        """
        drawn = np.ascontiguousarray(drawn[: drafting.token_count])
        ids, logits, columns, bits = np.split(drawn, (1, 2, 2 + self._draft_top_k), axis=1)
        probs = np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
        token_logits = np.ascontiguousarray(logits).view(np.float32)[:, 0]
        if not (np.isfinite(token_logits).all() and np.isfinite(probs).all()):
            return non_finite(drafting.base_length)
        is_sparse = not drafting.options.sampling.is_greedy
        distributions = [
            SparseDistribution(row_ids[row > 0.0].astype(np.int64), row[row > 0.0] / row[row > 0.0].sum())
            for row_ids, row in zip(columns, probs, strict=True)
            if is_sparse
        ]
        return Proposal(
            drafting.base_length,
            tuple(map(int, ids[:, 0])),
            tuple(distributions),
            token_logits if drafting.options.with_token_logits else None,
        )


def _by_row(columns: Sequence[Sequence[int]]) -> list[int]:
    return [number for row in zip(*columns, strict=True) for number in row]


def _integer(value: float) -> int:
    """A float64's bits as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])
