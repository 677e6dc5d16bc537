"""The health check of a container."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.serving.healthcheck import Health, check, credentials_of
from tests.certificates import issued


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def address(servicer: health.HealthServicer) -> Iterator[str]:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_the_exit_code_distinguishes_serving_from_not_serving(
    servicer: health.HealthServicer, address: str
) -> None:
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert check(address) == Health.NOT_SERVING
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert check(address) == Health.SERVING


def test_a_missing_or_silent_server_is_unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert check(address) == Health.UNREACHABLE
        silent.listen()
        assert check(address, timeout_seconds=0.2) == Health.UNREACHABLE


def test_a_server_with_mutual_tls_is_asked_with_the_certificate_that_the_environment_names(
    servicer: health.HealthServicer, tmp_path: Path
) -> None:
    files = issued(tmp_path)
    pair = [(files.key.read_bytes(), files.cert.read_bytes())]
    mutual = grpc.ssl_server_credentials(pair, files.ca.read_bytes(), require_client_auth=True)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', mutual)}"
        server.start()
        environment = {"TANDEM_CLIENT_TLS_CA_FILE": str(files.ca)}
        assert check(address, credentials_of(environment), timeout_seconds=1.0) == Health.UNREACHABLE
        environment["TANDEM_CLIENT_TLS_CERT_FILE"] = str(files.cert)
        environment["TANDEM_CLIENT_TLS_KEY_FILE"] = str(files.key)
        assert check(address, credentials_of(environment)) == Health.SERVING
        server.stop(None).wait()


def test_the_command_exits_with_that_code_and_prints_it_in_words(
    servicer: health.HealthServicer, address: str
) -> None:
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    command = [sys.executable, "-P", "-m", "tandem.serving.healthcheck"]
    done = subprocess.run([*command, address], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "not serving\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: 0 addresses were given; give one, host:port\n")
