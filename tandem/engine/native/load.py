"""Kernels to compute with, or None where torch's own must do."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from tandem.engine.native.build import BuildError, built_kernels
from tandem.engine.native.calls import DTYPES
from tandem.engine.native.check import mismatch
from tandem.engine.native.kernels import Kernels
from tandem.errors import ConfigurationError

logger = logging.getLogger(__name__)


def load_kernels(
    device: torch.device, dtype: torch.dtype, mode: str = "auto", folder: Path | None = None
) -> Kernels | None:
    """Compiles, loads and checks the kernels.

    Args:
        device: where the model is; the kernels serve on a CPU.
        dtype: what it computes in; the kernels serve float32 and bfloat16.
        mode: ``auto``, ``on`` or ``off``.
        folder: where compiled kernels are kept; None for the user's own cache folder.

    Returns:
        None where torch's own must do; a log line says why when it is for want of a compiler or a wrong result.

    Raises:
        ConfigurationError: `mode` is ``on`` and the kernels are not to be had.
    """
    if mode == "off":
        return None
    started = time.perf_counter()
    try:
        if device.type != "cpu" or dtype not in DTYPES:
            raise BuildError(f"there are none for {dtype} on {device}")
        kernels = Kernels(built_kernels(folder))
        if difference := mismatch(kernels):
            raise BuildError(f"their results are not torch's: {difference}")
    except BuildError as error:
        if mode == "on":
            raise ConfigurationError(f"compile is on, but the kernels cannot be used: {error}.") from None
        if device.type == "cpu":
            logger.warning("no compiled kernels; torch's own are used", extra={"reason": str(error)})
        return None
    logger.info("kernels ready", extra={"seconds": round(time.perf_counter() - started, 3)})
    return kernels
