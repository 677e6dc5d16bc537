"""One target and two drafts for the whole session, and a coordinator for each pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.models import random_model, save_model
from tests.end_to_end.processes import Nursery, address_of, coordinator, nursery
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
    return services.started("target_service", DEMO_TARGET).address


@pytest.fixture(scope="session")
def draft_address(services: Nursery) -> str:
    return services.started("draft_service", DEMO_DRAFT).address


@pytest.fixture(scope="session")
def random_draft_address(services: Nursery, random_draft_folder: Path) -> str:
    return services.started("draft_service", random_draft_folder).address


@pytest.fixture(scope="session")
def address(target_address: str, draft_address: str) -> Iterator[str]:
    """A coordinator over the demo pair that always speculates."""
    with coordinator(target_address, draft_address) as process:
        yield address_of(process)


@pytest.fixture(scope="session")
def paced_pair(services: Nursery) -> tuple[str, str]:
    """Addresses of the demo pair with slowed steps, so that any machine has time to draft ahead."""
    roles = (("target", DEMO_TARGET), ("draft", DEMO_DRAFT))
    made = [services.paced_service(role, model, "25,1") for role, model in roles]
    for each in made:
        each.start()
    for each in made:
        each.await_ready()
    target, draft = made
    return target.address, draft.address


@pytest.fixture(scope="session")
def adaptive_address(target_address: str, draft_address: str) -> Iterator[str]:
    """A coordinator over the demo pair with the default, adaptive policy."""
    with coordinator(target_address, draft_address, "--speculation-policy", "adaptive") as process:
        yield address_of(process)


@pytest.fixture(scope="session")
def random_draft_coordinator(target_address: str, random_draft_address: str) -> Iterator[str]:
    """A coordinator over the demo target and the untrained draft that always speculates."""
    with coordinator(target_address, random_draft_address) as process:
        yield address_of(process)
