"""The thread that waits for sockets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MESSAGES = 300
PING_PONG = """
import asyncio, importlib, pathlib, sys
importlib.import_module(sys.argv[1])
import grpc, grpc.aio

async def echo(requests, context):
    async for request in requests:
        yield request

def switches():
    total = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "event_engine":
            total += int((task / "status").read_text().partition("\\nvoluntary_ctxt_switches:")[2].split()[0])
    return total

async def main():
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("a", {"b": grpc.stream_stream_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/a/b")()
        before = switches()
        for _ in range(int(sys.argv[2])):
            await call.write(b"")
            await call.read()
        print(switches() - before)
        await call.done_writing()
        await call.code()
    await server.stop(None)

asyncio.run(main())
"""


def wakings(package: str, environment: dict[str, str]) -> int:
    """How often threads of gRPC's event engine were woken by a number of messages there and back."""
    ran = subprocess.run(
        [sys.executable, "-c", PING_PONG, package, str(MESSAGES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Unknown experiment" not in ran.stderr, "gRPC has no such name any more"
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_messages_wake_no_unneeded_thread() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    for package in ("coordinator", "draft_service", "target_service"):
        assert wakings(package, environment) < MESSAGES
    chosen = {**environment, "GRPC_EXPERIMENTS": "event_engine_client,event_engine_listener"}
    assert wakings("coordinator", chosen) > MESSAGES, "the environment decides"
