"""TargetService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

from tandem.errors import TandemError
from tandem.serving.interceptors import Context
from tandem.serving.streams import SequenceStreams, ServedSequence, Translation
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver
from tandem.types import DraftedOutcomes, TargetOptions, Verification, VerifyStep
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceServicer
from tandem.wire import target as wire
from tandem.wire.columns import parts_of
from tandem.wire.common import model_info_to_proto

if TYPE_CHECKING:
    from target_service.verifier import Verifier

VerifiedFor: TypeAlias = ServedSequence[TargetOptions, VerifyStep, Verification]

_TRANSLATION: Translation[TargetOptions, VerifyStep, Verification] = Translation(
    TargetOptions, wire.requests_from_proto, wire.answers_to_proto, DraftedOutcomes
)


class TargetServicer(TargetServiceServicer):
    """Lets coordinators verify proposals."""

    verifier: Verifier
    """Set before the server lets calls through."""

    def __init__(self, observer: ServiceObserver = NO_SERVICE_OBSERVER) -> None:
        self._observer = observer
        self.streams = SequenceStreams()

    def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        return self.streams.serve(request_iterator, self.serve_sequence, _TRANSLATION)

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        options = sequence.options
        with self._observer.stream(options.request_id, options.traceparent) as stream:

            def on_led(answer: Verification | TandemError) -> None:
                if isinstance(answer, TandemError):
                    sequence.tell(answer)
                else:
                    stream.led(len(answer.rows))
                    sequence.say(answer)

            async with self.verifier.sequence(options, on_led) as verified:
                stream.opened()
                sequence.on_note = verified.expect
                async for step in sequence.steps():
                    if verified.confirms(step):
                        continue
                    stream.step_arrived()
                    verification = await verified.verify(step)
                    stream.answered(len(verification.rows))
                    await sequence.answer(verification)
                verified.kept_length = sequence.kept_tokens

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(
            model_info=model_info_to_proto(self.verifier.model_info)
        )

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for path in self.verifier.tokenizer_files:
            for part in parts_of(path.read_bytes()):
                yield target_pb2.GetTokenizerResponse(file_name=path.name, content=part)
