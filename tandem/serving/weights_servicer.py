"""WeightsService of a target or a draft service: translates."""

from __future__ import annotations

import grpc.aio

from tandem.serving.interceptors import Context
from tandem.serving.weights import WeightsControl
from tandem.v1 import weights_pb2, weights_pb2_grpc
from tandem.wire.common import WEIGHTS
from tandem.wire.weights import IN_FLIGHT

WEIGHTS_SERVICE = weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].full_name


def register_weights(server: grpc.aio.Server, control: WeightsControl) -> None:
    """Serve the calls of WeightsService."""
    weights_pb2_grpc.add_WeightsServiceServicer_to_server(WeightsServicer(control), server)


class WeightsServicer(weights_pb2_grpc.WeightsServiceServicer):
    """Translates."""

    def __init__(self, control: WeightsControl) -> None:
        self._control = control

    async def LoadWeights(
        self, request: weights_pb2.LoadWeightsRequest, context: Context
    ) -> weights_pb2.LoadWeightsResponse:
        weights, ended = await self._control.load(
            request.path, IN_FLIGHT.decode(request.in_flight or weights_pb2.IN_FLIGHT_FINISH), request.version
        )
        return weights_pb2.LoadWeightsResponse(weights=WEIGHTS.to_proto(weights), ended_sequence_count=ended)

    async def Sleep(self, request: weights_pb2.SleepRequest, context: Context) -> weights_pb2.SleepResponse:
        in_flight = IN_FLIGHT.decode(request.in_flight or weights_pb2.IN_FLIGHT_FINISH)
        weights, ended = await self._control.sleep(request.level, in_flight)
        return weights_pb2.SleepResponse(weights=WEIGHTS.to_proto(weights), ended_sequence_count=ended)

    async def WakeUp(
        self, request: weights_pb2.WakeUpRequest, context: Context
    ) -> weights_pb2.WakeUpResponse:
        return weights_pb2.WakeUpResponse(weights=WEIGHTS.to_proto(await self._control.wake_up()))
