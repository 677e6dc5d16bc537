"""A drafting head as a model that an engine runs: its own pages, batches and samplers are those of any other."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tandem.engine.backends.hidden_states.pairing import PairedStates
from tandem.engine.backends.packing import Packing
from tandem.engine.kv_cache.sequence import Segment
from tandem.engine.models.heads.interface import BlockHead, DraftHead
from tandem.engine.models.loading import LoadedModel


@dataclass(frozen=True, slots=True)
class _Output:
    logits: Tensor


class HeadModel(nn.Module):
    """Calls a head as the engine calls a causal language model of transformers."""

    def __init__(self, head: DraftHead, states: PairedStates) -> None:
        super().__init__()
        self.head = head
        self.states = states

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor | int,
        tandem_step: Packing,
        **_: Any,
    ) -> _Output:
        """See `tandem.engine.backends.packing.run_modules`. An integer keeps all rows."""
        states = self.states.of_step(tandem_step.segments)
        hidden, fed_back = self.head.advanced(input_ids, position_ids, states, tandem_step)
        rows = hidden if isinstance(logits_to_keep, int) else hidden[logits_to_keep]
        return _Output(self.finished(tandem_step.segments, self.head.own_logits(rows), fed_back)[None])

    def computed(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """Computes a pass and nothing else, so that it can be traced.

        Args:
            token_ids: int64 [1, tokens]
            positions: int64 [1, tokens]
            states: [tokens, state_size], as `PairedStates.of_step` gives them.
            step: see `DraftHead.advanced`.

        Returns:
            Logits of what the head can say, [1, tokens, width], and the states of a proposal's next pass, [tokens,
            state_size]; `finished` takes both.
        """
        hidden, fed_back = self.head.advanced(token_ids, positions, states, step)
        return self.head.own_logits(hidden)[None], fed_back

    def finished(self, segments: SequenceOf[Segment], own_logits: Tensor, fed_back: Tensor) -> Tensor:
        """Keeps what a pass feeds back, and returns its logits, [rows, tokens_per_pass * vocabulary_size]. Once more
        with the same pass is the same as once."""
        self.states.keep(segments, fed_back)
        return self.head.widened(own_logits)


class BlockModel(HeadModel):
    """The same for a head that proposes blocks."""

    head: BlockHead

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor | int,
        tandem_step: Packing,
        **_: Any,
    ) -> _Output:
        """See `HeadModel`."""
        states = self.states.of_step(tandem_step.segments)
        is_in_block = self.states.is_past_known(tandem_step.segments)
        hidden = self.head.of_blocks(input_ids, position_ids, states, is_in_block, tandem_step)
        rows = hidden if isinstance(logits_to_keep, int) else hidden[logits_to_keep]
        return _Output(self.head.logits(rows)[None])


def as_model(
    head: DraftHead, states: PairedStates, target: LoadedModel, name: str, architecture: str
) -> LoadedModel:
    """The head as the engine loads a model. Vocabulary, tokenizer and lengths are the target's."""
    info = replace(
        target.info,
        name=name,
        architecture=architecture,
        parameter_count=sum(parameter.numel() for parameter in head.parameters()),
    )
    module = BlockModel(head, states) if isinstance(head, BlockHead) else HeadModel(head, states)
    return LoadedModel(module, info, head.layers, True, target.dtype, target.device)
