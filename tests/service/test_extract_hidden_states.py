"""A target that writes the hidden states of finished requests: the files hold what transformers computes, and no text
changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.clients.client import Completed
from tandem.engine.models.loading import load_model
from tandem.model.types import GenerationRequest
from tandem_target.loading import load_verifier
from tandem_target.servicer import TargetServicer
from tandem_target.settings import TargetSettings
from tests.end_to_end.models import blurred, save_model, six_tokens
from tests.service.clients import complete_all
from tests.service.engines import draft
from tests.service.fakes import coordinated, serving

SECONDS = 120.0
TOKENS = 20
GREEDY = GenerationRequest(
    (3, 4), max_tokens=TOKENS, temperature=0.0, num_speculative_tokens=3, ignore_eos=True
)
PROMPTS = [(1, 2, 3, 4, 5, index % 6, index // 3) * (8 * index + 1) for index in range(4)]
"""The last two begin alike, over more than a page."""
REQUESTS = [replace(GREEDY, prompt=prompt) for prompt in (*PROMPTS, (*PROMPTS[3], 1, 2))]
LAYERS = (0, 2, 4)


def small_model() -> Any:
    return six_tokens(10, 4, 48, max_position_embeddings=256)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target, and a draft that errs often."""
    made = (tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft"))
    return save_model(small_model(), made[0]), save_model(blurred(small_model(), 1, 0.2), made[1])


@asynccontextmanager
async def cluster(folders: tuple[Path, Path], **settings: object) -> AsyncIterator[str]:
    """A coordinator over a target with these settings and a draft."""
    values: dict[str, Any] = {"model": folders[0], "threads": 1, "compile": "off", **settings}
    verifier = load_verifier(TargetSettings(**values))
    servicer = TargetServicer()
    servicer.verifier = verifier
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        await verifier.start()
        stack.push_async_callback(verifier.close)
        target_address, _ = await stack.enter_async_context(serving(servicer))
        drafting = load_model(folders[1], dtype="float32", threads=1)
        draft_address, _ = await stack.enter_async_context(draft(drafting))
        client, _ = await stack.enter_async_context(coordinated(target_address, draft_address))
        yield client.address


def run(
    folders: tuple[Path, Path], requests: Sequence[GenerationRequest], **settings: object
) -> list[Completed]:
    """Complete the first request alone, and then the others at once."""

    async def completed() -> list[Completed]:
        async with cluster(folders, **settings) as address:
            first = await complete_all(address, requests[:1])
            return [*first, *await complete_all(address, requests[1:])]

    return asyncio.run(completed())


def saved(folder: Path, completed: Completed) -> dict[str, Tensor]:
    return load_file(folder / f"{completed.summary.request_id}.safetensors")


@torch.no_grad()
def by_transformers(model: Any, token_ids: Tensor) -> Tensor:
    """The residual stream before each layer and after the last, [tokens, layers, hidden size]."""
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, arguments: last.append(arguments[0]))
    output = model(input_ids=token_ids[None], output_hidden_states=True)
    hook.remove()
    return torch.stack([*output.hidden_states[:-1], *last], dim=2)[0]


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> list[Completed]:
    """By a target that writes nothing."""
    return run(folders, REQUESTS)


@pytest.mark.parametrize("room", ["enough", "little"])
def test_files_hold_the_states_of_the_kept_tokens(
    room: str, folders: tuple[Path, Path], plain: list[Completed], tmp_path: Path
) -> None:
    """Four requests at once, whose proposals are partly rejected and whose prompts share pages; with little room they
    take pages from each other."""
    # Pages of 64 tokens of 4 layers with keys and values of 32 numbers, and three states of 48 with a key of 8.
    of_a_page = 64 * 4 * (4 * 2 * 32 + 3 * 48 + 8)
    limits = {"kv_cache_memory_bytes": 6 * of_a_page} if room == "little" else {}
    model = small_model()
    completed = run(
        folders, REQUESTS, shared_storage_path=tmp_path, eagle_aux_hidden_state_layer_ids=LAYERS, **limits
    )
    assert [each.token_ids for each in completed] == [each.token_ids for each in plain]
    speculation = [each.speculation for each in completed]
    assert any(each.accepted < each.drafted for each in speculation), "some proposals are rejected"
    assert any(each.accepted for each in speculation), "and some are not"
    for request, each in zip(REQUESTS, completed, strict=True):
        tensors = saved(tmp_path, each)
        # The target never reads the last token.
        expected = torch.tensor([*request.prompt, *each.token_ids])[:-1]
        assert torch.equal(tensors["token_ids"], expected)
        states = by_transformers(model, expected)[:, LAYERS]
        assert tensors["hidden_states"].dtype == torch.float32
        torch.testing.assert_close(tensors["hidden_states"], states, atol=2e-4, rtol=2e-4)
    files = list(tmp_path.iterdir())
    assert len(files) == len(REQUESTS), "nothing else is left there"
    (tmp_path / "another").touch()
    assert {path.stat().st_mode for path in files} == {(tmp_path / "another").stat().st_mode}


def test_states_have_the_models_dtype(folders: tuple[Path, Path], tmp_path: Path) -> None:
    [completed] = run(folders, [GREEDY], shared_storage_path=tmp_path, dtype="bfloat16",
                      eagle_aux_hidden_state_layer_ids=(1,))  # fmt: skip
    states = saved(tmp_path, completed)["hidden_states"]
    assert (states.dtype, states.shape) == (torch.bfloat16, (len(GREEDY.prompt) + TOKENS - 1, 1, 48))


def test_a_disk_error_costs_the_file_and_one_log_line(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "states"

    async def completed() -> list[Completed]:
        async with cluster(
            folders, shared_storage_path=folder, eagle_aux_hidden_state_layer_ids=(1,)
        ) as address:
            folder.rmdir()
            return await complete_all(address, REQUESTS[:2])

    with caplog.at_level(logging.WARNING, "tandem_target"):
        found = asyncio.run(completed())
    assert [len(each.token_ids) for each in found] == [TOKENS, TOKENS]
    lines = [record for record in caplog.records if record.message == "hidden states are lost"]
    assert {record.__dict__["request_id"] for record in lines} == {each.summary.request_id for each in found}
    assert len(lines) == len(found)
