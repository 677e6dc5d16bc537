"""The life of a sequence's stream on a service: one Open, any number of steps, one Finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal, Protocol, TypeVar

from tandem.errors import InvalidRequestError

# A cancelled client can look like a clean end of the stream for a moment; within this time the cancellation arrives.
_CANCELLATION_GRACE_SECONDS = 0.05


class SequenceMessage(Protocol):
    """A request of either sequence stream."""

    def WhichOneof(self, oneof_group: Literal["message"]) -> str | None:
        """Which of open, step and finish is set."""


MessageT = TypeVar("MessageT", bound=SequenceMessage)


async def opening(requests: AsyncIterator[MessageT]) -> MessageT:
    """The first message of a stream, which must open a sequence.

    Raises:
        InvalidRequestError: the stream is empty, or begins with something else.
    """
    async for request in requests:
        if (kind := request.WhichOneof("message")) != "open":
            raise InvalidRequestError(
                f"the stream begins with {kind or 'an empty message'}; it must begin with open"
            )
        return request
    raise InvalidRequestError("the stream ended before it began; its first message must be open")


def _ignored(_: object) -> None:
    pass


async def steps(
    requests: AsyncIterator[MessageT], on_finish: Callable[[MessageT], None] = _ignored
) -> AsyncIterator[MessageT]:
    """The steps of an opened stream, until its Finish.

    Args:
        requests: the stream after its Open.
        on_finish: is handed the Finish.

    Raises:
        InvalidRequestError: the message is not a step, or the stream ended without a Finish.
    """
    async for request in requests:
        match request.WhichOneof("message"):
            case "step":
                yield request
            case "finish":
                on_finish(request)
                return
            case kind:
                raise InvalidRequestError(
                    f"{kind or 'an empty message'} came in an open stream; send step or finish"
                )
    await asyncio.sleep(_CANCELLATION_GRACE_SECONDS)
    raise InvalidRequestError("the stream ended without finish")
