"""Which drafting heads the benchmark finds for a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compared_services import Setup
from benchmarks.contenders import CONTENDERS, HEAD_METHODS
from tandem.config.names import MODEL_FREE_METHODS
from tests.paths import DEMO_DRAFT, DEMO_TARGET


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(
        target=DEMO_TARGET,
        draft=DEMO_DRAFT,
        dtype="float32",
        threads=1,
        device="cpu",
        max_length=64,
        max_sequences=2,
        num_speculative_tokens=4,
        logs=tmp_path,
    )


def test_every_drafting_method_is_a_contender() -> None:
    assert set(CONTENDERS) >= {"eagle3", *HEAD_METHODS, *MODEL_FREE_METHODS}


def test_the_demo_targets_head_is_found_beside_it(setup: Setup) -> None:
    assert setup.head_folder("eagle3") == DEMO_TARGET.parent / "eagle3"
    assert CONTENDERS["eagle3"].absent(setup) == ""


def test_a_head_is_named(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))

    assert replace(setup, head=tmp_path).head_folder("eagle3") == tmp_path


def test_a_target_without_a_head_leaves_the_contender_out(setup: Setup, tmp_path: Path) -> None:
    elsewhere = replace(setup, target=tmp_path / "target")

    assert CONTENDERS["eagle3"].absent(elsewhere) == "name the folder of the target's eagle3 head with --head"
    assert CONTENDERS["eagle3"].absent(replace(setup, head=DEMO_DRAFT)) != "", "a draft model is no head"


def test_the_steps_of_a_head_have_no_pace(setup: Setup) -> None:
    reason = CONTENDERS["eagle3"].absent(replace(setup, pace="5,1"))

    assert reason == "--pace does not slow a head, which runs in the target's process"
