"""An EAGLE-3 head proposes what an independent reference does, and the target's greedy text does not change."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.engine.backends.cpu_native.plans import ExecutionPlan
from tests.heads import FLAGS, Eagle3Reference, save_eagle3
from tests.paths import DEMO_EAGLE3, DEMO_TARGET
from tests.unit.bound_service.pairs import Request, check, running, saved_target, small_target

ON, OFF = True, False
VARIANTS = {
    "raw": {},
    "raw, every flag": {
        "norm_before_residual": ON, "norm_before_fc": ON, "norm_output": ON, "own_embedding": ON,
        "layer_ids": (1, 4, 6),
    },
    "raw, a norm for each state": {"fc_norm": ON, "norm_output": ON, "draft_vocabulary": 2048},
    "speculators": {"wrapped": ON},
    "speculators, every flag": {
        "wrapped": ON, "norm_before_residual": OFF, "norm_before_fc": ON, "fc_norm": ON, "norm_output": ON,
    },
    "speculators, one flag": {"wrapped": ON, "norm_output": ON},
}  # fmt: skip
PROMPTS = [(5, 9, 2, 700, 31, 8), (1, 1), (40, 41, 42, 43) * 20]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers, and its folder."""
    model = small_target()
    return model, saved_target(model, tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", VARIANTS)
def test_proposals_are_those_of_the_reference(name: str, target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    head = save_eagle3(tmp_path / "head", model, **VARIANTS[name])  # type: ignore[arg-type]
    asyncio.run(check(model, folder, head, Eagle3Reference(head, model), PROMPTS, 8))


def test_a_head_of_some_tokens_runs_by_execution_plans(
    target: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[int] = []
    replay = ExecutionPlan.replay

    def counted(plan: ExecutionPlan, packing: Any, rows: Any, states: Tensor | None = None) -> Tensor:
        if states is not None:
            replays.append(len(states))
        return replay(plan, packing, rows, states)

    monkeypatch.setattr(ExecutionPlan, "replay", counted)
    model, folder = target
    head = save_eagle3(tmp_path / "head", model, norm_output=True)
    asyncio.run(check(model, folder, head, Eagle3Reference(head, model), PROMPTS, 8, compile="on"))
    assert len(replays) > 3 * 8, "each token of a proposal"
    assert max(replays) > 3, "and the prompts' pairs"


@pytest.mark.parametrize("compile_mode", ["off", "auto"])
def test_accepted_positions_read_the_targets_states(compile_mode: str, tmp_path: Path) -> None:
    """A model of six tokens accepts some proposals, wholly or in part."""
    model = small_target(vocab_size=6)
    head = save_eagle3(tmp_path / "head", model, draft_vocabulary=6)
    folder = saved_target(model, tmp_path / "target")
    prompts = [(1, 2, 3), (4, 5), (0, 0, 1, 5, 5)]
    reference = Eagle3Reference(head, model)
    assert asyncio.run(check(model, folder, head, reference, prompts, 24, compile=compile_mode)) > 5


@pytest.mark.soak
@pytest.mark.parametrize("wrapped", [False, True], ids=["raw", "speculators"])
def test_every_flag_over_many_prompts(wrapped: bool, target: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = target
    prompts = [
        tuple((7 * row + column * column) % 2048 for column in range(2 + 3 * row)) for row in range(20)
    ]
    for number, values in enumerate(product((OFF, ON), repeat=len(FLAGS))):
        flags = dict(zip(FLAGS, values, strict=True))
        head = save_eagle3(tmp_path / f"head{number}", model, wrapped=wrapped, **flags)  # type: ignore[arg-type]
        asyncio.run(check(model, folder, head, Eagle3Reference(head, model), prompts, 64, max_sequences=20))


@pytest.mark.parametrize("compile_mode", ["off", "auto"])
def test_the_bundled_head_proposes_in_bfloat16(compile_mode: str) -> None:
    """By CPU kernels its residual stream is float32, its cache is not."""

    async def run() -> Request:
        async with running(DEMO_TARGET, DEMO_EAGLE3, dtype="bfloat16", compile=compile_mode) as pair:
            request = Request(pair, "request", tuple(range(5, 60)))
            await request.run(24)
            return request

    request = asyncio.run(run())
    lengths = [len(proposal) for _, proposal in request.proposals]
    assert lengths == [0] + [4] * (len(lengths) - 1), "a proposal in every round but the first"
    assert request.accepted > 4
