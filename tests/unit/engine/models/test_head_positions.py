"""Positions reach far: a head in bfloat16 turns its queries and keys by angles that are computed in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bound_service.loading import head_loader
from tandem.engine.models.heads.interface import DraftHead
from tandem.engine.models.loading import load_model
from tests.dflash_models import save_dflash
from tests.eagle_heads import save_eagle
from tests.end_to_end.models import random_model, save_model
from tests.heads import save_eagle3
from tests.medusa_heads import save_medusa
from tests.mtp_models import FAMILIES, mtp_target, save_mtp
from tests.qwen_mtp_models import FAMILIES as QWEN_FAMILIES
from tests.qwen_mtp_models import qwen_target, save_qwen_mtp

POSITION = 5_000
ROUNDING = 2**-8
"""Of a cosine in bfloat16, which has 8 significant bits. Frequencies in bfloat16 would be off by up to 2**-9 of their
size, and angles at `POSITION` by whole radians."""

SAVED: dict[str, Callable[[Path, Any], Path]] = {
    "eagle": save_eagle,
    "eagle3": save_eagle3,
    "medusa": save_medusa,
    "dflash": save_dflash,
}


def narrow_head(method: str, folder: Path) -> DraftHead:
    """A head in bfloat16 beside a target in bfloat16."""
    if method in QWEN_FAMILIES:
        targets = heads = save_qwen_mtp(qwen_target(method, vocabulary=64), folder / "target")
        method = "mtp"
    elif method in FAMILIES:
        targets = heads = save_mtp(mtp_target(method, vocabulary=64), folder / "target")
        method = "mtp"
    else:
        shape = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        model = random_model(1, num_hidden_layers=6, **shape)
        heads = SAVED[method](folder / "head", model)
        targets = save_model(model, folder / "target")
    return head_loader(heads, method)(load_model(targets, dtype="bfloat16", threads=1))


def angles(rotary: Any) -> Tensor:
    """Of each pair of numbers at `POSITION`, in float64, from the numbers of a config."""
    parameters = rotary.config.rope_parameters
    assert parameters["rope_type"] == "default"
    width, theta = 2 * len(rotary.inv_freq), float(parameters["rope_theta"])
    return POSITION / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


@pytest.mark.parametrize("method", [*SAVED, *FAMILIES, *QWEN_FAMILIES])
def test_a_narrow_head_keeps_its_positions(method: str, tmp_path: Path) -> None:
    head = narrow_head(method, tmp_path)
    assert {each.dtype for each in head.parameters()} == {torch.bfloat16}
    rotaries: list[Any] = [module for module in head.modules() if hasattr(module, "inv_freq")]
    assert len(rotaries) == (0 if method == "medusa" else 1)
    for rotary in rotaries:
        states = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
        cosines, sines = rotary(states, position_ids=torch.tensor([[POSITION]]))
        expected = angles(rotary)
        half = len(expected)
        for found, exact in ((cosines, expected.cos()), (sines, expected.sin())):
            assert found.dtype == torch.bfloat16
            assert torch.allclose(found[0, 0, :half].double(), exact, rtol=0, atol=ROUNDING)
