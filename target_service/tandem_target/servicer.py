"""TargetService: translates, nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from tandem.errors import ServiceUnavailableError, TandemError
from tandem.model.types import (
    DenseRow,
    DraftedOutcomes,
    HiddenStates,
    Pending,
    TargetOptions,
    Verification,
    VerifyStep,
)
from tandem.serving.interceptors import Context
from tandem.serving.streams import Repetition, SequenceStreams, ServedSequence, Translation
from tandem.telemetry.streams import NO_SERVICE_OBSERVER, ServiceObserver
from tandem.v1 import target_pb2
from tandem.v1.target_pb2_grpc import TargetServiceServicer
from tandem.wire import target as wire
from tandem.wire.common import file_parts, model_info_to_proto, statistics_to_proto

if TYPE_CHECKING:
    from tandem_target.verifier import Verifier

Said: TypeAlias = Verification | Pending | HiddenStates

VerifiedFor: TypeAlias = ServedSequence[TargetOptions, VerifyStep, Said]


def _label(said: Said, serial: int, led: int) -> Said:
    if not isinstance(said, Verification):
        return said
    # For each answer: `replace` takes three times as long.
    return Verification(
        said.base_length,
        said.rows,
        said.cost,
        said.proposal,
        said.goes_on,
        serial,
        led,
        said.cache,
        said.logprobs,
    )


def _is_kept(said: Said) -> bool:
    """Dense rows take megabytes, so they are computed again."""
    return not (isinstance(said, Verification) and said.rows and isinstance(said.rows[0], DenseRow))


TRANSLATION: Translation[TargetOptions, VerifyStep, Said] = Translation(
    TargetOptions,
    wire.requests_from_proto,
    wire.answers_to_proto,
    DraftedOutcomes,
    Repetition(
        serial=lambda request: request.serial if isinstance(request, VerifyStep) else 0,
        label=_label,
        is_kept=_is_kept,
        pending=Pending,
    ),
)


def _send_features(sequence: VerifiedFor, answer: Verification) -> None:
    if answer.features is not None:
        for part in answer.features.parts():
            sequence.send_beside(part)


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
        return self.streams.serve(request_iterator, self.serve_sequence, TRANSLATION)

    async def serve_sequence(self, sequence: VerifiedFor) -> None:
        options = sequence.options
        weights = self.verifier.model_info.weights
        if weights is not None and options.weights_fingerprint not in ("", weights.fingerprint):
            raise ServiceUnavailableError(
                f"the target has the weights {weights.fingerprint[:12]} by now; the sequence must be computed by "
                f"{options.weights_fingerprint[:12]}"
            )
        with self._observer.stream(options.request_id, options.traceparent) as stream:

            def on_led(answer: Verification | TandemError) -> None:
                if isinstance(answer, TandemError):
                    sequence.tell(answer)
                else:
                    stream.led(len(answer.rows))
                    _send_features(sequence, answer)
                    sequence.say(answer)

            sequence.is_waiting = lambda: True  # for a place
            async with self.verifier.sequence(options, on_led) as verified:
                stream.opened()
                sequence.is_waiting = verified.waits_for_pages
                sequence.on_note = verified.expect
                async for step in sequence.steps():
                    if verified.confirms(step):
                        sequence.confirm()
                        continue
                    stream.step_arrived()
                    verification = await verified.verify(step)
                    stream.answered(len(verification.rows))
                    _send_features(sequence, verification)
                    await sequence.answer(verification)
                verified.kept_length = sequence.kept_tokens

    async def GetModelInfo(
        self, request: target_pb2.TargetServiceGetModelInfoRequest, context: Context
    ) -> target_pb2.TargetServiceGetModelInfoResponse:
        info = replace(self.verifier.model_info, instance_id=self.streams.instance_id)
        return target_pb2.TargetServiceGetModelInfoResponse(
            model_info=model_info_to_proto(info),
            statistics=statistics_to_proto(self.verifier.kv_usage().statistics),
        )

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for path in self.verifier.tokenizer_files:
            for part in file_parts(path.read_bytes()):
                yield target_pb2.GetTokenizerResponse(file_name=path.name, content=part)
