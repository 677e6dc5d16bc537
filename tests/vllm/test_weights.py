"""Weights that change over vLLM: each text is that of the weights which serve, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.errors import InvalidRequestError
from tandem.model.types import GenerationRequest, InFlight
from tandem_draft.service import DraftService
from tandem_target.service import TargetService
from tests.end_to_end.models import load_reference, random_model, save_model
from tests.paths import DEVICE
from tests.service.clients import complete_all
from tests.service.test_weights import over, running, save_spoilt
from tests.unit.engine.greedy import most_probable

pytestmark = pytest.mark.timeout(600)

OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "device": DEVICE,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 64 << 20,
    "enforce_eager": True,
}
SHAPE = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [(5, 6, 7, 300 + 7 * index) for index in range(4)]
REQUESTS = [GenerationRequest(prompt, max_tokens=24, temperature=0.0, ignore_eos=True) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of weights: `one` and `two` of one model, and what must be refused."""
    top = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("one", "two"), 1):
        save_model(random_model(seed, num_hidden_layers=2, initializer_range=0.2, **SHAPE), top / name)
    save_model(random_model(7, num_hidden_layers=3, initializer_range=0.2, **SHAPE), top / "deeper")
    save_spoilt(top)
    return top


async def assert_served(address: str, folder: Path) -> None:
    """The texts are those of the weights in the folder."""
    model = load_reference(folder)
    done = await complete_all(address, REQUESTS)
    for prompt, each in zip(PROMPTS, done, strict=True):
        text = list(each.token_ids)
        assert text == most_probable(model, prompt, text)


async def test_a_target_over_vllm_takes_other_weights_and_sleeps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running(TargetService, root / "one", root, monkeypatch, **OPTIONS) as target,
        over(target, target_wait_seconds=120.0) as (client, _),
        target.admin() as admin,
    ):
        await assert_served(client.address, root / "one")
        for name, reason in {
            "nan": "NaN",
            "missing": "lack the tensor",
            "additional": "tensors that the model which serves does not have",
            "deeper": "tensors that the model which serves does not have",
        }.items():
            with pytest.raises(InvalidRequestError, match=reason):
                await admin.load_weights(name)
        await assert_served(client.address, root / "one")
        await admin.load_weights("two")
        await assert_served(client.address, root / "two")
        await admin.sleep(2, InFlight.FINISH)
        await admin.wake_up()
        await assert_served(client.address, root / "two")


async def test_a_draft_over_vllm_takes_other_weights(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running(DraftService, root / "one", root, monkeypatch, **OPTIONS) as draft,
        draft.admin() as admin,
    ):
        before = draft.service.models[0].model_info.weights
        await admin.load_weights("two")
        after = draft.service.models[0].model_info.weights
        assert after.version == before.version + 1
        assert after.fingerprint != before.fingerprint
