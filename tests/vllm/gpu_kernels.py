"""vLLM's kernels for the recurrent layers of GPUs, in the place of those that it has for CPUs, by Triton's interpreter.

Kernels that read prompts are left as they are where they can be: nothing is rolled back there.
"""

from __future__ import annotations

import contextlib
import importlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

_OPS = "vllm.model_executor.layers.mamba.ops"


def take_gpu_kernels(patch: pytest.MonkeyPatch) -> None:
    """Change vLLM before it makes a model, and Triton's interpreter where it takes less than its compiler."""
    _let_masks_be_numbers(patch)
    _take_mamba2(patch)
    _take_gated_delta_net(patch)


def _let_masks_be_numbers(patch: pytest.MonkeyPatch) -> None:
    """A comparison of two numbers that the kernel knows is a number to the interpreter, and makes one of a mask."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load
    store = builder.create_masked_store

    def as_mask(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    patch.setattr(
        builder,
        "create_masked_load",
        lambda own, places, mask, *others: load(own, places, as_mask(mask), *others),
    )
    patch.setattr(
        builder,
        "create_masked_store",
        lambda own, places, value, mask, *others: store(own, places, value, as_mask(mask), *others),
    )


def _take_mamba2(patch: pytest.MonkeyPatch) -> None:
    """Convolution and state update. Where vLLM imports them it takes others on a CPU."""
    from vllm.config.mamba import MambaBackendEnum
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setattr(type(current_platform), "is_cpu", lambda own: False)
        convolution = importlib.import_module(f"{_OPS}.causal_conv1d")
        importlib.import_module(f"{_OPS}.mamba_ssm")
    for_prompts = importlib.import_module(f"{_OPS}.cpu.causal_conv1d").causal_conv1d_fn_cpu
    patch.setattr(convolution, "causal_conv1d_fn", for_prompts)
    dispatch = importlib.import_module(f"{_OPS}.ssu_dispatch")
    patch.setitem(dispatch._BACKEND_REGISTRY, MambaBackendEnum.CPU, dispatch.TritonSSUBackend)


def _take_gated_delta_net(patch: pytest.MonkeyPatch) -> None:
    language = importlib.import_module("triton.language")
    layers = importlib.import_module("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn")
    recurrence = importlib.import_module("vllm.third_party.flash_linear_attention.ops.fused_recurrent")
    layer = layers.QwenGatedDeltaNetAttention
    make = layer.__init__

    def make_for_gpus(own: Any, *arguments: Any, **named: Any) -> None:
        make(own, *arguments, **named)
        own._forward_method = own.forward_cuda
        own.gdn_decode_kernel = "triton"
        own.enable_fused_gdn_spec_decode = False

    def read_prompts(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Token by token: vLLM's kernel for chunks takes no float32."""
        ends = named["cu_seqlens"].tolist()
        found = []
        states = []
        for row, (first, last) in enumerate(pairwise(ends)):
            parts = [each[:, first:last].contiguous() for each in (q, k, v, g, beta)]
            output, own = recurrence.fused_recurrent_gated_delta_rule_fwd(
                *parts, k.shape[-1] ** -0.5, initial_state[row : row + 1].contiguous(), False
            )
            found.append(output)
            states.append(own[-1])
        return torch.cat(found, 1), torch.stack(states)

    patch.setattr(layer, "__init__", make_for_gpus)
    patch.setattr(layers, "fla_chunk_gated_delta_rule", read_prompts)
    # The interpreter changes what a module finds in Triton's language, not what it has copied from there
    patch.setattr(recurrence, "exp", lambda value: language.exp(value))
    patch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
