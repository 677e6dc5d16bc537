"""Tests inside an environment with vLLM (`make test-vllm`); nothing here is collected elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

HAS_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


class _NoDriver:
    """Triton's driver of a device that it never runs anything on."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu")


def _interpret_triton() -> None:
    """Let Triton's interpreter run vLLM's kernels for GPUs: those of the runner V2 for its requests' states, and those
    of recurrent layers. vLLM asks for a CPU's compiler, which Triton's wheel lacks and its interpreter does not need.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(driver=_NoDriver)


if HAS_VLLM:
    from tandem.engine_vllm.adapter import prepare_process, uses_v2_runner
    from tests.paths import DEVICE

    if DEVICE == "cpu" and (uses_v2_runner() or os.environ.get("TRITON_INTERPRET") == "1"):
        _interpret_triton()
    prepare_process(1, DEVICE, 1)  # before torch is imported
