"""Policy gradient through Tandem: generate with a draft, train a step, load the new weights, and again.

The reward of a text is the share of digits among its characters. README.md beside this file says how to run it.

    python examples/rollouts/train.py --root checkpoints --service-token-file token

Under the rule `strict` each text is a function of its seed and the target's weights. So the draft decides how fast a
step is and nothing else: with another draft, or with none, a run has the same texts, rewards and weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.clients import AdminClient, Client
from tandem.clients.client import Completed
from tandem.model.types import GenerationRequest
from tandem.rpc.credentials import Credentials


@dataclass(frozen=True)
class Settings:
    """Options of a run; each is an option of the command line."""

    root: Path
    """Folder for checkpoints; the services have it as --weights-root."""
    service_token_file: Path
    """File with the admin token of the services."""
    address: str = "127.0.0.1:50051"
    """The coordinator."""
    target: Path = Path("models/demo/target")
    """The model to train, which the target service serves."""
    draft: Path = Path("models/demo/draft")
    """The model of the draft service."""
    prompts: Path = Path("models/demo/heldout_prompts.json")
    """Prompts, in JSON: a list of objects with a `prompt`."""
    steps: int = 20
    prompts_per_step: int = 8
    samples: int = 4
    """Texts for each prompt of a step."""
    prompt_tokens: int = 24
    """Tokens of a prompt that are kept."""
    max_tokens: int = 32
    """Tokens of a text."""
    learning_rate: float = 1e-4
    distil_every: int = 0
    """Steps between two distillations of the draft; 0 leaves it as it was."""
    distil_passes: int = 8
    """How often a distillation goes over the texts since the last one."""
    distil_learning_rate: float = 1e-3
    seed: int = 1
    report: Path = Path("report.json")
    """File for what each step has measured."""


@dataclass(frozen=True)
class Rollout:
    """One text, and what training needs to know of it."""

    completed: Completed
    token_ids: tuple[int, ...]
    """Prompt and completion."""
    reward: float


@dataclass(frozen=True)
class Record:
    """Measurements of one step."""

    step: int
    weights: int
    """Version of the target's weights that made the texts."""
    reward: float
    tokens_per_pass: float
    """Tokens for each verification of the target."""
    acceptance: float
    """Share of the draft's tokens that the target accepted."""
    difference: float
    """Largest difference between a token's log probability by Tandem and by the model that is trained."""


def digits(text: str) -> float:
    """The reward: the share of digits among a text's characters."""
    return sum(map(str.isdigit, text)) / max(len(text), 1)


# ---- through Tandem


async def generate(
    client: Client, prompts: Sequence[tuple[int, ...]], settings: Settings, step: int
) -> list[Rollout]:
    """Some texts for each prompt, in order."""
    asked = [prompt for prompt in prompts for _ in range(settings.samples)]
    first_seed = 1_000_000 * settings.seed + step * len(asked)
    requests = [GenerationRequest(prompt, seed=first_seed + number) for number, prompt in enumerate(asked)]
    results = client.generate_many(
        requests,
        max_tokens=settings.max_tokens,
        temperature=1.0,
        rejection_sampling_strategy="strict",
        sampled_logprobs=True,
    )
    found: dict[int, Rollout] = {}
    async for result in results:
        completed = result.completed
        if completed is None:
            raise RuntimeError(f"no text for prompt {result.index}") from result.error
        token_ids = (*asked[result.index], *completed.token_ids)
        found[result.index] = Rollout(completed, token_ids, digits(completed.text))
    return [found[index] for index in sorted(found)]


async def load(admin: AdminClient, role: str, model: Any, step: int, settings: Settings) -> None:
    """Save a model below the services' root, and have all services of the role serve it."""
    source = settings.target if role == "target" else settings.draft
    name = f"{role}-{step % 2}"  # the folder that serves until then stays as it is
    folder = settings.root / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)  # for the tokenizer, which stays
    model.save_pretrained(folder)
    services = Credentials(token_file=settings.service_token_file)
    await admin.load_weights(role, name, services=services)


# ---- training


def logprobs_of(model: Any, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """The model's log probability of each token of the completions, [texts, tokens], and 1 where there is a token."""
    texts = [torch.tensor(rollout.token_ids) for rollout in rollouts]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    places = torch.arange(padded.shape[1])
    lengths = torch.tensor([len(text) for text in texts])
    prompts = torch.tensor([len(each.token_ids) - len(each.completed.token_ids) for each in rollouts])
    is_completion = (places >= prompts[:, None]) & (places < lengths[:, None])
    logits = model(input_ids=padded, attention_mask=(places < lengths[:, None]).long()).logits
    logprobs = logits[:, :-1].log_softmax(dim=-1)
    chosen = logprobs.gather(2, padded[:, 1:, None])[:, :, 0]
    return chosen, is_completion[:, 1:].float()


def train(model: Any, optimizer: torch.optim.Optimizer, rollouts: Sequence[Rollout], samples: int) -> float:
    """One step of REINFORCE, whose baseline is the mean reward of the texts after the same prompt.

    Returns the largest difference between the log probabilities that came with the texts and the model's own.
    """
    rewards = torch.tensor([rollout.reward for rollout in rollouts]).view(-1, samples)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).flatten()
    advantages = advantages / (advantages.std() + 1e-6)
    logprobs, is_completion = logprobs_of(model, rollouts)
    loss: Any = -(advantages[:, None] * logprobs * is_completion).sum() / is_completion.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    # At temperature 1 and without truncation a token is drawn from the model's own distribution.
    told = [number for rollout in rollouts for number in rollout.completed.processed_logprobs]
    own = logprobs.detach()[is_completion.bool()]
    return float((own - torch.tensor(told)).abs().max())


