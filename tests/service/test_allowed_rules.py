"""Acceptance rules that a request may name: by default those under which no draft changes the text."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.acceptance.strategies import STRATEGIES
from tandem.clients.admin_client import AdminClient
from tandem.config.names import AUTO
from tandem.errors import InvalidRequestError
from tandem.model.types import GenerationRequest
from tests.service.clients import complete
from tests.service.fakes import FakeDraft, FakeTarget, fleet
from tests.service.http_cluster import http_cluster, post

LOSSLESS = ["greedy", "residual", "block", "strict", AUTO]
OPERATORS = ["typical-acceptance", "typical_acceptance", "typical", "logit-comparison", "synthetic"]
BODY: dict[str, Any] = {"model": "fake", "prompt": [10], "max_tokens": 3}


def request(rule: str) -> GenerationRequest:
    return GenerationRequest((10,), max_tokens=3, rejection_sampling_strategy=rule)


def test_every_rule_is_either_a_clients_or_the_operators() -> None:
    assert {rule.name for rule in STRATEGIES} < {*LOSSLESS, *OPERATORS}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_lossy_rule_in_a_request_is_refused_with_the_list(temperature: float) -> None:
    async with http_cluster(FakeTarget(), FakeDraft()) as cluster:
        for rule in OPERATORS:
            status, error = await post(
                cluster, **BODY, temperature=temperature, rejection_sampling_strategy=rule
            )
            assert status == 400
            assert error["message"] == (
                f"rejection_sampling_strategy is '{rule}'; this coordinator allows {', '.join(LOSSLESS)}"
            )
        for rule in LOSSLESS:
            answer = await cluster.http.post(
                "/v1/completions", json=BODY | {"rejection_sampling_strategy": rule}
            )
            assert answer.status_code == 200, answer.text


async def test_grpc_refuses_it_as_http_does_and_the_operator_allows_it_while_it_runs() -> None:
    async with fleet(FakeTarget(), FakeDraft()) as (client, *_), AdminClient(client.address) as admin:
        with pytest.raises(InvalidRequestError, match="this coordinator allows greedy, residual"):
            await complete(client, request("typical-acceptance"))
        (option,) = await admin.update_config({"allowed-rejection-sampling-strategies": "strict, typical"})
        assert option.value == ["strict", "typical-acceptance"]
        await complete(client, request("typical-acceptance"))
        # `residual` is the coordinator's own rule.
        with pytest.raises(
            InvalidRequestError,
            match=r"is 'block'; this coordinator allows strict, typical-acceptance, residual$",
        ):
            await complete(client, request("block"))
        await complete(client, request("residual"))
        with pytest.raises(InvalidRequestError, match=r"allowed_rejection_sampling_strategies\.0 is 'best'"):
            await admin.update_config({"allowed_rejection_sampling_strategies": "best"})
        await admin.update_config({}, ["allowed_rejection_sampling_strategies"])
        with pytest.raises(InvalidRequestError, match="this coordinator allows greedy, residual"):
            await complete(client, request("typical-acceptance"))


async def test_a_request_may_name_the_coordinators_own_lossy_rule() -> None:
    options = {"rejection_sampling_strategy": "synthetic", "synthetic_acceptance_rate": 0.5}
    async with (
        fleet(FakeTarget(), FakeDraft(), **options) as (client, *_),
        AdminClient(client.address) as admin,
    ):
        await complete(client, request("synthetic"))
        await admin.update_config(
            {"rejection_sampling_strategy": "typical-acceptance", "synthetic_acceptance_rate": "null"}
        )
        await complete(client, request("typical-acceptance"))
        with pytest.raises(InvalidRequestError, match="is 'synthetic'; this coordinator allows"):
            await complete(client, request("synthetic"))
