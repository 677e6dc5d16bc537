"""The Python client for one draft or target service's weights and sleep.

async with WeightsClient("127.0.0.1:50052", Credentials(token_file=path)) as service:
    await service.load_weights("step-17")
"""

from __future__ import annotations

from typing import Any, Self

from tandem.errors import DeadlineError, InvalidRequestError, ServiceUnavailableError
from tandem.model.types import InFlight, Weights
from tandem.rpc.channels import errors_of, open_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.v1 import weights_pb2
from tandem.v1.weights_pb2_grpc import WeightsServiceStub
from tandem.wire.common import WEIGHTS
from tandem.wire.weights import IN_FLIGHT

CHANGE_TIMEOUT_SECONDS = 600.0
"""For one change: reading the weights of a large model takes minutes, and so may the ends of what is in flight."""


class WeightsClient:
    """Calls a service's WeightsService, with an admin token of the service.

    Every method raises a `TandemError`: InvalidRequestError for weights that cannot serve, CapacityError while another
    change goes on, UnauthenticatedError and PermissionDeniedError for a wrong token and for a folder outside the
    service's root. The old weights then serve on.
    """

    def __init__(
        self, address: str, credentials: Credentials = PLAIN, timeout_seconds: float = CHANGE_TIMEOUT_SECONDS
    ) -> None:
        """Connects on first use."""
        self.address = address
        self._timeout = timeout_seconds
        self._channel = open_channel(address, credentials=credentials)
        self._stub = WeightsServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def load_weights(
        self, path: str, in_flight: InFlight | str = InFlight.FINISH, version: int = 0
    ) -> Weights:
        """Replace the weights by those in a folder of the service's machine, below the root that its operator named.

        Args:
            path: The folder, absolute or relative to the root.
            in_flight: What becomes of open sequences: finish, abort or restart.
            version: Number of the new weights, above the present ones'; 0: the next.
        """
        answer = await self._ask(
            "LoadWeights", path=path, in_flight=IN_FLIGHT.encode(_in_flight(in_flight)), version=version
        )
        return WEIGHTS.from_proto(answer.weights)

    async def sleep(self, level: int = 1, in_flight: InFlight | str = InFlight.FINISH) -> Weights:
        """Free memory until `wake_up`; the service takes no calls meanwhile.

        Args:
            level: 1 frees the KV cache and an accelerator's memory; 2 the weights as well.
            in_flight: What becomes of open sequences: finish, abort or restart.
        """
        answer = await self._ask("Sleep", level=level, in_flight=IN_FLIGHT.encode(_in_flight(in_flight)))
        return WEIGHTS.from_proto(answer.weights)

    async def wake_up(self) -> Weights:
        """Serve again, with the weights from before."""
        return WEIGHTS.from_proto((await self._ask("WakeUp")).weights)

    async def _ask(self, method: str, **fields: object) -> Any:
        request = getattr(weights_pb2, f"{method}Request")(**fields)
        try:
            with errors_of(f"service {self.address}"):
                return await getattr(self._stub, method)(request, timeout=self._timeout)
        except DeadlineError:
            raise ServiceUnavailableError(
                f"service {self.address}: no answer within {self._timeout:g} s"
            ) from None


def _in_flight(value: InFlight | str) -> InFlight:
    try:
        return InFlight(value)
    except ValueError:
        known = ", ".join(each.value for each in InFlight)
        raise InvalidRequestError(f"in_flight is {value!r}; it must be one of {known}") from None
