"""One sequence on a target service."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.completion import Completion
from coordinator.remote_sequence import RemoteSequence
from tandem.channels import errors_of, finish_stream
from tandem.errors import ServiceUnavailableError
from tandem.types import IntArray, Proposal, RowKind, TargetOptions, Verification, VerifyStep
from tandem.v1.target_pb2 import VerifyResponse
from tandem.v1.target_pb2_grpc import TargetServiceStub
from tandem.wire import target as wire


class TargetSequence:
    """Asks a target service for rows over one stream, which lives as long as the sequence."""

    def __init__(
        self,
        stub: TargetServiceStub,
        options: TargetOptions,
        row_kind: RowKind,
        *,
        supports: Callable[[Proposal], tuple[IntArray, ...]],
        with_statistics: bool = False,
        deadline_seconds: float | None = None,
    ) -> None:
        self._call = stub.Verify(timeout=deadline_seconds)
        self._options = options
        self._row_kind = row_kind
        self._supports = supports
        self._with_statistics = with_statistics
        self._remote = RemoteSequence()
        self._opened = False

    async def verify(self, completion: Completion, proposal: Proposal) -> Verification:
        """The target's row at each position of the proposal, and at the one after it.

        Raises:
            TandemError: the service failed, refused, or answered nonsense.
        """
        step = VerifyStep(
            delta=self._remote.delta_to(completion.token_ids, proposal.token_ids),
            row_kind=self._row_kind,
            row_count=len(proposal) + 1,
            supports=self._supports(proposal) if self._row_kind is RowKind.SUPPORT else (),
            with_statistics=self._with_statistics,
        )
        with errors_of("target service"):
            await self._open()
            await self._call.write(wire.step_to_proto(step))
            return await self._answer(step, completion.length)

    async def finish(self) -> None:
        """End the sequence; the service lets go of it at once."""
        if self._opened:
            await finish_stream(self._call, wire.finish_to_proto())

    def cancel(self) -> None:
        """Drop the stream, whatever it is doing. A call that is dropped without this is never collected."""
        self._call.cancel()

    async def _open(self) -> None:
        if not self._opened:
            self._opened = True
            await self._call.write(wire.options_to_proto(self._options))

    async def _answer(self, step: VerifyStep, base_length: int) -> Verification:
        while True:
            response = await self._call.read()
            if not isinstance(response, VerifyResponse):
                raise ServiceUnavailableError("target service: it ended the stream")
            if response.base_length == base_length:
                return wire.verification_from_proto(response, step)
