"""Tests inside an environment with vLLM (`make test-vllm`); nothing here is collected elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace

HAS_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]


def _interpret_triton() -> None:
    """Let Triton's interpreter run the kernels that the runner V2 has for its requests' states. vLLM asks for a CPU's
    compiler, which Triton's wheel lacks and its interpreter does not need."""
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.backends").backends["cpu"] = SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: True)
    )


if HAS_VLLM:
    from tandem.engine_vllm.adapter import prepare_process, uses_v2_runner
    from tests.paths import DEVICE

    if uses_v2_runner() and DEVICE == "cpu":
        _interpret_triton()
    prepare_process(1, DEVICE, 1)  # before torch is imported
