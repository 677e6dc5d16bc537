"""Captured steps on a device that is always late: copies and replays run only when the host reads a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.backends.cuda_graphs import static_inputs
from tandem.engine.backends.cuda_graphs.buckets import make_buckets
from tandem.engine.backends.cuda_graphs.capture import Work
from tandem.engine.backends.cuda_graphs.captured_steps import CapturedSteps, GraphContext
from tandem.engine.backends.trial import Reference
from tandem.engine.kv_cache.sequence import Segment
from tests.unit.engine.backends.by_hand import ByHand, some_tokens
from tests.unit.engine.greedy import plain_logits

TOKENS = [some_tokens(13), some_tokens(13, 5), some_tokens(13, 9)]
WIDTH = 4


class LateDevice:
    """Queues copies and replays once `lags` is set."""

    def __init__(self) -> None:
        self.lags = False
        self._queued: list[Callable[[], object]] = []

    def start(self, target: Tensor, source: Tensor) -> None:
        """See `Transfer`."""
        self._submit(lambda: target.copy_(source))

    def wait(self) -> None:
        """See `Transfer`. All work before the copy is then done, too."""
        while self._queued:
            self._queued.pop(0)()

    def capture(self, work: Work) -> Work:
        """A capture whose result is there only after `wait`."""
        output = work().clone()

        def replay() -> Tensor:
            self._submit(lambda: output.copy_(work()))
            return output

        return replay

    def _submit(self, work: Callable[[], object]) -> None:
        self._queued.append(work)
        if not self.lags:
            self.wait()


@pytest.mark.parametrize("count", [1, 3])
def test_steps_that_nobody_reads_are_computed_from_their_own_numbers(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a prompt have no rows: the host prepares the next step while the device is still at an old one."""
    device = LateDevice()
    monkeypatch.setattr(static_inputs, "transfer_to", lambda _: device)
    by_hand = ByHand(tmp_path, "llama")
    model = by_hand.model
    steps = CapturedSteps(
        GraphContext(model, by_hand.arena, Reference(model), make_buckets(4, (1, WIDTH)), device.capture, 192)
    )
    assert all(outcome.reason is None for outcome in steps.outcomes)
    device.lags = True
    sequences = by_hand.sequences[:count]
    with torch.inference_mode():
        for start in range(0, 12, WIDTH):
            for sequence, tokens in zip(sequences, TOKENS, strict=False):
                sequence.token_ids.extend(tokens[start : start + WIDTH])
            steps.run([Segment(sequence, WIDTH) for sequence in sequences], [])
            for sequence in sequences:
                sequence.advance(WIDTH)
        for sequence, tokens in zip(sequences, TOKENS, strict=False):
            sequence.token_ids.append(tokens[12])
        found = steps.run([Segment(sequence, 1) for sequence in sequences], range(count))
        device.wait()
    for tokens, logits in zip(TOKENS, found, strict=False):
        assert torch.allclose(logits, plain_logits(by_hand.reference, tokens)[-1], atol=1e-3)
