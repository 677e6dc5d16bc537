"""`python -m benchmarks.studies.telemetry_sink`: a collector that takes everything and keeps nothing."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

_METHODS = (
    "opentelemetry.proto.collector.trace.v1.TraceService",
    "opentelemetry.proto.collector.metrics.v1.MetricsService",
)


def serve(port: int) -> None:
    """Serve until the process is ended."""
    server = grpc.server(ThreadPoolExecutor(2))
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(
        lambda _request, _context: b""
    )
    for name in _METHODS:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Export": handler}),))
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    sys.stdout.write(f"ready on {address}\n")
    sys.stdout.flush()
    server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log-level")  # as the services are started
    serve(parser.parse_args().port)
