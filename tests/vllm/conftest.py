"""Tests inside an environment with vLLM (`make test-vllm`); nothing here is collected elsewhere."""

from __future__ import annotations

import importlib.util

HAS_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    from tandem.engine_vllm.adapter import prepare_process

    prepare_process(1, "cpu", 1)  # before torch is imported
