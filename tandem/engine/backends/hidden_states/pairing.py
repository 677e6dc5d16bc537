"""Which of the target's sequences a head's sequence goes with, and the head's own states within a proposal."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.engine.backends.hidden_states.tap import HiddenStateTap
from tandem.engine.kv_cache.sequence import Segment, Sequence


class BoundSequences:
    """The target's open sequences by request. Belongs to the event loop on which both services run."""

    def __init__(self) -> None:
        self._by_request: dict[str, Sequence] = {}

    def open(self, request_id: str, sequence: Sequence) -> None:
        """Record that the target has opened a request's sequence."""
        self._by_request[request_id] = sequence

    def close(self, request_id: str, sequence: Sequence) -> None:
        """Record that the target is about to release it."""
        if self._by_request.get(request_id) is sequence:
            del self._by_request[request_id]

    def find(self, request_id: str, token_ids: SequenceOf[int]) -> Sequence | None:
        """The request's sequence on the target, if it has read exactly these tokens, whatever it read after them."""
        sequence = self._by_request.get(request_id)
        if sequence is None or sequence.computed_length < len(token_ids):
            return None
        return sequence if sequence.token_ids[: len(token_ids)] == list(token_ids) else None


@dataclass(slots=True, eq=False)
class Pairing:
    """The states that a head's sequence reads. The caller changes it between jobs, the engine's thread within one."""

    target: Sequence | None = None
    known_length: int = 0
    """Pairs whose state is the target's. Later ones are the proposal's own."""
    own_states: list[Tensor] = field(default_factory=list)
    """The head's states for the pairs from `known_length` on, [state_size] each."""
    is_lost: bool = False
    """True if states of the target were gone when the head wanted to read them."""

    def begin(self, target: Sequence, known_length: int) -> None:
        """Begin a proposal after `known_length` pairs."""
        self.target, self.known_length, self.is_lost = target, known_length, False
        self.own_states.clear()


class PairedStates:
    """The states of a head's step."""

    def __init__(
        self, tap: HiddenStateTap, state_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tap = tap
        self._state_size = state_size
        self._dtype = dtype
        self._device = device
        self.pairings: dict[Sequence, Pairing] = {}
        """By the head's sequence. One that is not here, as in a trial, reads `any_states`."""

    def of_step(self, segments: SequenceOf[Segment]) -> Tensor:
        """The state of each pair of a step, [tokens, state_size]."""
        known = [(segment, self.pairings.get(segment.sequence)) for segment in segments]
        asked = [
            (pairing.target, segment.start, min(segment.end, pairing.known_length))
            for segment, pairing in known
            if pairing is not None and pairing.target is not None and segment.start < pairing.known_length
        ]
        answers = iter(self._tap.read(asked))
        parts: list[Tensor] = []
        for segment, pairing in known:
            if pairing is None or pairing.target is None:
                parts.append(self.any_states(segment.token_count))
                continue
            if segment.start < pairing.known_length:
                states = next(answers)
                pairing.is_lost = pairing.is_lost or states is None
                count = min(segment.end, pairing.known_length) - segment.start
                parts.append(self._zeros(count) if states is None else states.to(self._device, self._dtype))
            first, last = (max(at - pairing.known_length, 0) for at in (segment.start, segment.end))
            if first < last:
                own = pairing.own_states[first:last]
                parts.append(torch.stack(own) if own else self._zeros(last - first))
        return torch.cat(parts)

    def is_past_known(self, segments: SequenceOf[Segment]) -> Tensor:
        """Which tokens of a step lie behind those whose states are the target's, bool [tokens]."""
        found: list[bool] = []
        for segment in segments:
            pairing = self.pairings.get(segment.sequence)
            known = 0 if pairing is None else pairing.known_length
            found.extend(position >= known for position in range(segment.start, segment.end))
        return torch.tensor(found, device=self._device)

    def keep(self, segments: SequenceOf[Segment], states: Tensor) -> None:
        """Keeps the head's state after each segment, with which a proposal goes on.

        Args:
            segments: of the step that has run.
            states: [tokens, state_size], its output. By CPU kernels a head in bfloat16 has a residual stream in
                float32; what it reads next has the head's dtype all the same, or its queries and keys would be of
                another type than its KV cache.
        """
        end = 0
        for segment in segments:
            end += segment.token_count
            pairing = self.pairings.get(segment.sequence)
            if pairing is not None and segment.end == pairing.known_length + len(pairing.own_states):
                pairing.own_states.append(states[end - 1].to(self._dtype))

    def any_states(self, count: int) -> Tensor:
        """States that are no target's, [count, state_size]: all different, so that a trial sees their use."""
        places = torch.arange(count * self._state_size, dtype=torch.float32, device=self._device)
        return places.mul_(0.7).sin_().view(count, -1).to(self._dtype)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, self._state_size, dtype=self._dtype, device=self._device)
