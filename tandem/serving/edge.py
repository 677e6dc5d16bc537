"""The servicer's edge: what a handler raises becomes a status code, and nothing internal crosses it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tandem.errors import TandemError, status_code

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@asynccontextmanager
async def errors_to_status(context: Context) -> AsyncIterator[None]:
    """End the call with the status code that the error in the block stands for.

    gRPC would send the text of any other exception to the client, so such a one is logged under an id, and the client
    is told the id.
    """
    try:
        yield
    except TandemError as error:
        await context.abort(status_code(error), str(error))
    except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
        raise
    except Exception:
        error_id = uuid.uuid4().hex[:12]
        logger.exception("unexpected error", extra={"error_id": error_id})
        await context.abort(
            grpc.StatusCode.INTERNAL, f"internal error {error_id}; the server's log tells more"
        )


def traceparent_of(context: Context) -> str:
    """The W3C trace context that the client sent with the call; empty when it sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)
    return ""
