"""Rollouts that training can trust: the same seeds give the same texts whatever happens to the services, their log
probabilities are those of the model that is trained, and the example trains through them."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.clients.client import Client, Completed
from tandem.engine.models.loading import LoadedModel
from tandem.model.types import GenerationRequest
from tandem_draft.service import DraftService
from tandem_target.service import TargetService
from tests.end_to_end.models import load_reference
from tests.service.engines import Faults, draft, target, tiny_model
from tests.service.fakes import coordinated
from tests.service.test_examples import example
from tests.service.test_weights import ADMIN, over, root, running
from tests.unit.engine.greedy import plain_logits

__all__ = ["root"]  # a fixture

COUNT = 24
TOKENS = 24


def requests(**options: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            (3, 4, 5 + seed % 7),
            max_tokens=TOKENS,
            temperature=1.0,
            seed=seed,
            rejection_sampling_strategy="strict",
            ignore_eos=True,
            sampled_logprobs=True,
            **options,
        )
        for seed in range(COUNT)
    ]


Kill = Callable[[], Any]


@asynccontextmanager
async def services(
    model: LoadedModel, drafting: LoadedModel, targets: int, drafts: int
) -> AsyncIterator[tuple[Client, dict[str, Kill]]]:
    """A client of a coordinator over so many services, and how to kill the first of each."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        of_targets = [await enter(target(model, Faults(), step_seconds=0.001)) for _ in range(targets)]
        of_drafts = [await enter(draft(drafting)) for _ in range(drafts)]
        addresses = [",".join(address for address, _ in each) for each in (of_targets, of_drafts)]
        client, _ = await enter(coordinated(addresses[0], addresses[1] or None))
        named = (("target", of_targets), ("draft", of_drafts))
        kills: dict[str, Kill] = {name: partial(each[0][1].stop, None) for name, each in named if each}
        yield client, kills


async def complete_many(
    client: Client, asked: Sequence[GenerationRequest], kill: Kill | None = None
) -> list[Completed]:
    """All of them in one batch, in their order; something is killed once a third has ended."""
    found: dict[int, Completed] = {}
    async for result in client.generate_many(asked):
        assert result.completed is not None, result.error
        found[result.index] = result.completed
        if kill is not None and len(found) == len(asked) // 3:
            await kill()
    return [found[index] for index in range(len(asked))]


async def test_the_same_seeds_give_the_same_texts_and_log_probabilities_of_the_model(
    tmp_path: Path, other_model: LoadedModel
) -> None:
    model = tiny_model(tmp_path)
    async with services(model, other_model, 1, 0) as (client, _):
        alone = [await client.complete(each) for each in requests(speculation=False)]
    wanted = [each.token_ids for each in alone]
    shuffled = list(range(COUNT))
    random.Random(1).shuffle(shuffled)
    found: dict[str, list[Completed]] = {"alone": alone}
    async with services(model, other_model, 1, 1) as (client, kills):
        for count in (2, 7):
            found[f"K = {count}"] = await complete_many(client, requests(num_speculative_tokens=count))
        asked = requests()
        mixed = await complete_many(client, [asked[index] for index in shuffled])
        found["shuffled"] = [mixed[shuffled.index(index)] for index in range(COUNT)]
        found["a draft killed"] = await complete_many(client, requests(), kills["draft"])
    async with services(model, other_model, 2, 2) as (client, kills):
        found["two targets"] = await complete_many(client, requests())
        found["a target killed"] = await complete_many(client, requests(), kills["target"])
    assert {
        name: [each.token_ids for each in texts] == wanted for name, texts in found.items()
    } == dict.fromkeys(found, True)
    assert all(
        sum(each.speculation.drafted for each in texts) for name, texts in found.items() if name != "alone"
    )
    reference = load_reference(tmp_path)
    for request, token_ids, *of_ways in zip(requests(), wanted, *found.values(), strict=True):
        logits = plain_logits(reference, (*request.prompt, *token_ids))[len(request.prompt) - 1 :].double()
        rows = zip(logits.log_softmax(dim=-1), token_ids, strict=False)
        expected = [float(row[token_id]) for row, token_id in rows]
        for each in of_ways:
            assert each.raw_logprobs == pytest.approx(expected, abs=1e-4)
            assert each.processed_logprobs == pytest.approx(expected, abs=1e-4)


async def test_the_example_trains_and_loads_the_weights_of_target_and_draft(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps: texts of each step come from the weights of the step before, and a distilled draft changes none."""
    train = example("rollouts/train")
    token_file = tmp_path / "token"
    token_file.write_text(ADMIN)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([{"prompt": "def f(x):"}, {"prompt": "import os"}]))
    reports: dict[int, list[dict[str, float]]] = {}
    for distil_every in (0, 2):
        checkpoints = tmp_path / f"checkpoints-{distil_every}"
        checkpoints.mkdir()
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            served = await enter(running(TargetService, root / "one", checkpoints, monkeypatch))
            drafting = await enter(running(DraftService, root / "draft", checkpoints, monkeypatch))
            client, _ = await enter(over(served, draft=drafting))
            settings = train.Settings(
                root=checkpoints,
                service_token_file=token_file,
                address=client.address,
                target=root / "one",
                draft=root / "draft",
                prompts=prompts,
                steps=3,
                prompts_per_step=2,
                samples=3,
                max_tokens=8,
                learning_rate=1e-2,
                distil_every=distil_every,
                distil_passes=1,
                report=tmp_path / f"report-{distil_every}.json",
            )
            await train.run(settings)
            # The first ones, the same in float32, and one for each load
            assert served.service.models[0].model_info.weights.version == 5
            assert drafting.service.models[0].model_info.weights.version == (2 if distil_every == 0 else 3)
        reports[distil_every] = json.loads(settings.report.read_text())
    for records in reports.values():
        assert [each["weights"] for each in records] == [2, 3, 4]
        assert all(0.0 <= each["reward"] <= 1.0 and each["tokens_per_pass"] >= 1.0 for each in records)
        assert all(each["difference"] < 1e-3 for each in records), "Tandem's and the trained model's agree"
    rewards = [[each["reward"] for each in records] for records in reports.values()]
    assert rewards[0] == rewards[1], "the draft changes no text"
    assert capsys.readouterr().out.count("tokens/pass") == 6
    drawn = example("rollouts/plot").draw({"as it was": reports[0], "distilled & loaded": reports[2]})
    assert drawn.count("<polyline") == 4
    assert "distilled &amp; loaded" in drawn
