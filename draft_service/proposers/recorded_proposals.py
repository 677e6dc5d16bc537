"""A whole proposal in one recording: K steps of the draft and the draws between them, without returning to the host.

Played beside the same steps unrecorded before it is trusted.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_service.proposers.drafting import Drafting, truncated
from tandem.engine.buckets import Bucket
from tandem.engine.jobs import Job
from tandem.engine.recording import Recorder
from tandem.engine.runner import StepRunner
from tandem.engine.segment import Segment
from tandem.engine.static_step import StaticInputs, StaticStep
from tandem.engine.trials import TOLERANCES, trial
from tandem.noise import proposal_keys, race
from tandem.types import Proposal, RowKind, SparseDistribution

logger = logging.getLogger(__name__)

_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _FIRST_KEY = range(5)
"""Rows of the parameters."""


class RecordedProposals:
    """The recordings of one draft, one for each bucket and number of tokens."""

    def __init__(
        self,
        runner: StepRunner,
        buckets: Sequence[Bucket],
        token_counts: Sequence[int],
        draft_top_k: int,
        recorder: Recorder,
    ) -> None:
        """Records.

        Args:
            runner: of the draft's engine.
            buckets: Shapes of a proposal's first step.
            token_counts: Tokens of a proposal; others are cut from the next longer one.
            draft_top_k: Most tokens of a distribution.
            recorder: What records.
        """
        self._loops: list[_Loop] = []
        shapes = [(bucket, count) for bucket in buckets for count in token_counts]
        for bucket, count in sorted(shapes, reverse=True):
            try:
                loop = _Loop(runner, bucket, count, draft_top_k, recorder)
                difference = loop.difference_from_plain()
            except Exception as error:  # noqa: BLE001 - whatever cannot be recorded runs plainly
                _give_up(bucket, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
                break
            if not difference <= TOLERANCES[runner.model.dtype]:
                _give_up(bucket, f"its draws differ by {difference:.2g}")
                break
            self._loops.insert(0, loop)

    def run(self, segments: Sequence[Segment], jobs: Sequence[Job[Drafting]]) -> list[Proposal] | None:
        """See `tandem.engine.jobs.RunAhead`."""
        loop = next((loop for loop in self._loops if loop.holds(segments, jobs)), None)
        return None if loop is None else loop.run(segments, jobs)


def _give_up(bucket: Bucket, reason: str) -> None:
    logger.warning(
        "a proposal could not be recorded; it and all smaller ones return to the host at each step",
        extra={"sequences": bucket.sequences, "keys": bucket.length, "reason": reason},
    )


class _Loop:
    def __init__(
        self,
        runner: StepRunner,
        bucket: Bucket,
        token_count: int,
        draft_top_k: int,
        recorder: Recorder,
    ) -> None:
        self._bucket = bucket
        self._arena = runner.arena
        self._vocabulary_size = runner.model.info.vocabulary_size
        self._token_count = token_count
        self._draft_top_k = min(draft_top_k, runner.model.info.vocabulary_size)
        self._spare = runner.arena.total_tokens
        self._inputs = StaticInputs(
            bucket, (_FIRST_KEY + token_count) * bucket.sequences, runner.model.device
        )
        self._first = StaticStep(runner.model, runner.arena, bucket)
        self._next = StaticStep(runner.model, runner.arena, Bucket(bucket.sequences, 1, bucket.length))
        with torch.inference_mode():
            self._play = recorder(self._work)

    @torch.inference_mode()
    def difference_from_plain(self) -> float:
        """By what share of the highest logit or probability the draws differ from those of the same steps unrecorded,
        as far as both drew the same tokens before; the arena must be empty."""
        with trial(self._bucket, self._arena, self._vocabulary_size, self._token_count) as segments:
            greedy = [0, _integer(1.0), 0, 0, *[0] * self._token_count]
            self._inputs.fill(segments, _by_row([greedy] * self._bucket.sequences), self._spare)
            ids, logits, _, probs = self._parts(self._play()[:, : len(segments)].clone())
            plain_ids, plain_logits, plain_columns, plain_probs = self._parts(
                self._work()[:, : len(segments)]
            )
        is_comparable = torch.ones_like(ids, dtype=torch.bool)
        is_comparable[1:] = (ids == plain_ids)[:-1].cumprod(dim=0).bool()
        # Of two tokens that are as probable, either may be drawn.
        likeliest = plain_probs.amax(dim=-1)
        likelihood = torch.where(plain_columns == ids[..., None], plain_probs, 0.0).sum(dim=-1)
        differences = (
            (logits - plain_logits).abs() / plain_logits.abs().max(),
            (probs - plain_probs).abs().amax(dim=-1) / likeliest,
            (likeliest - likelihood) / likeliest,
        )
        return max(float(difference[is_comparable].max()) for difference in differences)

    def _parts(self, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids and their logits, [token_count, sequences]; columns and probabilities, [..., draft_top_k]."""
        first_prob = 2 + self._draft_top_k
        logits, probs = (
            part.contiguous().view(torch.float32) for part in (drawn[..., 1], drawn[..., first_prob:])
        )
        return drawn[..., 0], logits, drawn[..., 2:first_prob], probs

    def holds(self, segments: Sequence[Segment], jobs: Sequence[Job[Drafting]]) -> bool:
        """Whether all that is asked for is a proposal that fits."""
        width = max(segment.token_count for segment in segments)
        ahead = self._token_count - 1
        length = max(segment.end for segment in segments) + ahead
        return self._bucket.holds(len(segments), width, length) and all(
            segment.end == segment.sequence.length
            and segment.end + ahead <= segment.sequence.max_length
            and job.row_count == 1
            and self._can_draw(job.payload)
            for segment, job in zip(segments, jobs, strict=True)
        )

    def _can_draw(self, drafting: Drafting) -> bool:
        sampling, kind = drafting.options.sampling, drafting.options.row_kind
        return (
            not drafting.token_ids
            and drafting.token_count <= self._token_count
            and (kind is RowKind.TOKEN if sampling.is_greedy else kind is RowKind.SUPPORT)
            and drafting.draft_top_k <= self._draft_top_k
        )

    def run(self, segments: Sequence[Segment], jobs: Sequence[Job[Drafting]]) -> list[Proposal]:
        """One proposal for each job; the sequences then hold all of its tokens but the last, as after single steps."""
        draftings = [job.payload for job in jobs]
        self._inputs.fill(segments, self._parameters(draftings), self._spare)
        drawn = self._play().cpu().numpy()
        proposals = [self._proposal(drafting, drawn[:, i]) for i, drafting in enumerate(draftings)]
        for segment, proposal in zip(segments, proposals, strict=True):
            for token_id in proposal.token_ids[:-1]:
                segment.sequence.append(token_id)
            segment.sequence.advance(segment.token_count + len(proposal) - 1)
        return proposals

    def _parameters(self, draftings: Sequence[Drafting]) -> list[int]:
        """What the draws need, [4 + token_count, sequences], row after row."""
        columns = []
        for drafting in draftings:
            sampling = truncated(drafting)
            keys = proposal_keys(sampling.seed, drafting.base_length, self._token_count)
            bits = map(_integer, (sampling.temperature, sampling.top_p, sampling.min_p))
            columns.append([*bits, sampling.top_k, *keys.tolist()])
        columns += [[0] * len(columns[0])] * (self._bucket.sequences - len(columns))
        return _by_row(columns)

    def _work(self) -> Tensor:
        """What is recorded: int32 [token_count, sequences, 2 + 2 * draft_top_k], as `_draw` makes them."""
        inputs, count = self._inputs, self._bucket.sequences
        parameters = inputs.extra.view(-1, count)
        logits = self._first.logits(inputs.token_ids, inputs.bases, inputs.starts, inputs.widths)
        rows = torch.arange(count, device=logits.device) * self._bucket.width + (inputs.widths - 1).clamp(
            min=0
        )
        token_ids, drawn = self._draw(logits.index_select(0, rows), parameters, 0)
        steps = [drawn]
        ends, widths = inputs.starts + inputs.widths, inputs.widths.clamp(max=1)
        for step in range(1, self._token_count):
            # A sequence that is padding stays at its first position.
            starts = (ends + step - 1) * widths
            logits = self._next.logits(token_ids[:, None], inputs.bases, starts, widths)
            token_ids, drawn = self._draw(logits, parameters, step)
            steps.append(drawn)
        return torch.stack(steps)

    def _draw(self, logits: Tensor, parameters: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """A token for each row, and all there is to tell of it.

        Returns:
            int64 [sequences] ids; int32 [sequences, 2 + 2 * draft_top_k]: the id, its logit's bits, the ids that it was
            drawn among, and their probabilities' bits.
        """
        temperature = parameters[_TEMPERATURE].view(torch.float64)
        highest, columns = logits.topk(self._draft_top_k, dim=-1)
        probs = _warped(highest, parameters).float()
        winners = race(probs.double(), parameters[_FIRST_KEY + step], columns)
        sampled = columns.gather(1, winners[:, None])[:, 0]
        token_ids = torch.where(temperature > 0.0, sampled, logits.argmax(dim=-1))
        token_logits = logits.gather(1, token_ids[:, None]).float()
        parts = (
            token_ids[:, None].int(),
            token_logits.view(torch.int32),
            columns.int(),
            probs.view(torch.int32),
        )
        return token_ids, torch.cat(parts, dim=1)

    def _proposal(self, drafting: Drafting, drawn: np.ndarray) -> Proposal:
        """The proposal that a sequence's draws, int32 [token_count, 2 + 2 * draft_top_k], come to."""
        drawn = np.ascontiguousarray(drawn[: drafting.token_count])
        ids, logits, columns, bits = np.split(drawn, (1, 2, 2 + self._draft_top_k), axis=1)
        probs = np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
        is_sparse = not drafting.options.sampling.is_greedy
        distributions = [
            SparseDistribution(row_ids[row > 0.0].astype(np.int64), row[row > 0.0] / row[row > 0.0].sum())
            for row_ids, row in zip(columns, probs, strict=True)
            if is_sparse
        ]
        token_logits = np.ascontiguousarray(logits).view(np.float32)[:, 0]
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


def _warped(highest: Tensor, parameters: Tensor) -> Tensor:
    """Temperature, top-k, top-p and min-p of each row's highest logits, as `tandem.warping.warp` defines them.

    The parameters are numbers on the device: a recording cannot look at them to see what may be left out.

    Args:
        highest: [R, M], descending.
        parameters: int64 [4 or more, R].

    Returns:
        float64 [R, M]; each row sums to one. A row of temperature 0 is warped as if by 1.
    """
    temperature, top_p, min_p = parameters[:_TOP_K].view(torch.float64)[:, :, None]
    scores = highest.double() / torch.where(temperature > 0.0, temperature, 1.0)
    weights = torch.exp(scores - scores[:, :1])
    size = weights.shape[1]
    last = torch.where(parameters[_TOP_K] > 0, parameters[_TOP_K], size).clamp(1, size) - 1
    weights = torch.where(weights < weights.gather(1, last[:, None]), 0.0, weights)
    probs = weights / weights.sum(dim=1, keepdim=True)
    from_the_end = probs.flip(1).cumsum(1).flip(1)
    is_nucleus = (from_the_end > 1.0 - top_p) | (top_p >= 1.0)
    is_nucleus[:, 0] = True
    weights = torch.where(is_nucleus & (weights >= min_p), weights, 0.0)
    return weights / weights.sum(dim=1, keepdim=True)
