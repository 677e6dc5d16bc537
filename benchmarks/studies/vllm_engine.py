"""Times our scheduler around vLLM's forward pass, beside vLLM's own scheduler over the same worker.

Run with a Python that has vLLM: `python -m benchmarks.studies.vllm_engine --enforce-eager`. Both ways continue the same
prompts greedily, alternately, in one process: by our engine, a row a step; and by `EngineCore.step`, which is what
vLLM's offline engine calls.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import several, study_parser
from benchmarks.pairs import DEMO
from tandem.engine_vllm.adapter import prepare_process
from tandem.standard_streams import write_out


@dataclass
class Ran:
    """Times in seconds of one way's runs, and the texts of the last one."""

    seconds: list[float] = field(default_factory=list)
    """Each run."""
    around: list[float] = field(default_factory=list)
    """Each step that extends all sequences, outside vLLM's `execute_model`."""
    model: list[float] = field(default_factory=list)
    """The same steps, inside it."""
    texts: list[list[int]] = field(default_factory=list)


class Clock:
    """Times a runner's `execute_model`."""

    def __init__(self, runner: Any) -> None:
        self.seconds = 0.0
        execute = runner.execute_model

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return execute(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        runner.execute_model = timed

    def take(self) -> float:
        """Seconds since the last time."""
        taken, self.seconds = self.seconds, 0.0
        return taken


async def by_tandem(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Continue the prompts by our engine."""
    from tandem.engine.interface import RowRequest
    from tandem.types import Delta, RowKind, SamplingParams, VerifyStep

    greedy = SamplingParams(temperature=0.0)

    async def text(prompt: list[int]) -> list[int]:
        sequence = await engine.open(len(prompt) + count)
        found: list[int] = []
        delta = Delta(0, prompt)
        while len(found) < count:
            (row,) = (
                await engine.run(sequence, RowRequest(VerifyStep(delta, RowKind.TOKEN, 1), greedy))
            ).rows
            found.append(row.token_id)
            delta = Delta(len(prompt) + len(found) - 1, (row.token_id,))
        engine.release(sequence)
        return found

    return list(await asyncio.gather(*map(text, prompts)))


def by_vllm(core: Any, prompts: list[list[int]], count: int, clock: Clock, ran: Ran) -> list[list[int]]:
    """Continue the prompts by vLLM's own scheduler."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        name = f"{time.perf_counter()}.{number}"
        found[name] = []
        request = EngineCoreRequest(name, prompt, None, sampling, None, time.time(), None, None, None)
        core.add_request(core.preprocess_add_request(request)[0])
    while core.scheduler.has_requests():
        clock.take()
        began = time.perf_counter()
        outputs, _ = core.step()
        seconds, model = time.perf_counter() - began, clock.take()
        answers = [each for group in outputs.values() for each in group.outputs]
        for each in answers:
            found[each.request_id] += each.new_token_ids
        if len(answers) == len(prompts) and min(map(len, found.values())) > 1:
            ran.model.append(model)
            ran.around.append(seconds - model)
    return list(found.values())


async def measure(sequences: int, count: int, rounds: int, model: Any, engine: Any) -> None:
    """Run both ways alternately and print what they took."""
    core = model._core.engine
    clock = Clock(model._core.executor.driver_worker.worker.model_runner)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 2000) for _ in range(32)] for _ in range(sequences)]
    ran = {"tandem": Ran(), "vllm": Ran()}

    def stepped(record: Any) -> None:
        taken = clock.take()
        if record.sequence_count == record.token_count == sequences:
            ran["tandem"].model.append(taken)
            ran["tandem"].around.append(record.seconds - taken)

    engine._on_step = stepped

    for number in range(rounds + 1):
        for name in ran:
            began = time.perf_counter()
            if name == "tandem":
                ran[name].texts = await by_tandem(engine, prompts, count)
            else:
                ran[name].texts = by_vllm(core, prompts, count, clock, ran[name])
            if number:  # the first is to warm up
                ran[name].seconds.append(time.perf_counter() - began)
    own, other = ran["tandem"], ran["vllm"]
    ratios = sorted(b / a for a, b in zip(own.seconds, other.seconds, strict=True))
    write_out(
        f"{sequences:3} sequences: around execute_model {1e3 * median(own.around):.2f} ms by tandem, "
        f"{1e3 * median(other.around):.2f} by vLLM; in it {1e3 * median(own.model):.2f} and "
        f"{1e3 * median(other.model):.2f}; tokens a second by tandem / by vLLM {median(ratios):.2f} ({ratios[0]:.2f} "
        f"to {ratios[-1]:.2f}); equal texts {sum(map(list.__eq__, own.texts, other.texts))} of {sequences}\n"
    )


async def main(arguments: argparse.Namespace) -> None:
    """Load the model once and measure every number of sequences."""
    prepare_process(1, "cpu", 1)
    from tandem.engine.core.engine import RowEngine
    from tandem.engine.interface import EngineSettings
    from tandem.engine_vllm.engine import load_vllm
    from target_service.settings import TargetSettings

    settings = TargetSettings(
        model=arguments.model, engine="vllm", threads=1, max_length=512, max_sequences=32,
        enforce_eager=arguments.enforce_eager, enable_prefix_caching=False,
    )  # fmt: skip
    model = load_vllm(settings, arguments.model, proposal_length=arguments.num_speculative_tokens)
    engine = RowEngine(model, EngineSettings.of(settings))
    engine.start()
    await engine.warm_up()
    for sequences in arguments.sequences:
        await measure(sequences, arguments.tokens, arguments.rounds, model, engine)
    await engine.close()


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=DEMO / "target")
    add("--sequences", type=several(int), default=[1, 16, 32], help="at once, several with commas")
    add("--tokens", type=int, default=64)
    add("--rounds", type=int, default=7)
    add("--enforce-eager", action="store_true")
    add("--num-speculative-tokens", type=int, default=0, help="as a target service has it: 4")
    asyncio.run(main(parser.parse_args()))
