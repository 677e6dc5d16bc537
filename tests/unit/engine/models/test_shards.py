"""A checkpoint goes to its device tensor by tensor: no more of it than a shard is in memory beside the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.engine.models import loading
from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine.models.loading import stored_tensors
from tests.unit.engine.conftest import TinyModel
from tests.unit.engine.tiny_models import hf, save_tokenizer

_SHARD_BYTES = 55_000_000

_LOAD_AND_MEASURE = """
import json, sys, threading
import torch
from transformers.models.llama import modeling_llama  # what loading imports is not its own memory
from tandem.engine.models import loading
from tandem.engine.models.checkpoint import open_checkpoint

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def sample():
    while not ended.wait(0.001):
        peak[0] = max(peak[0], resident())

folder, device, dtype = sys.argv[1:]
checkpoint = open_checkpoint(folder)
before = resident()
peak, ended = [before], threading.Event()
threading.Thread(target=sample, daemon=True).start()
module = loading._load_module(checkpoint, torch.device(device), getattr(torch, dtype))
ended.set()
own = sum(p.numel() * p.element_size() for p in module.parameters() if p.device.type == "cpu")
print(json.dumps([peak[0] - before, own]))
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 MB of bfloat16 in four files."""
    folder = tmp_path_factory.mktemp("sharded")
    config = hf.LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=_SHARD_BYTES)
    save_tokenizer(folder)
    assert len(open_checkpoint(folder).weights.files) == 4
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux to tell memory in use")
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", "float32"),
        pytest.param("meta", "bfloat16", marks=pytest.mark.soak),
        pytest.param("cpu", "bfloat16", marks=pytest.mark.soak),
        pytest.param("meta", "float32", marks=pytest.mark.soak),
    ],
)
def test_at_most_a_shard_is_in_memory_beside_the_model(sharded: Path, device: str, dtype: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _LOAD_AND_MEASURE, str(sharded), device, dtype],
        check=True,
        capture_output=True,
        timeout=120,
        cwd=Path(__file__).parents[4],
    )
    peak, own = json.loads(ran.stdout)
    assert peak - own <= 1.5 * _SHARD_BYTES


def test_every_tensor_arrives_on_the_device_itself(llama: TinyModel) -> None:
    module = loading._load_module(open_checkpoint(llama.folder), torch.device("meta"), torch.bfloat16)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    assert {tensor.device.type for tensor in module.buffers()} == {"meta"}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_a_tensor_is_converted_on_the_way(llama: TinyModel) -> None:
    tensors = stored_tensors(open_checkpoint(llama.folder).weights.files, torch.device("cpu"))
    expected = llama.reference.state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert tensors.keys() == expected.keys()
    assert torch.equal(tensors[name][...].to("cpu", torch.bfloat16), expected[name].bfloat16())
    assert torch.equal(tensors[name][...].to(), expected[name])
    assert tensors[name].get_dtype() == "F32"


def test_a_tensor_that_needs_no_conversion_stays_in_its_file(llama: TinyModel) -> None:
    tensors = stored_tensors(open_checkpoint(llama.folder).weights.files, torch.device("cpu"))
    name = "model.norm.weight"
    first, second = (tensors[name][...].to("cpu", torch.float32) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
