"""Records the series that the alerts read from real clusters, for `promtool test rules`.

    python -m tests.deploy.record_series [--minutes 18]      writes tests/deploy/recorded_series.yml

Each scenario is a cluster of its own: the bundled pair as processes, a coordinator, and clients that ask it all the
time. All run side by side. Their steps last as long as those of larger models, so that it does not depend on the load
of this machine which draft pays. The recording takes as long as it says: no time is compressed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, groupby
from pathlib import Path

import yaml

from tandem.clients.client import Client
from tandem.errors import TandemError
from tandem.model.types import GenerationRequest
from tests.deploy.test_dashboard import alerts
from tests.end_to_end.processes import Service, address_of, coordinator, metrics_of, of_model, ready
from tests.paths import DEMO_DRAFT, DEMO_TARGET, HELD_OUT_PROMPTS

RECORDED = Path(__file__).with_name("recorded_series.yml")
INTERVAL_SECONDS = 15
"""Between two samples, as the rules are evaluated (`evaluation_interval` of deploy/prometheus/prometheus.yml)."""
WARM_UP_SECONDS = 30.0
"""Of load before the first sample, since a coordinator tries each draft first."""
PAUSE_SECONDS = 1.0
"""Between two requests of a client, so that all clusters fit on two cores."""
_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.MULTILINE)

PACE = "--pace", "40,1"
"""Milliseconds of a verification and of a draft's step."""


@dataclass(frozen=True)
class Scenario:
    """A cluster and what happens to it."""

    about: str
    options: tuple[str, ...] = ()
    """Of the coordinator."""
    clients: int = 1
    losses: Mapping[str, float] = field(default_factory=dict)
    """Minutes after which a role's service is killed."""


SCENARIOS = {
    "pays": Scenario("A draft that pays."),
    "killed": Scenario(
        "The draft is killed after 4 minutes, the target after 8.", losses={"draft": 4.0, "target": 8.0}
    ),
    "crowded": Scenario(
        "Six clients where one request may run.", options=("--max-concurrent-requests", "1"), clients=6
    ),
}


class Recording:
    """The samples of one coordinator."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._names = set(re.findall(r"tandem_\w+", " ".join(alerts().values())))
        self._count = 0
        self._samples: dict[str, list[str]] = {}

    def add(self, exposition: str) -> None:
        """Add one sample of each series."""
        for found in _SAMPLE.finditer(exposition):
            if found["name"] not in self._names:
                continue
            labels = f'job="coordinator",instance="{self._name}"'
            if found["labels"]:
                labels += f",{found['labels']}"
            samples = self._samples.setdefault(f"{found['name']}{{{labels}}}", [])
            samples += ["_"] * (self._count - len(samples))
            samples.append(f"{float(found['value']):.4g}" if "." in found["value"] else found["value"])
        self._count += 1

    def series(self) -> dict[str, str]:
        """The values of each series in promtool's notation."""
        return {name: shorten(self._samples[name]) for name in sorted(self._samples)}


def shorten(samples: Sequence[str]) -> str:
    """The samples with one word for each run: `1x3` is 1 four times, `_x3` three samples that are missing."""
    words = []
    for value, run in groupby(samples):
        count = len(list(run))
        if value == "_":
            words.append(f"_x{count}")
        else:
            words.append(f"{value}x{count - 1}" if count > 1 else value)
    return " ".join(words)


@asynccontextmanager
async def asking(address: str, clients: int) -> AsyncIterator[None]:
    """Clients that ask until the block ends, whether they are answered or not."""
    prompts = [entry["prompt"] for entry in json.loads(HELD_OUT_PROMPTS.read_text(encoding="utf-8"))]

    async def ask(client: Client, first: int) -> None:
        for prompt in cycle(prompts[first:] + prompts[:first]):
            with suppress(TandemError):
                async for _ in client.generate(GenerationRequest(prompt, max_tokens=48, temperature=0.0)):
                    pass
            await asyncio.sleep(PAUSE_SECONDS)

    async with Client(address) as client:
        tasks = [asyncio.create_task(ask(client, 7 * number)) for number in range(clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def record(name: str, scenario: Scenario, services: Mapping[str, Service], minutes: float) -> Recording:
    recording = Recording(name)
    options = ("--prometheus-port", "0", "--speculation-policy", "adaptive", *scenario.options)
    async with AsyncExitStack() as stack:
        addresses = services["target"].address, services["draft"].address
        process = stack.enter_context(coordinator(*addresses, *options))
        address = await asyncio.to_thread(address_of, process)
        await stack.enter_async_context(asking(address, scenario.clients))
        await asyncio.sleep(WARM_UP_SECONDS)
        began = time.monotonic()
        kills: list[tuple[float, Callable[[], None]]] = [
            (60.0 * after, services[role].kill) for role, after in scenario.losses.items()
        ]
        for step in range(int(60.0 * minutes) // INTERVAL_SECONDS + 1):
            await asyncio.sleep(began + step * INTERVAL_SECONDS - time.monotonic())
            while kills and kills[0][0] <= step * INTERVAL_SECONDS:
                await asyncio.to_thread(kills.pop(0)[1])
            recording.add(await asyncio.to_thread(metrics_of, process))
    return recording


async def record_all(minutes: float) -> str:
    """The recording as the text of its file."""
    models = {"target": DEMO_TARGET, "draft": DEMO_DRAFT}
    clusters = {
        name: {
            role: Service("benchmarks.pace", *of_model(model), "--role", role, *PACE, "--compile", "off")
            for role, model in models.items()
        }
        for name in SCENARIOS
    }
    try:
        await asyncio.to_thread(ready, [each for cluster in clusters.values() for each in cluster.values()])
        recordings = await asyncio.gather(
            *(record(name, SCENARIOS[name], cluster, minutes) for name, cluster in clusters.items())
        )
    finally:
        for cluster in clusters.values():
            for service in cluster.values():
                service.kill()
    parts = [
        f"# Written by tests/deploy/record_series.py: {minutes:g} minutes of real clusters, a sample every\n"
        f"# {INTERVAL_SECONDS} s of real time. `1x3` is 1 four times; `_` is a sample that is missing.\n"
    ]
    for (name, scenario), recording in zip(SCENARIOS.items(), recordings, strict=True):
        text = yaml.safe_dump({name: recording.series()}, width=10_000, sort_keys=False)
        parts.append(f"\n# {scenario.about}\n{text}")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=18.0)
    minutes = parser.parse_args().minutes
    RECORDED.write_text(asyncio.run(record_all(minutes)), encoding="utf-8")


if __name__ == "__main__":
    main()
