"""A token goes with every call, and reflection suffices to build one."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tandem.errors import UnauthenticatedError
from tandem.rpc.credentials import Credentials
from tests.service.flaky_coordinator import BOTH, TOKEN, FlakyCoordinator, completer, serving_with_token


@BOTH
async def test_a_token_goes_with_every_call(kind: str) -> None:
    async with serving_with_token(FlakyCoordinator()) as address:
        assert (await completer(kind, address, credentials=Credentials(token=TOKEN))("x")).text == "a"
        with pytest.raises(UnauthenticatedError):
            await completer(kind, address)("x")


def by_reflection(address: str) -> tuple[set[str], str]:
    """Call the server as grpcurl does: everything about the method comes from reflection."""
    with grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, WithToken())
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("tandem.v1.GenerationService")
        method = service.methods_by_name["Generate"]
        request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        call: Any = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_type.FromString,
        )
        return names, "".join(response.text for response in call(request_type(text="x", max_tokens=5)))


def with_token(continuation: Any, details: Any, request: Any) -> Any:
    """Add the token to a call, to those of reflection too."""
    return continuation(details._replace(metadata=[("authorization", f"Bearer {TOKEN}")]), request)


class WithToken(grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the token to every call."""

    intercept_unary_stream = staticmethod(with_token)  # type: ignore[assignment]
    intercept_stream_stream = staticmethod(with_token)  # type: ignore[assignment]


async def test_a_call_can_be_built_from_reflection_alone() -> None:
    async with serving_with_token(FlakyCoordinator()) as address:
        names, text = await asyncio.to_thread(by_reflection, address)
    assert "tandem.v1.GenerationService" in names
    assert text == "a"