def distil(
    draft: Any, target: Any, rollouts: Sequence[Rollout], optimizer: torch.optim.Optimizer, passes: int
) -> None:
    """Bring the draft's distributions nearer to the target's at the positions of these texts."""
    for _ in range(passes):
        for start in range(0, len(rollouts), 32):
            texts = [torch.tensor(rollout.token_ids) for rollout in rollouts[start : start + 32]]
            padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            is_text = torch.arange(padded.shape[1]) < torch.tensor([len(text) for text in texts])[:, None]
            with torch.no_grad():
                wanted = target(input_ids=padded).logits[is_text].log_softmax(dim=-1)
            found = draft(input_ids=padded).logits[is_text].log_softmax(dim=-1)
            loss: Any = functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# ---- the loop


async def run(settings: Settings) -> list[Record]:
    """Train for some steps."""
    torch.manual_seed(settings.seed)
    target = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(settings.draft, dtype=torch.float32)
    target_optimizer = torch.optim.AdamW(target.parameters(), settings.learning_rate, weight_decay=0.0)
    draft_optimizer = torch.optim.AdamW(draft.parameters(), settings.distil_learning_rate, weight_decay=0.0)
    prompts = read_prompts(settings)
    recent: list[Rollout] = []
    records: list[Record] = []
    async with Client(settings.address) as client, AdminClient(settings.address) as admin:
        # In float32, as they are trained: the folders to begin with may be in bfloat16.
        await load(admin, "target", target, 0, settings)
        await load(admin, "draft", draft, 0, settings)
        for step in range(settings.steps):
            first = step * settings.prompts_per_step
            chosen = [prompts[(first + n) % len(prompts)] for n in range(settings.prompts_per_step)]
            rollouts = await generate(client, chosen, settings, step)
            difference = train(target, target_optimizer, rollouts, settings.samples)
            await load(admin, "target", target, step + 1, settings)
            recent += rollouts
            if settings.distil_every and (step + 1) % settings.distil_every == 0:
                distil(draft, target, recent, draft_optimizer, settings.distil_passes)
                await load(admin, "draft", draft, step + 1, settings)
                recent = []
            records.append(record_of(step, rollouts, difference))
            show(records[-1])
            settings.report.write_text(json.dumps([asdict(each) for each in records], indent=1))
    return records


def read_prompts(settings: Settings) -> list[tuple[int, ...]]:
    """The beginnings of the prompts, as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    texts = [each["prompt"] for each in json.loads(settings.prompts.read_text())]
    return [tuple(tokenizer(text).input_ids[: settings.prompt_tokens]) for text in texts]


def record_of(step: int, rollouts: Sequence[Rollout], difference: float) -> Record:
    summaries = [rollout.completed.summary for rollout in rollouts]
    tokens = sum(summary.completion_tokens for summary in summaries)
    rounds = sum(summary.speculation.rounds for summary in summaries)
    drafted = sum(summary.speculation.drafted for summary in summaries)
    accepted = sum(summary.speculation.accepted for summary in summaries)
    (version,) = {weights.version for summary in summaries for weights in summary.weights}
    return Record(
        step=step,
        weights=version,
        reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
        tokens_per_pass=tokens / max(rounds, 1),
        acceptance=accepted / max(drafted, 1),
        difference=difference,
    )


def show(record: Record) -> None:
    sys.stdout.write(
        f"step {record.step:3}  weights {record.weights:3}  reward {record.reward:.3f}  "
        f"tokens/pass {record.tokens_per_pass:.2f}  accepted {record.acceptance:.0%}  "
        f"largest difference {record.difference:.1e}\n"
    )
    sys.stdout.flush()


def read_settings() -> Settings:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for each in fields(Settings):
        kind = {"Path": Path, "int": int, "float": float}.get(str(each.type), str)
        name = f"--{each.name.replace('_', '-')}"
        if each.default is MISSING:
            parser.add_argument(name, type=kind, required=True)
        else:
            parser.add_argument(name, type=kind, default=each.default, help=f"[{each.default}]")
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    asyncio.run(run(read_settings()))
