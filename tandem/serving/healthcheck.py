"""`python -m tandem.serving.healthcheck ADDRESS`: ask a server whether it serves, for a container's health check.

Exits 0 when it does, 3 when it does not (yet, or any more), 4 when it cannot be reached, 2 on a wrong command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import ConfigurationError
from tandem.settings import exit_with

SERVING = 0
NOT_SERVING = 3
UNREACHABLE = 4

_TIMEOUT_SECONDS = 4.0


def check(address: str, timeout_seconds: float = _TIMEOUT_SECONDS) -> int:
    """The exit code that says how the server at host:port is."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
        except grpc.RpcError:
            return UNREACHABLE
    return SERVING if answer.status == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING


def main(arguments: Sequence[str]) -> None:
    """Check the one address given, tell its state in a word, and exit."""
    if len(arguments) != 1:
        exit_with(ConfigurationError(f"{len(arguments)} addresses were given; give one, host:port"), 2)
    code = check(arguments[0])
    sys.stdout.write(
        {SERVING: "serving", NOT_SERVING: "not serving", UNREACHABLE: "unreachable"}[code] + "\n"
    )
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
