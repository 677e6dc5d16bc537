"""A target that is too old for an option never gets it: the request is refused, or goes elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.errors import InvalidRequestError, TandemError
from tandem.types import GenerationRequest
from tests.service.clients import complete
from tests.service.fakes import FakeTarget, cluster
from tests.service.served import fleet

ADJUSTED = GenerationRequest((5,), max_tokens=8, temperature=0.0, logit_bias={7: 1.0})


def old_target() -> FakeTarget:
    target = FakeTarget()
    target.model_info = replace(target.model_info, features=frozenset(), service_version="0.0.9")
    return target


async def test_an_old_target_refuses_in_a_sentence() -> None:
    target = old_target()
    async with cluster(target, None) as client:
        with pytest.raises(InvalidRequestError, match=r"logit_bias is set; .*\(version 0\.0\.9\) is too old"):
            await complete(client, ADJUSTED)
        assert target.opened == 0
        assert (await complete(client, replace(ADJUSTED, logit_bias={}))).token_ids == (*range(6, 14),)


async def test_a_request_goes_to_a_new_target_beside_an_old_one() -> None:
    old, new = old_target(), FakeTarget()
    async with fleet(old, new) as (client, _):
        for _ in range(3):
            assert (await complete(client, ADJUSTED)).token_ids == (*range(6, 14),)
    assert (old.opened, new.opened) == (0, 3)


async def test_a_sequence_does_not_move_to_an_old_target() -> None:
    old, new = old_target(), FakeTarget()
    new.step_seconds = 0.05
    async with fleet(old, new) as (client, services):
        stream = client.generate(replace(ADJUSTED, max_tokens=50))
        await anext(stream)
        await services[1].stop()
        with pytest.raises(
            TandemError, match=r"no target service could go on|no target service was ready|lost"
        ):
            async for _ in stream:
                pass
    assert old.opened == 0
