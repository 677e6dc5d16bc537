"""Steps: tokens of sequences, packed into one row, and the seam to the backends that run them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.interface import EngineSettings, RowRequest
from tandem.engine.kv_cache.arena import Span
from tandem.engine.kv_cache.sequence import Segment, Sequence, SequenceCache
from tandem.engine.models.attention import STEP_ARGUMENT
from tandem.engine.rows import to_device
from tandem.model.types import ModelInfo, Verification

SMALL_STEP_TOKENS = 8
"""A sequence alone asks for steps of up to this many tokens; torch sets up buffers for each small size."""


@dataclass(frozen=True, slots=True)
class BranchStep:
    """The next token of each branch of a sequence."""

    sequence: Sequence
    token_ids: SequenceOf[int]
    """One for each branch that goes on: the first ones of `trunk_lengths`."""
    trunk_lengths: SequenceOf[int]
    """Number of tokens of the trunk that come before each branch, for all branches that there were at first."""
    depth: int
    max_depth: int
    """Number of steps that there will be; room behind the trunk is needed for as many tokens of each branch."""

    @property
    def room(self) -> int:
        """Tokens behind the trunk that the branches take up in the end."""
        return len(self.trunk_lengths) * self.max_depth

    @property
    def token_count(self) -> int:
        return len(self.token_ids)

    def positions(self) -> list[int]:
        return [length + self.depth for length in self.trunk_lengths[: self.token_count]]

    def span(self, group: int) -> Span:
        written = self.sequence.length + self.depth * len(self.trunk_lengths)
        return self.sequence.tables[group], written, written + self.token_count


@dataclass(frozen=True, slots=True)
class BranchDraws:
    """Draws all tokens of a job's branches in a row, where their logits are."""

    begin: Callable[[Any, Tensor, SequenceOf[int]], Any]
    """Makes what draws (`tandem.engine_vllm.worker.Draws`), for payloads, logits like those given, and counts."""
    payloads: SequenceOf[Any]
    """One for each branch."""
    count: int
    """Tokens of each."""


class Packing:
    """The tokens of a step in one row, part after part."""

    def __init__(self, parts: SequenceOf[Segment | BranchStep]) -> None:
        self.parts = parts
        """In the order in which their tokens are packed; all are segments, or all are branches."""
        self.token_count = sum([part.token_count for part in parts])

    @property
    def segments(self) -> list[Segment]:
        return [part for part in self.parts if isinstance(part, Segment)]

    def token_ids(self) -> list[int]:
        return [token_id for part in self.parts for token_id in part.token_ids]

    def positions(self) -> list[int]:
        return [position for part in self.parts for position in part.positions()]

    def spans(self, group: int) -> list[Span]:
        """Where each part's keys and values go, in a group of layers."""
        return [part.span(group) for part in self.parts]

    def packed_rows(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> list[int]:
        """Where tokens are packed that are counted in another order of the segments."""
        ends = accumulate(part.token_count for part in self.parts)
        firsts = {id(part): end - part.token_count for part, end in zip(self.parts, ends, strict=True)}
        places = [firsts[id(segment)] + i for segment in segments for i in range(segment.token_count)]
        return [places[row] for row in rows]


def run_modules(module: Any, packing: Packing, rows: SequenceOf[int], device: torch.device) -> Tensor:
    """One forward pass by the model's own modules: logits [len(rows), vocabulary_size] of the packed tokens with these
    indices, in the dtype that the module's last layer gives."""
    keeps_all = list(rows) == list(range(packing.token_count))
    numbers = [np.array((packing.token_ids(), packing.positions()), dtype=np.int64)]
    packed, *kept = to_device(numbers if keeps_all else [*numbers, np.array(rows, dtype=np.int64)], device)
    output = module(
        input_ids=packed[:1],
        position_ids=packed[1:],
        # As transformers takes them; 0 stands for all in order, the usual case, and saves a gather.
        logits_to_keep=kept[0] if kept else 0,
        use_cache=False,
        **{STEP_ARGUMENT: packing},
    )
    logits: Tensor = output.logits[0]
    return logits


class StepBackend(ABC):
    """One way to run a step. It finds the keys and values of a segment by itself."""

    warm_up_steps: SequenceOf[tuple[int, ...]] = tuple((size,) for size in range(1, SMALL_STEP_TOKENS + 1))
    """Steps for which the backend prepares something on first use, smallest first; each as the number of tokens of its
    sequences. Those of all but the first are few, as where one reads a prompt beside others that decode."""
    is_warm = False
    """True once those for which there was time have been run: what is prepared from then on delays requests."""
    returns_early: bool = False
    """True if `run` only launches a step, which the host waits for where it reads something of it."""

    can_branch: bool = False
    writes_behind_trunk: bool = False
    """True if a branch's keys and values lie behind the trunk, where its sequence can take them over."""
    draws_branches: bool = False
    """True for `draw_branches`."""

    def prompt_tokens(self, limit: int) -> int:
        """The number of prompt tokens, up to `limit`, that a step should take for this backend to be fast."""
        return limit

    @abstractmethod
    def run(self, segments: SequenceOf[Segment], rows: SequenceOf[int]) -> Tensor:
        """Runs one step. The segments' keys and values are then in the KV cache.

        Returns logits of the tokens with these indices, ascending, counted segment after segment: [len(rows),
        vocabulary_size] in the model's dtype or a wider one; valid until the next step.
        """

    def run_branches(self, parts: SequenceOf[BranchStep]) -> Tensor:
        """Runs one step of branches; see `can_branch`. All tokens of the sequences have to be in the cache. What is
        written behind them is nobody's: the sequences may grow over it.

        Returns the logits that follow each branch's token, as `run` does.
        """
        raise NotImplementedError

    def draw_branches(
        self, parts: SequenceOf[BranchStep], draws: SequenceOf[BranchDraws]
    ) -> list[SequenceOf[Any] | None]:
        """Runs the first step of branches and all that follow, without the host; what was drawn for each part, None
        where there is no room."""
        raise NotImplementedError


class PendingRows(Protocol):
    """Rows of a step that the device may still compute."""

    def read(self) -> list[Verification | None]:
        """Wait for them; one for each request, None where the logits are not finite. Called once, before the next
        step."""


class ModelRunner(Protocol):
    """A model as an engine runs it: here (`Backends`), or by another engine's workers."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def device(self) -> torch.device:
        """Where the engine's thread finds logits."""

    def allocate(self, settings: EngineSettings, max_length: int) -> tuple[SequenceCache, StepBackend]:
        """Take the memory for the KV cache; the backend runs steps over it. Called once; a ConfigurationError says that
        the settings cannot be met."""

    def launch_rows(self, requests: SequenceOf[RowRequest], logits: Any) -> PendingRows:
        """The rows of a step's logits; see `tandem.engine.rows.launch_rows`."""

    def are_finite(self, logits: Any) -> bool:
        """True if every row of a step's logits has a highest one."""

    def close(self) -> None:
        """Release what another engine's workers hold. Called once no step runs any more."""
