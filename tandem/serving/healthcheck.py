"""`python -m tandem.serving.healthcheck ADDRESS`: a container's health check.

Exits 0 when the server serves, 3 when it does not, 4 when it cannot be reached, 2 on wrong usage.
For a server with TLS, set the environment variables TANDEM_CLIENT_TLS_CA_FILE, TANDEM_CLIENT_TLS_CERT_FILE,
TANDEM_CLIENT_TLS_KEY_FILE and TANDEM_CLIENT_TLS_SERVER_NAME.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import ConfigurationError, ProtocolError
from tandem.rpc.channels import open_sync_channel
from tandem.rpc.credentials import PLAIN, Credentials
from tandem.serving.standard_streams import exit_with


class Health(IntEnum):
    """Exit codes."""

    SERVING = 0
    NOT_SERVING = 3
    UNREACHABLE = 4


def check(address: str, credentials: Credentials = PLAIN, timeout_seconds: float = 4.0) -> Health:
    """Ask the server at host:port how it is. The timeout leaves time within the 5 s that containers are given."""
    with open_sync_channel(address, credentials) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds
            )
            is_serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        except (grpc.RpcError, ProtocolError):
            return Health.UNREACHABLE
    return Health.SERVING if is_serving else Health.NOT_SERVING


def credentials_of(environment: Mapping[str, str]) -> Credentials:
    """TLS options from the environment. An empty variable counts as unset."""
    names = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name")
    return Credentials.of({name: environment.get(f"TANDEM_CLIENT_{name.upper()}") or None for name in names})


def main(arguments: Sequence[str]) -> None:
    """Check the given address, print its state in a word, and exit."""
    if len(arguments) != 1:
        exit_with(ConfigurationError(f"{len(arguments)} addresses were given; give one, host:port"), 2)
    try:
        health = check(arguments[0], credentials_of(os.environ))
    except ConfigurationError as error:
        exit_with(error, 2)
        return
    sys.stdout.write(f"{health.name.lower().replace('_', ' ')}\n")
    sys.exit(health)


if __name__ == "__main__":
    main(sys.argv[1:])
