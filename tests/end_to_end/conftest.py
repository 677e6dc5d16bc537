"""One target and two drafts for the whole session, and a coordinator for each pair."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.end_to_end.browser import Page, chromium
from tests.end_to_end.processes import NO_KERNELS, Service, address_of, coordinator, of_model, ready
from tests.paths import DEMO_DRAFT, DEMO_TARGET, HELD_OUT_PROMPTS


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts: beginnings of real functions that neither model was trained on."""
    return [entry["prompt"] for entry in json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))]


@pytest.fixture(scope="session")
def target_address() -> str:
    return ready([Service("tandem_target", *of_model(DEMO_TARGET))])[0].address


@pytest.fixture(scope="session")
def draft_address() -> str:
    return ready([Service("tandem_draft", *of_model(DEMO_DRAFT))])[0].address


@pytest.fixture(scope="session")
def address(target_address: str, draft_address: str) -> Iterator[str]:
    """A coordinator over the demo pair that always speculates."""
    with coordinator(target_address, draft_address) as process:
        yield address_of(process)


@pytest.fixture(scope="module")
def url(
    request: pytest.FixtureRequest,
    target_address: str,
    draft_address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The page of a coordinator over the demo pair, with the chat template of the test module."""
    template = tmp_path_factory.mktemp("chat") / "chat.jinja"
    template.write_text(request.module.CHAT_TEMPLATE, encoding="utf-8")
    options = ("--http-port", "0", "--chat-template", str(template))
    with coordinator(target_address, draft_address, *options) as process:
        address_of(process)
        yield process.line("http on ")


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="session")
def paced_pair() -> tuple[str, str]:
    """Addresses of the demo pair with slowed steps, so that any machine has time to draft ahead."""
    # Minimum durations of a verification and of a draft's step, in milliseconds
    pace = ("--pace", "25,1")
    target, draft = ready(
        Service("benchmarks.pace", *of_model(model), "--role", role, *pace, *options)
        for role, model, options in (("target", DEMO_TARGET, NO_KERNELS), ("draft", DEMO_DRAFT, ()))
    )
    return target.address, draft.address
