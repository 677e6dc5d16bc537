"""Chooses the step backends of a model, fastest first."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.engine.backends.branches import BranchRunner, EagerBranches
from tandem.engine.backends.cpu_native.backend import CpuNativeBackend
from tandem.engine.backends.cpu_native.branches import NativeBranches
from tandem.engine.backends.cpu_native.load import NativeModel, load_native
from tandem.engine.backends.cpu_native.sampler import KernelSampler
from tandem.engine.backends.cuda_graphs.buckets import Bucket
from tandem.engine.backends.cuda_graphs.capture import Capture, graph_capture
from tandem.engine.backends.cuda_graphs.captured_steps import CapturedSteps, GraphContext
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.eager.sampler import TORCH_SAMPLER
from tandem.engine.backends.fused.compiled import compile_layers
from tandem.engine.backends.fused.fuse import fuse
from tandem.engine.backends.hidden_states.tap import HiddenStateTap
from tandem.engine.backends.interface import Sampler, StepBackend
from tandem.engine.backends.trial import Reference
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Backends:
    """The ways to run a model's steps beside its own modules."""

    model: LoadedModel
    native: NativeModel | None = None
    capture: Capture | None = None
    reference: Reference | None = None
    """Of the model as it was loaded, where its layers were replaced since."""
    tap: HiddenStateTap | None = None
    """Takes hidden states out of the steps, for a drafting head."""

    def tapped(self, tap: HiddenStateTap) -> Backends:
        """The ways whose hidden states a tap can take: all but captured graphs."""
        return replace(self, capture=None, tap=tap)

    @property
    def sampler(self) -> Sampler:
        """The fastest for the model's device."""
        return TORCH_SAMPLER if self.native is None else KernelSampler(self.native.kernels)

    def graph_context(
        self, arena: KvArena, buckets: SequenceOf[Bucket], max_length: int
    ) -> GraphContext | None:
        """The parts needed for capturing; None without it."""
        if self.capture is None or not self.model.is_packed:
            return None
        reference = self.reference or Reference(self.model)
        return GraphContext(self.model, arena, reference, buckets, self.capture, max_length)

    def steps(self, arena: KvArena, graphs: GraphContext | None = None) -> list[StepBackend]:
        """The backends of an arena, which must be empty. The last one accepts every step."""
        if self.tap is not None:
            self.tap.attach(arena)
        backends: list[StepBackend] = []
        if graphs is not None:
            backends.append(CapturedSteps(graphs))
        if self.native is not None and (native := self.native.backend(arena)) is not None:
            backends.append(native)
        return [*backends, eager_backend(self.model, arena)]

    def branches(self, arena: KvArena, steps: SequenceOf[StepBackend]) -> BranchRunner | None:
        """Runs branches of an arena's sequences; None where the model's attention cannot be packed.

        Args:
            arena: where the sequences lie.
            steps: the arena's backends, whose execution plans serve branches as well.
        """
        if not self.model.is_packed:
            return None
        eager = EagerBranches(self.model, arena)
        native = next((step for step in steps if isinstance(step, CpuNativeBackend)), None)
        if native is None or native.plans is None or self.native is None:
            return eager
        return NativeBranches(native.plans, eager, arena, self.native.reference)


def choose_backends(
    model: LoadedModel,
    *,
    compile_mode: str = "auto",
    compile_cache: Path | None = None,
    enforce_eager: bool = False,
) -> Backends:
    """The backends that this machine has for a model.

    Args:
        model: its linear layers are packed in place where CPU kernels are used, and fused on a GPU.
        compile_mode: ``auto`` uses CPU kernels where they work, ``on`` demands them, ``off`` leaves all to torch;
            ``layers`` compiles each layer by `torch.compile` on a GPU.
        compile_cache: folder for compiled kernels; None for the user's own.
        enforce_eager: capture no CUDA graphs.

    Raises:
        ConfigurationError: `compile_mode` is ``on`` and the kernels cannot be used, or ``layers`` on a CPU.
    """
    is_on_gpu, compiles_layers = model.device.type == "cuda", compile_mode == "layers"
    if compiles_layers and not is_on_gpu:
        raise ConfigurationError(
            f"compile is layers, which is for a GPU, but the device is {model.device}; it should be auto, on or off."
        )
    native = load_native(model, "off" if compiles_layers else compile_mode, compile_cache)
    reference = fuse(model) if is_on_gpu else None
    if compiles_layers:
        reference = compile_layers(model, reference)
    capture = graph_capture(model.device, enforce_eager=enforce_eager)
    return Backends(model, native, capture, reference)
