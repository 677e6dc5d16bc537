"""Messages of WeightsService."""

from __future__ import annotations

from tandem.model.types import InFlight
from tandem.v1 import weights_pb2
from tandem.wire.converter import enum_codec

IN_FLIGHT = enum_codec(InFlight, weights_pb2.InFlight.DESCRIPTOR, "in_flight")
