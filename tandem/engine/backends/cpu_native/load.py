"""Replaces torch's linear layers and attention by the kernels, if these are available and pass their trial."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.engine.backends.cpu_native.backend import CpuNativeBackend, ModuleSteps
from tandem.engine.backends.cpu_native.check import mismatch
from tandem.engine.backends.cpu_native.library.build import BuildError, built_kernels
from tandem.engine.backends.cpu_native.library.bundled import bundled_kernels
from tandem.engine.backends.cpu_native.library.calls import DTYPES
from tandem.engine.backends.cpu_native.library.kernels import Kernels
from tandem.engine.backends.cpu_native.linear import pack_linears, unpack_linears
from tandem.engine.backends.cpu_native.plans.trace import Trace
from tandem.engine.backends.eager.backend import eager_backend
from tandem.engine.backends.interface import StepBackend
from tandem.engine.backends.trial import DistrustedError, Reference, trusted
from tandem.engine.kv_cache.arena import KvArena
from tandem.engine.models.loading import LoadedModel
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeModel:
    """A model whose linear layers are packed for the kernels."""

    model: LoadedModel
    kernels: Kernels
    reference: Reference
    trace: Trace | None
    """None compiles no execution plans."""

    def backend(self, arena: KvArena) -> StepBackend | None:
        """The backend of an arena; None for a model whose attention cannot be packed."""
        if not self.model.is_packed:
            return None
        return CpuNativeBackend(self.model, arena, self.kernels, self.reference, self.trace)


def load_native(model: LoadedModel, mode: str = "auto", folder: Path | None = None) -> NativeModel | None:
    """Finds or compiles the kernels, checks them, and packs the model's linear layers for them.

    Args:
        model: is changed in place, unless None is returned.
        mode: ``auto``, ``on`` or ``off``.
        folder: where kernels compiled here are kept; None for the user's own cache folder.

    Returns:
        None where torch's own must do; a log line says why when it is for want of a compiler or a wrong result.

    Raises:
        ConfigurationError: `mode` is ``on`` and the kernels cannot be used.
    """
    if mode == "off":
        return None
    started = time.perf_counter()
    try:
        kernels = load_kernels(model.device, model.dtype, folder)
        native = _packed(model, kernels)
    except (BuildError, DistrustedError) as error:
        if mode == "on":
            raise ConfigurationError(f"compile is on, but the kernels cannot be used: {error}.") from None
        if model.device.type == "cpu":
            logger.warning("no compiled kernels; torch's own are used", extra={"reason": str(error)})
        return None
    seconds = round(time.perf_counter() - started, 3)
    logger.info("kernels ready", extra={"seconds": seconds, "library": str(kernels.library)})
    return native


def load_kernels(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Kernels:
    """The kernels, each compared with torch: those that came with the installation, or else those compiled here.

    Raises:
        BuildError: there are none for this device and dtype, they cannot be built, or their results are wrong.
    """
    if device.type != "cpu" or dtype not in DTYPES:
        raise BuildError(f"there are none for {dtype} on {device}")
    if bundled := bundled_kernels():
        try:
            return _checked(bundled)
        except BuildError as error:
            logger.warning(
                "the kernels of this installation are not used",
                extra={"library": str(bundled), "reason": str(error)},
            )
    return _checked(built_kernels(folder))


def _checked(library: Path) -> Kernels:
    kernels = Kernels(library)
    if difference := mismatch(kernels):
        raise BuildError(f"their results are not torch's: {difference}")
    return kernels


def _packed(model: LoadedModel, kernels: Kernels) -> NativeModel:
    """Packs the model and runs it beside torch's own layers, whose logits were computed before.

    Raises:
        DistrustedError: the logits differ; the model is unchanged.
    """
    reference = trusted(lambda: Reference(model), lambda _: 0.0, 0.0)

    def steps(model: LoadedModel, arena: KvArena) -> StepBackend:
        return ModuleSteps(model, arena, kernels) if model.is_packed else eager_backend(model, arena)

    def pack(wide_residual: bool) -> None:
        try:
            trusted(
                lambda: pack_linears(model.module, kernels, wide_residual=wide_residual),
                lambda _: reference.error_of(steps),
                reference.limit,
            )
        except DistrustedError:
            unpack_linears(model.module)
            raise

    try:
        pack(wide_residual=model.dtype is torch.bfloat16)
    except DistrustedError as error:
        if model.dtype is not torch.bfloat16:
            raise
        logger.info("the residual stream stays bfloat16", extra={"reason": str(error)})
        pack(wide_residual=False)
    return NativeModel(model, kernels, reference, Trace(model.module))
