"""After startup the heap is frozen, so that garbage collection skips it, and later collections are rare."""

from __future__ import annotations

import subprocess
import sys

from tandem.serving.process import YOUNG_OBJECTS

SECONDS = 60

SERVICE = """
import asyncio, gc, weakref
from tandem.serving.process import main
from tandem.serving.server import Service
from tandem.settings import ServerSettings

class Node:
    pass

class Fake(Service):
    name, full_names = "fake", ()

    def __init__(self, settings):
        self.kept = [Node() for _ in range(1000)]

    def register(self, server):
        pass

    async def start(self):
        cycle = Node()
        cycle.itself = cycle
        self.garbage = weakref.ref(cycle)
        self.after = asyncio.create_task(self.tell())

    async def tell(self):
        while not gc.get_freeze_count():
            await asyncio.sleep(0.01)
        looked_at = [each for each in gc.get_objects() if isinstance(each, Node)]
        print("looked at", len(looked_at), "garbage", self.garbage(), "after", gc.get_threshold()[0])
        self.request_drain()

    async def close(self):
        pass

gc.disable()
main(ServerSettings, Fake, ["--port", "0"], "fake")
"""


def test_objects_from_startup_are_not_collected_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SERVICE], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert f"looked at 0 garbage None after {YOUNG_OBJECTS}" in ended.stdout
