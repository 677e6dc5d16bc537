"""One target and two drafts for the whole session, and a coordinator for each pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.models import random_model, save_model
from tests.end_to_end.processes import Nursery, address_of, coordinator, nursery, ready
from tests.paths import DEMO_DRAFT, DEMO_TARGET, HELD_OUT_PROMPTS


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts: beginnings of real functions that neither model was trained on."""
    return [entry["prompt"] for entry in json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))]


@pytest.fixture(scope="session")
def random_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft: the demo draft's configuration and tokenizer with random weights."""
    return save_model(random_model(seed=1), tmp_path_factory.mktemp("random-draft"))


@pytest.fixture(scope="session")
def services() -> Nursery:
    return nursery()


@pytest.fixture(scope="session")
def target_address(services: Nursery) -> str:
    return ready([services.model_service("target_service", DEMO_TARGET)])[0].address


@pytest.fixture(scope="session")
def draft_address(services: Nursery) -> str:
    return ready([services.model_service("draft_service", DEMO_DRAFT)])[0].address


@pytest.fixture(scope="session")
def random_draft_address(services: Nursery, random_draft_folder: Path) -> str:
    return ready([services.model_service("draft_service", random_draft_folder)])[0].address


@pytest.fixture(scope="session")
def address(target_address: str, draft_address: str) -> Iterator[str]:
    """A coordinator over the demo pair that always speculates."""
    with coordinator(target_address, draft_address) as process:
        yield address_of(process)


@pytest.fixture(scope="session")
def paced_pair(services: Nursery) -> tuple[str, str]:
    """Addresses of the demo pair with slowed steps, so that any machine has time to draft ahead."""
    # Minimum durations of a verification and of a draft's step, in milliseconds
    pace = ("--pace", "25,1")
    target, draft = ready(
        services.model_service("benchmarks.pace", model, "--role", role, *pace)
        for role, model in (("target", DEMO_TARGET), ("draft", DEMO_DRAFT))
    )
    return target.address, draft.address


@pytest.fixture(scope="session")
def random_draft_coordinator(target_address: str, random_draft_address: str) -> Iterator[str]:
    """A coordinator over the demo target and the untrained draft that always speculates."""
    with coordinator(target_address, random_draft_address) as process:
        yield address_of(process)
