"""Records the series that the alerts read from real clusters, for `promtool test rules`.

    python -m tests.deploy.record_series [--minutes 18] [SCENARIO ...]      writes tests/deploy/recorded_series.yml

Scenarios that are not named keep what was recorded of them before.
Each scenario is a cluster of its own: the bundled pair as processes, a coordinator, and clients that ask it all the
time. All run side by side. Their steps last as long as those of larger models, so that it does not depend on the load
of this machine which draft pays. The recording takes as long as it says: no time is compressed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

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
SLOW_PACE = "--pace", "40,60"
"""Of a cluster whose draft costs more than it saves."""


@dataclass(frozen=True)
class Scenario:
    """A cluster and what happens to it."""

    about: str
    has_useless_draft: bool = False
    """True for a draft that is slow and always wrong."""
    policy: str = "adaptive"
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
    "unused": Scenario("A draft that never pays, which the coordinator leaves out.", has_useless_draft=True),
    "slower": Scenario(
        "The same draft, which the coordinator is told to use.",
        has_useless_draft=True,
        policy="fixed",
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
    options = ("--prometheus-port", "0", "--speculation-policy", scenario.policy, *scenario.options)
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


async def record_all(names: Sequence[str], minutes: float) -> dict[str, dict[str, str]]:
    """The series of each scenario, by name."""
    with TemporaryDirectory(prefix="tandem-recording-") as folder:
        useless = write_wrong_draft(Path(folder) / "draft")
        clusters = {name: services_of(SCENARIOS[name], useless) for name in names}
        services = [each for cluster in clusters.values() for each in cluster.values()]
        try:
            await asyncio.to_thread(ready, services)
            recordings = await asyncio.gather(
                *(record(name, SCENARIOS[name], cluster, minutes) for name, cluster in clusters.items())
            )
        finally:
            for service in services:
                service.kill()
    return {name: recording.series() for name, recording in zip(names, recordings, strict=True)}


def services_of(scenario: Scenario, useless: Path) -> dict[str, Service]:
    pace = SLOW_PACE if scenario.has_useless_draft else PACE
    models = {"target": DEMO_TARGET, "draft": useless if scenario.has_useless_draft else DEMO_DRAFT}
    return {
        role: Service("benchmarks.pace", *of_model(model), "--role", role, *pace, "--compile", "off")
        for role, model in models.items()
    }


def write_wrong_draft(folder: Path) -> Path:
    """The bundled draft with the opposite opinion: the original finds least probable what it finds most probable."""
    shutil.copytree(DEMO_DRAFT, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write(recorded: Mapping[str, Any], minutes: float) -> None:
    parts = [
        f"# Written by tests/deploy/record_series.py: {minutes:g} minutes of real clusters, a sample every\n"
        f"# {INTERVAL_SECONDS} s of real time. `1x3` is 1 four times; `_` is a sample that is missing.\n"
    ]
    for name, scenario in SCENARIOS.items():
        text = yaml.safe_dump({name: recorded[name]}, width=10_000, sort_keys=False)
        parts.append(f"\n# {scenario.about}\n{text}")
    RECORDED.write_text("".join(parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", choices=[*SCENARIOS])
    asked = parser.parse_args()
    before = yaml.safe_load(RECORDED.read_text(encoding="utf-8")) if asked.scenarios else {}
    recorded = asyncio.run(record_all(asked.scenarios or [*SCENARIOS], asked.minutes))
    write({**before, **recorded}, asked.minutes)


if __name__ == "__main__":
    main()
