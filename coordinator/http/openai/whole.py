"""An answer that is not streamed: gathered while it is made, and sent in parts once it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.http.bodies.held_bytes import HeldBytes, Share
from coordinator.http.bodies.json_parts import flattened, parts
from coordinator.http.tasks import ClientGoneError, while_connected


class WholeAnswer(Response):
    """Holds what it has gathered of the answer until its client has read it."""

    def __init__(
        self,
        gather: Callable[[Share], Awaitable[None]],
        make_body: Callable[[], dict[str, Any]],
        answers: HeldBytes,
        headers: Mapping[str, str],
    ) -> None:
        """
        Args:
            gather: Gathers the answer, and counts its bytes.
            make_body: The answer once it is complete.
            answers: Bytes of all answers that are not streamed.
            headers: Sent beside the answer's own.
        """
        # Not Response's own: there is no body to render yet.
        self._more_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.status_code = 200
        self.background = None
        self._gather = gather
        self._make_body = make_body
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first.

        Raises:
            CapacityError: too many bytes of such answers are held.
            TandemError: the completion failed.
        """
        with self._answers.share() as share:
            try:
                await while_connected(receive, self._gathered(share))
            except ClientGoneError:
                await Response(status_code=499)(scope, receive, send)  # the client has left
                return
            await self._send(send)

    async def _gathered(self, share: Share) -> None:
        await self._gather(share)

    async def _send(self, send: Send) -> None:
        pieces = list(flattened(self._make_body()))
        size = str(sum(map(len, pieces))).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": [*own, *self._more_headers]})
        for part in parts(pieces):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # a client that reads fast never makes `send` wait
        await send({"type": "http.response.body", "body": b""})
