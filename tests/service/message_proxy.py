"""A proxy between a coordinator and a service that loses or changes whole messages, as TCP and HTTP/2 never do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from tandem.rpc.channels import open_channel

Loses = Callable[[str, bytes], bool]
"""Decides by the method's last name whether a message is lost."""
Edits = Callable[[str, bytes, object], bytes]
"""Changes a message of a method's stream, which the last value identifies."""
Replaces = Callable[[str, bytes, object], Sequence[bytes]]
"""Returns the messages to pass on in place of one."""


_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 100), ("grpc.http2.max_ping_strikes", 0))
"""As our own servers, it takes the pings of coordinators."""


class MessageProxy(grpc.GenericRpcHandler):
    """Passes calls of all methods on to a service, message by message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.address = ""
        self.edit_request: Edits = lambda _, content, __: content
        self.replace_answer: Replaces = lambda _, content, __: (content,)
        self.passes_answers = asyncio.Event()
        """Cleared while answers are held back."""
        self.passes_answers.set()
        self.loses_request: Loses = lambda *_: False
        self.loses_answer: Loses = lambda *_: False
        self.lost = 0
        self.is_closed = False
        """True once no further call is passed on: a stopped server may still begin one that had arrived."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def pass_on(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for content in self._pass_on(method, requests, context):
                yield content

        return grpc.stream_stream_rpc_method_handler(pass_on)

    async def _pass_on(
        self, method: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        if self.is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the proxy is closed")
        call: Any = self._channel.stream_stream(method)()
        name = method.rpartition("/")[2]
        writing = asyncio.create_task(self._write(name, requests, call))
        try:
            async for content in call:
                await self.passes_answers.wait()
                if self.loses_answer(name, content):
                    self.lost += 1
                    continue
                for each in self.replace_answer(name, content, call):
                    yield each
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            writing.cancel()
            call.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, name: str, requests: AsyncIterator[bytes], call: Any) -> None:
        async for content in requests:
            if self.loses_request(name, content):
                self.lost += 1
            else:
                await call.write(self.edit_request(name, content, call))
        await call.done_writing()


@asynccontextmanager
async def message_proxy(address: str) -> AsyncIterator[MessageProxy]:
    server = grpc.aio.server(options=_OPTIONS)
    async with open_channel(address) as channel:
        proxy = MessageProxy(channel)
        server.add_generic_rpc_handlers((proxy,))
        proxy.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            proxy.is_closed = True
            await server.stop(None)


def once(loses: Loses) -> Loses:
    """Lose the first of the messages that a function names."""
    is_over = False

    def decide(name: str, content: bytes) -> bool:
        nonlocal is_over
        found = not is_over and loses(name, content)
        is_over = is_over or found
        return found

    return decide
