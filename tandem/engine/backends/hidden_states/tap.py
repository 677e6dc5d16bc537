"""Takes hidden states of chosen layers out of a target's steps, without a second pass, and keeps them in its pages.

What a head reads of a token lies in the KV arena like the values of one more layer. So it follows rollback, shared
prefixes and preemption without code of its own, and never leaves the device. The layer has a window of one token: where
a step is traced for an execution plan, its attention stores the states and returns them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tandem.engine.backends.packing import Packing
from tandem.engine.backends.paged.pages import PageWriter
from tandem.engine.kv_cache.arena import KvArena, LayerCache, LayerGeometry
from tandem.engine.kv_cache.sequence import Sequence
from tandem.engine.models.attention import STEP_ARGUMENT
from tandem.engine.models.heads.interface import FINAL_STATE
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ConfigurationError

_KEY_SIZE = 8
"""Of the additional layer, whose queries see one key each: any number does."""
_READ_ATTEMPTS = 3
"""A page that the target's engine replaces meanwhile by an equal one makes a read start again."""


class StateReader(Protocol):
    """Says which states are kept of each token. A drafting head is one (`DraftHead`)."""

    layer_ids: tuple[int, ...]
    """Residual streams of the model by the number of layers before them, or `FINAL_STATE`."""
    state_size: int
    """Width of what is kept for each token."""

    @property
    def readers(self) -> SequenceOf[nn.Module]:
        """The modules that `combined` calls."""

    def combined(self, hidden_states: SequenceOf[Tensor]) -> Tensor:
        """The numbers to keep, [tokens, state_size], of [tokens, hidden size] for each of `layer_ids`."""


class _StateLayer(nn.Module):
    """The additional layer, as attention functions know a layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


class HiddenStateTap:
    """Reads the states while the model's own modules run or are traced. Captured graphs deliver none, and are left out
    where there is a tap (`Backends.tapped`)."""

    def __init__(self, target: LoadedModel, head: StateReader) -> None:
        """
        Args:
            target: the model, loaded and not yet in use.
            head: chooses the layers, and combines their states.

        Raises:
            ConfigurationError: the model's steps do not pack sequences, so their states cannot be told apart.
        """
        if not target.is_packed:
            raise ConfigurationError(
                f"the target {target.info.name} runs its sequences one by one, and a drafting head needs steps that "
                "pack them; choose a target with plain attention, or a standalone draft"
            )
        self._target = target
        self._head = head
        self._layer = _StateLayer(len(target.layers))
        # So that whoever packs or traces the model's linear layers finds those which combine the states.
        target.module.add_module("hidden_state_readers", nn.ModuleList(head.readers))
        self._storage: LayerCache | None = None
        self._states: dict[int, Tensor] = {}
        """The chosen states of the step in progress, [1, tokens, hidden size]."""

    @property
    def model(self) -> LoadedModel:
        """The target with one more layer in its cache, for the states. Its modules do not know of it."""
        geometry = LayerGeometry(1, _KEY_SIZE, self._head.state_size, window=1)
        return replace(self._target, layers=(*self._target.layers, geometry))

    def attach(self, arena: KvArena) -> None:
        """Keeps the states of all steps from now on, in this arena of `model`. To be called once."""
        self._storage = arena.layers[-1]
        module: Any = self._target.module
        layers = _decoder_layers(module)
        for layer_id in self._head.layer_ids:
            if layer_id == FINAL_STATE:
                _decoder(module).register_forward_hook(self._output_hook(layer_id))
            elif layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(self._input_hook(layer_id), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(self._output_hook(layer_id))
        module.register_forward_hook(self._store, with_kwargs=True)

    def _input_hook(self, layer_id: int) -> Any:
        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._states[layer_id] = arguments[0] if arguments else keywords["hidden_states"]

        return keep

    def _output_hook(self, layer_id: int) -> Any:
        def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._states[layer_id] = output if isinstance(output, Tensor) else output[0]

        return keep

    def _store(self, _: nn.Module, __: tuple[Any, ...], keywords: dict[str, Any], ___: Any) -> None:
        step: Any = keywords.get(STEP_ARGUMENT)
        if step is None or self._storage is None:
            return
        states = [self._states[layer_id][0].to(self._target.dtype) for layer_id in self._head.layer_ids]
        self._states.clear()
        values = self._head.combined(states).to(self._target.dtype)[None, None]
        keys = values[..., :_KEY_SIZE]
        if isinstance(step, Packing):
            PageWriter.of_segments(step.segments, self._target.device).write(self._storage, keys, values)
        else:
            step.attend(self._layer, keys, keys, values, mask=None, scale=None, softcap=None, sinks=None)

    def read(self, parts: SequenceOf[tuple[Sequence, int, int]]) -> list[Tensor | None]:
        """The states of some positions. May be called from any thread.

        The target's engine goes on meanwhile. It takes a page away before it overwrites it, so pages that a sequence
        held before and after the copy held the sequence's own states throughout; on CUDA both threads' work is in
        order on one stream.

        Args:
            parts: sequences of the target, each with its first position and the one after its last.

        Returns:
            [positions, state_size] for each part; None where the states are not there.
        """
        found: list[Tensor | None] = [None] * len(parts)
        wanted = list(range(len(parts)))
        for _ in range(_READ_ATTEMPTS):
            slots = {index: _slots(*parts[index]) for index in wanted}
            present = {index: each for index, each in slots.items() if each is not None}
            if not present:
                break
            joined = self._gathered(np.concatenate([*present.values()]))
            pieces = torch.split(joined, [len(each) for each in present.values()])
            for (index, before), piece in zip(present.items(), pieces, strict=True):
                after = _slots(*parts[index])
                if after is not None and np.array_equal(before, after):
                    found[index] = piece
            wanted = [index for index in present if found[index] is None]
            if not wanted:
                break
        return found

    def _gathered(self, slots: np.ndarray) -> Tensor:
        assert self._storage is not None, "attached before any step runs"
        values = self._storage.values
        pages, offsets = np.divmod(slots, values.shape[1])
        places = torch.from_numpy(np.stack((pages, offsets))).to(values.device)
        return values[places[0], places[1], 0]


def _slots(sequence: Sequence, start: int, end: int) -> np.ndarray | None:
    """Where the positions lie; None if their states are not computed."""
    if sequence.is_released or sequence.computed_length < end or sequence.table.capacity < end:
        return None
    return sequence.table.slots(start, end)


def _decoder(module: Any) -> nn.Module:
    """The part that ends in the last norm: transformers' models without their output layer."""
    decoder: nn.Module = module.get_decoder()
    return decoder


def _decoder_layers(module: Any) -> nn.ModuleList:
    count = module.config.get_text_config(decoder=True).num_hidden_layers
    found = (each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == count)
    layers = next(found, None)
    if layers is None:
        raise ConfigurationError(
            f"the target {type(module).__name__} has no list of {count} layers whose states a drafting head could read"
        )
    return layers
