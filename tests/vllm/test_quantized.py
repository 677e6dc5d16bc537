"""Weights of eight bits: our engine gives the texts that vLLM's own engine gives of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.paths import DEMO_DRAFT
from tests.unit.engine.tiny_models import MAX_LENGTH
from tests.vllm.models import engine_over, prompts, text_of, together

pytestmark = pytest.mark.timeout(1800)

COUNT = 24
DTYPE = "bfloat16"
"""Of all else: on a CPU vLLM's kernel for eight bits takes no float32, and aborts with float16."""


def save_quantized(folder: Path) -> None:
    """The demo draft with a scale for each row of its weights; activations are quantized token by token (W8A8)."""
    shutil.copytree(DEMO_DRAFT, folder, dirs_exist_ok=True)
    tensors = {}
    for key, weight in load_file(DEMO_DRAFT / "model.safetensors").items():
        tensors[key] = weight
        if key.endswith("_proj.weight"):
            scale = weight.float().abs().amax(dim=1, keepdim=True) / 127.0
            tensors[key] = (weight.float() / scale).round().to(torch.int8)
            tensors[f"{key}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def by_vllm(folder: Path, texts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by vLLM's offline engine: its scheduler, its sampler."""
    import vllm

    model: Any = vllm.LLM(
        str(folder),
        dtype=DTYPE,
        max_model_len=MAX_LENGTH,
        kv_cache_memory_bytes=32 << 20,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": text} for text in texts]
    answers = model.generate(asked, sampling, use_tqdm=False)
    model.llm_engine.engine_core.shutdown()
    return [list(answer.outputs[0].token_ids) for answer in answers]


async def test_quantized_weights_give_the_texts_of_vllm_itself(tmp_path: Path) -> None:
    save_quantized(tmp_path)
    texts = prompts(8)
    expected = by_vllm(tmp_path, texts)
    async with engine_over(tmp_path, dtype=DTYPE) as engine:
        nothing: list[list[int]] = [[] for _ in texts]
        for known in (nothing, expected):  # token by token, then by proposals
            works = (text_of(engine, text, COUNT, each) for text, each in zip(texts, known, strict=True))
            assert await together(*works) == expected
