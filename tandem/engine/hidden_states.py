"""Takes hidden states of chosen layers out of a target's steps, without a second pass, and keeps them in its pages.

What a head reads of a token lies in the KV arena like the values of one more layer. So it follows rollback, shared
prefixes and preemption without code of its own, and never leaves the device. The layer has a window of one token: where
a step is traced for an execution plan, its attention stores the states and returns them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tandem.engine.kv_cache.arena import KvArena, LayerCache, LayerGeometry, PageWriter
from tandem.engine.kv_cache.sequence import Segment, Sequence
from tandem.engine.models.attention import STEP_ARGUMENT, Scoring
from tandem.engine.models.heads.interface import (
    FINAL_STATE,
    BlockHead,
    DraftHead,
    PassStates,
    StateReader,
    text_config,
)
from tandem.engine.models.loading import LoadedModel
from tandem.engine.steps import BranchStep, Packing
from tandem.errors import ConfigurationError

_KEY_SIZE = 8
"""Width of the additional layer's keys. Its queries see one key each, so any number does."""


class HiddenStateTap:
    """Reads the states while the model's own modules run or are traced."""

    def __init__(self, target: LoadedModel, head: StateReader) -> None:
        if not target.is_packed:
            raise ConfigurationError(
                f"the target {target.info.name} runs its sequences one by one, and a drafting head needs steps that "
                "pack them; choose a target with plain attention, or a standalone draft"
            )
        self.target = target
        self._head = head
        self._layer = SimpleNamespace(layer_idx=len(target.layers))
        """The additional layer, as far as attention functions know a layer."""
        # So that whoever packs or traces the model's linear layers finds those which combine the states.
        target.module.add_module("hidden_state_readers", nn.ModuleList(head.readers))
        self.state_size = head.state_size
        self._storage: LayerCache | None = None
        self._states: dict[int, Tensor] = {}

    @property
    def model(self) -> LoadedModel:
        """The target with one more layer in its cache, for the states. Its modules do not know of it."""
        geometry = LayerGeometry(1, _KEY_SIZE, self.state_size, window=1)
        return replace(self.target, layers=(*self.target.layers, geometry))

    def attach(self, arena: KvArena) -> None:
        """Keeps the states of all steps from now on, in this arena of `model`. To be called once."""
        self._storage = arena.layers[-1]
        module: Any = self.target.module
        layers = _decoder_layers(module)
        for layer_id in self._head.layer_ids:
            if layer_id in (FINAL_STATE, len(layers)):
                # The decoder ends in the last norm
                place = module.get_decoder() if layer_id == FINAL_STATE else layers[-1]
                place.register_forward_hook(partial(self._keep_output, layer_id))
            else:
                keep = partial(self._keep_input, layer_id)
                layers[layer_id].register_forward_pre_hook(keep, with_kwargs=True)
        module.register_forward_hook(self._store, with_kwargs=True)

    def _keep_input(self, layer_id: int, _: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        self._states[layer_id] = arguments[0] if arguments else keywords["hidden_states"]

    def _keep_output(self, layer_id: int, _: nn.Module, __: Any, output: Any) -> None:
        self._states[layer_id] = output if isinstance(output, Tensor) else output[0]

    def _store(self, _: nn.Module, __: tuple[Any, ...], keywords: dict[str, Any], ___: Any) -> None:
        step: Any = keywords.get(STEP_ARGUMENT)
        if step is None or self._storage is None:
            return
        states = [self._states[layer_id][0].to(self.target.dtype) for layer_id in self._head.layer_ids]
        self._states.clear()
        values = self._head.combine(states).to(self.target.dtype)[None, None]
        keys = values[..., :_KEY_SIZE]
        if isinstance(step, Packing):
            spans = step.spans(self._storage.group)
            PageWriter(spans, self.target.device).write(self._storage, keys, values)
        else:
            step.attend(self._layer, keys, keys, values, Scoring())

    def read(self, parts: SequenceOf[tuple[Sequence, int, int]]) -> list[Tensor | None]:
        """The states, [positions, state_size], of parts of the target's sequences: first position, and the one after
        the last. None where they are not there. May be called from any thread.

        The target's engine goes on meanwhile. It takes a page away before it overwrites it, so pages that a sequence
        held before and after the copy held the sequence's own states throughout; on CUDA both threads' work is in
        order on one stream.
        """
        assert self._storage is not None, "attached before any step runs"
        values = self._storage.values
        found: list[Tensor | None] = [None] * len(parts)
        for _ in range(3):  # again where the target's engine has meanwhile replaced a page by an equal one
            slots = {i: _slots(*part) for i, part in enumerate(parts) if found[i] is None}
            present = {i: each for i, each in slots.items() if each is not None}
            if not present:
                break
            places = np.stack(np.divmod(np.concatenate([*present.values()]), values.shape[1]))
            pages, offsets = torch.from_numpy(places).to(values.device)
            pieces = torch.split(values[pages, offsets, 0], [len(each) for each in present.values()])
            for (i, before), piece in zip(present.items(), pieces, strict=True):
                after = _slots(*parts[i])
                if after is not None and np.array_equal(before, after):
                    found[i] = piece
        return found


def _slots(sequence: Sequence, start: int, end: int) -> np.ndarray | None:
    """Slots of the positions; None if their states are not computed."""
    if sequence.is_released or sequence.computed_length < end or sequence.table.capacity < end:
        return None
    return sequence.table.slots(start, end)


def _decoder_layers(module: Any) -> nn.ModuleList:
    count = module.config.get_text_config(decoder=True).num_hidden_layers
    found = (each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    layers = next(found, None)
    if layers is None:
        raise ConfigurationError(
            f"the target {type(module).__name__} has no list of {count} layers whose states a drafting head could read"
        )
    return layers


class StateSource(Protocol):
    """Where a head's states of the target come from: its steps, or another device."""

    @property
    def target(self) -> LoadedModel:
        """The target, as far as a head needs it."""

    @property
    def state_size(self) -> int: ...
    def read(self, parts: SequenceOf[tuple[Any, int, int]]) -> list[Tensor | None]:
        """See `HiddenStateTap.read`."""


@dataclass(slots=True, eq=False)
class Pairing:
    """The states that a head's sequence reads. The caller changes it between jobs, the engine's thread within one."""

    target: Any = None
    """Whatever the source of the states knows them by: the target's sequence, or those that have come."""
    known_length: int = 0
    """Pairs whose state is the target's. Later ones are the proposal's own."""
    own_states: list[Tensor] = field(default_factory=list)
    """The head's states for the pairs from `known_length` on, [state_size] each."""
    branch_states: Tensor | None = None
    """The head's states behind each branch of the last step of branches, [branches, state_size]."""
    is_lost: bool = False
    """True if states of the target were gone when the head wanted to read them."""

    def begin(self, target: Any, known_length: int) -> None:
        self.target = target
        self.known_length = known_length
        self.is_lost = False
        self.own_states.clear()


@dataclass(slots=True, eq=False)
class PairedStates:
    """The states of a head's step."""

    tap: StateSource
    pairings: dict[Sequence, Pairing] = field(default_factory=dict)
    """Pairings by the head's sequence. A sequence without one, as in a trial, reads `any_states`."""

    def of_parts(self, parts: SequenceOf[Segment | BranchStep]) -> Tensor:
        """The state of each pair of a step of segments or of branches, [tokens, state_size]."""
        branches = [part for part in parts if isinstance(part, BranchStep)]
        if branches:
            return torch.cat([self._of_branches(part) for part in branches])
        return self.of_step([part for part in parts if isinstance(part, Segment)])

    def _of_branches(self, part: BranchStep) -> Tensor:
        """A branch goes on from the head's own state behind its trunk, and then from those of its own."""
        pairing = self.pairings.get(part.sequence)
        count = part.token_count
        if pairing is None:
            return self.any_states(count)
        if part.depth == 0:
            places = [length - pairing.known_length for length in part.trunk_lengths[:count]]
            return torch.stack([pairing.own_states[place] for place in places])
        assert pairing.branch_states is not None, "kept by the step before"
        return pairing.branch_states[:count]

    def of_step(self, segments: SequenceOf[Segment]) -> Tensor:
        """The state of each pair of a step, [tokens, state_size]."""
        known = [(segment, self.pairings.get(segment.sequence)) for segment in segments]
        asked = [
            (pairing.target, segment.start, min(segment.end, pairing.known_length))
            for segment, pairing in known
            if pairing is not None and pairing.target is not None and segment.start < pairing.known_length
        ]
        answers = iter(self.tap.read(asked) if asked else ())
        parts: list[Tensor] = []
        for segment, pairing in known:
            if pairing is None or pairing.target is None:
                parts.append(self.any_states(segment.token_count))
                continue
            if segment.start < pairing.known_length:
                states = next(answers)
                pairing.is_lost = pairing.is_lost or states is None
                count = min(segment.end, pairing.known_length) - segment.start
                parts.append(self._zeros(count) if states is None else states)
            first, last = (max(at - pairing.known_length, 0) for at in (segment.start, segment.end))
            if first < last:
                own = pairing.own_states[first:last]
                parts.append(torch.stack(own) if own else self._zeros(last - first))
        return torch.cat(parts)

    def is_past_known(self, segments: SequenceOf[Segment]) -> Tensor:
        """Mask of the tokens that lie behind those whose states are the target's, bool [tokens]."""
        known = [self.pairings.get(segment.sequence, Pairing()).known_length for segment in segments]
        found = [at >= length for own, length in zip(segments, known, strict=True) for at in own.positions()]
        return torch.tensor(found, device=self.tap.target.device)

    def keep_of_parts(self, parts: SequenceOf[Segment | BranchStep], states: Tensor) -> None:
        """Keeps the head's state after each segment, or after each token of branches."""
        branches = [part for part in parts if isinstance(part, BranchStep)]
        if not branches:
            self.keep([part for part in parts if isinstance(part, Segment)], states)
        end = 0
        for part in branches:
            own = states[end : end + part.token_count]
            end += part.token_count
            if (pairing := self.pairings.get(part.sequence)) is not None:
                pairing.branch_states = own.to(self.tap.target.dtype, copy=True)

    def keep(self, segments: SequenceOf[Segment], states: Tensor) -> None:
        """Keeps the head's state after each segment of the step, of its output [tokens, state_size]: a proposal goes
        on with it, in the head's dtype, although by CPU kernels its residual stream is float32."""
        end = 0
        for segment in segments:
            end += segment.token_count
            pairing = self.pairings.get(segment.sequence)
            if pairing is not None and segment.end == pairing.known_length + len(pairing.own_states):
                pairing.own_states.append(states[end - 1].to(self.tap.target.dtype))

    def any_states(self, count: int) -> Tensor:
        """States that are no target's, [count, state_size]: all different, so that a trial sees their use."""
        places = torch.arange(count * self.tap.state_size, dtype=torch.float32)
        return places.mul_(0.7).sin_().view(count, -1).to(self._zeros(0))

    def _zeros(self, count: int) -> Tensor:
        target = self.tap.target
        return torch.zeros(count, self.tap.state_size, dtype=target.dtype, device=target.device)


class LayerStates(StateReader):
    """The states of chosen layers, beside each other."""

    def __init__(self, layer_ids: SequenceOf[int], model: LoadedModel) -> None:
        self.layer_ids = tuple(layer_ids)
        self.state_size = len(self.layer_ids) * text_config(model).hidden_size


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
    ) -> SimpleNamespace:
        """See `tandem.engine.steps.run_modules`. An integer keeps all rows."""
        head = self.head
        parts = tandem_step.parts
        states = self.states.of_parts(parts)
        fed_back = None
        if isinstance(head, BlockHead):
            segments = tandem_step.segments
            is_in_block = self.states.is_past_known(segments)
            hidden = head.of_blocks(input_ids, position_ids, states, is_in_block, tandem_step)
        else:
            hidden, fed_back = head.advance(input_ids, position_ids, states, tandem_step)
        rows = hidden if isinstance(logits_to_keep, int) else hidden[logits_to_keep]
        return SimpleNamespace(logits=self.finished(parts, head.own_logits(rows), fed_back)[None])

    def compute(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        """Computes a pass and nothing else, so that it can be traced: logits of what the head can say, [1, tokens,
        width], and the states of a proposal's next pass, [tokens, state_size]; `finished` takes both."""
        hidden, fed_back = self.head.advance(token_ids, positions, states, step)
        return self.head.own_logits(hidden)[None], fed_back

    def finished(
        self, parts: SequenceOf[Segment | BranchStep], own_logits: Tensor, fed_back: Tensor | None
    ) -> Tensor:
        """Keeps what a pass feeds back, if anything, and returns its logits, [rows, tokens_per_pass * vocabulary_size].
        Once more with the same pass is the same as once."""
        if fed_back is not None:
            self.states.keep_of_parts(parts, fed_back)
        return self.head.widen(own_logits)


def as_model(head: DraftHead, states: PairedStates, name: str) -> LoadedModel:
    """The head as the engine loads a model. Vocabulary, tokenizer and lengths are the target's."""
    target = states.tap.target
    info = replace(
        target.info,
        name=name,
        architecture=head.architecture,
        parameter_count=sum(parameter.numel() for parameter in head.parameters()),
    )
    return LoadedModel(HeadModel(head, states), info, head.layers, True, target.dtype, target.device)
