"""`python -m benchmarks.studies.mapping`: one draft service for targets with other tokenizers, all of them at once.

    python -m benchmarks.studies.mapping models/demo/target models/demo/unigram             texts and acceptance
    python -m benchmarks.studies.mapping --pace 6.5,1.2 models/demo/target ...              and speed
    python -m benchmarks.studies.mapping --losses --draft models/demo/unigram                where acceptance is lost
    python -m benchmarks.studies.mapping --costs                                            of two large vocabularies

For each target: whether the texts are those of the target alone, and the tokens of a pass. Every text is asked for at
once from all targets, but with a pace one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from benchmarks.common import names, service
from benchmarks.pairs import DEMO
from draft_service.proposers.drafting import SharedTokens
from tandem.client import Client
from tandem.types import Delta, GenerationRequest, SpeculationStats
from tandem.vocabulary import SharedVocabulary, Transcript, Vocabulary

PROMPTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for",
    "Once upon a time there was a little girl who",
    "I love this 👩🏽 and 🎉🎉, said",
    "今天天气很好。我们去",
    '{"name": "Ada", "tags": ["math", "engine"], "address": {"city":',
)
"""Code, prose, emoji, Chinese, JSON."""
CODE = (
    PROMPTS[0],
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    parser =",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as',
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion."""

    token_ids: tuple[int, ...]
    stats: SpeculationStats
    seconds_per_token: float
    """Behind its first chunk."""


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    prompts = CODE if options.pace else PROMPTS
    async with AsyncExitStack() as stack:
        draft = await stack.enter_async_context(_model("draft", options.draft, options))
        words = ["--vocabulary-mapping", options.mapping, "--num-speculative-tokens", str(options.proposed)]
        # Counts do not depend on the time that steps take if the lengths of proposals do not.
        words += [] if options.pace else ["--speculation-policy", "fixed", "--draft-patience-seconds", "60"]
        clients = [
            await stack.enter_async_context(_joined(each, draft, words, options)) for each in options.targets
        ]
        sys.stdout.write(
            f"draft {options.draft}, {options.mapping}, {options.proposed} proposed, {len(prompts)} prompts of "
            f"{options.max_tokens} tokens, pace {options.pace or 'none'}, load {os.getloadavg()[0]:.1f}\n\n"
            "| target | rule | texts of the target alone | accepted | tokens per pass | ahead | ms per token alone "
            "| drafted | speed-up |\n|---|---|---|---|---|---|---|---|---|\n"
        )
        for rule in options.rules:
            temperature = 0.0 if rule == "greedy" else 0.7
            request = GenerationRequest(
                "",
                max_tokens=options.max_tokens,
                temperature=temperature,
                ignore_eos=True,
                rejection_sampling_strategy=rule,
            )
            requests = [replace(request, prompt=prompt, seed=i) for i, prompt in enumerate(prompts)]
            if options.pace:
                for client in clients:  # the controller learns what pays
                    await _completed(client, requests[:2])
                tables = [await _both(client, requests) for client in clients]
            else:
                tables = await asyncio.gather(*(_both(client, requests) for client in clients))
            for target, (drafted, alone) in zip(options.targets, tables, strict=True):
                _show(target, rule, drafted, alone)


def _show(target: Path, rule: str, drafted: Sequence[Answer], alone: Sequence[Answer]) -> None:
    equal = sum(one.token_ids == other.token_ids for one, other in zip(drafted, alone, strict=True))
    tokens = sum(len(each.token_ids) for each in drafted)
    rounds, proposed, accepted = (
        sum(getattr(each.stats, name) for each in drafted) for name in ("rounds", "drafted", "accepted")
    )
    hits = sum(each.stats.ahead.hits for each in drafted)
    slow, quick = (1e3 * sum(one.seconds_per_token for one in each) / len(each) for each in (alone, drafted))
    sys.stdout.write(
        f"| {target} | {rule} | {equal} of {len(alone)} | {accepted / max(proposed, 1):.2f} | {tokens / rounds:.2f} | "
        f"{hits / rounds:.0%} | {slow:.2f} | {quick:.2f} | {slow / quick:.2f} |\n"
    )
    sys.stdout.flush()


async def _both(client: Client, requests: Sequence[GenerationRequest]) -> tuple[list[Answer], list[Answer]]:
    drafted = await _completed(client, requests)
    return drafted, await _completed(client, [replace(each, speculation=False) for each in requests])


async def _completed(client: Client, requests: Sequence[GenerationRequest]) -> list[Answer]:
    found: list[Answer] = []
    for request in requests:
        tokens, first, begun, stats = list[int](), 0, 0.0, SpeculationStats()
        async for chunk in client.generate(request):
            tokens += chunk.token_ids
            if not first:
                first, begun = len(tokens), time.perf_counter()
            if chunk.summary is not None:
                stats = chunk.summary.speculation
        seconds = (time.perf_counter() - begun) / max(len(tokens) - first, 1)
        found.append(Answer(tuple(tokens), stats, seconds))
    return found


@asynccontextmanager
async def _joined(
    target: Path, draft: str, words: Sequence[str], options: argparse.Namespace
) -> AsyncIterator[Client]:
    """A client of a coordinator over this target and the draft that all share."""
    async with AsyncExitStack() as stack:
        verifying = await stack.enter_async_context(_model("target", target, options))
        address = await stack.enter_async_context(
            service("coordinator", "--target-address", verifying, "--draft-address", draft, *words)
        )
        yield await stack.enter_async_context(Client(address))


@asynccontextmanager
async def _model(role: str, folder: Path, options: argparse.Namespace) -> AsyncIterator[str]:
    words = ("--model", str(folder), "--max-length", "1024", "--dtype", options.dtype, "--threads", "1")
    paced = ["benchmarks.pace", "--role", role, "--pace", options.pace]
    async with service(*(paced if options.pace else [f"{role}_service"]), *words) as address:
        yield address


# ---- losses


@torch.inference_mode()
def losses(options: argparse.Namespace, temperature: float = 0.7) -> None:
    """Compare, at each position of the target's texts, a mapped draft's first token with the demo draft's, whose
    tokenizer is the target's."""
    loaded: list[Any] = [
        AutoModelForCausalLM.from_pretrained(each)
        for each in (options.targets[0], DEMO / "draft", options.draft)
    ]
    target, own, draft = loaded
    known, knows = (
        Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")), model.config.vocab_size)
        for folder, model in ((options.targets[0], target), (options.draft, draft))
    )
    shared = SharedVocabulary(knows, known)
    theirs, ours = torch.from_numpy(shared.target_ids), torch.from_numpy(shared.draft_ids)
    firsts = [(i, first) for i in range(knows.size) if (first := shared.first_id(i)) is not None]
    said, by = torch.tensor(firsts).unbind(1)
    rows, found = list[list[float]](), [0.0, 0.0, 0.0]
    for number, prompt in enumerate((*PROMPTS, *CODE)):
        torch.manual_seed(number)
        begin = torch.tensor([[*known.prefix, *known.encode(prompt)]])
        ids = target.generate(
            begin,
            max_new_tokens=options.max_tokens,
            do_sample=True,
            temperature=temperature,
            eos_token_id=None,
        )
        first, tokens = begin.shape[1], ids[0].tolist()
        rival = own(ids).logits[0].double()
        probs, rivals = ((each / temperature).softmax(-1) for each in (target(ids).logits[0].double(), rival))
        transcript = Transcript(shared)
        transcript.apply(Delta(0, tuple(tokens[:first])))
        begun = [*transcript.token_ids]
        for at in range(first, len(tokens)):
            before, is_whole = [*transcript.token_ids], transcript.is_whole
            transcript.apply(Delta(at, (tokens[at],)))
            if not is_whole:
                continue
            p, q = (
                probs[at - 1],
                (draft(torch.tensor([before])).logits[0, -1].double() / temperature).softmax(-1),
            )
            restricted, equal = q[ours] / q[ours].sum(), rivals[at - 1][theirs]
            spelled = torch.zeros_like(p).index_add(0, by, q[said])
            rows.append(
                [
                    float(transcript.token_ids[: len(before)] == before),
                    *(float(torch.minimum(p, each).sum()) for each in (rivals[at - 1], spelled)),
                    float(torch.minimum(p[theirs], restricted).sum()),
                    float(torch.minimum(p[theirs], equal / equal.sum()).sum()),
                    float(p[theirs].sum()),
                    float(q[ours].sum()),
                ]
            )
        found[0] += len(b"".join(map(known.text, tokens[first:])))
        read = torch.tensor([transcript.token_ids])
        kept = sum(one == other for one, other in zip(begun, transcript.token_ids, strict=False))
        for i, (logits, text, start) in enumerate(
            ((rival, ids, first), (draft(read).logits[0].double(), read, kept)), 1
        ):
            logs = logits.log_softmax(-1)[start - 1 : -1].gather(1, text[0, start:, None])
            found[i] -= float(logs.sum()) / math.log(2)
    sys.stdout.write(
        f"bits per byte of the target's text: demo draft {found[1] / found[0]:.2f}, {options.draft} "
        f"{found[2] / found[0]:.2f}\n\n"
        "| positions | number | accepted of the demo draft | of all of the draft's tokens, by the target's first "
        "| of shared tokens (tli) | of the demo draft, among these | target's mass on these | draft's mass on these |\n"
        f"{'|---' * 8}|\n"
    )
    table = torch.tensor(rows)
    ends = table[:, 0] > 0.0
    for name, which in (
        ("all", ends | ~ends),
        ("the draft's tokens end here", ends),
        ("within a token", ~ends),
    ):
        means = " | ".join(f"{value:.3f}" for value in table[which][:, 1:].mean(0).tolist())
        sys.stdout.write(f"| {name} | {int(which.sum())} | {means} |\n")


# ---- costs


def costs(size: int = 128_000) -> None:
    """Time the mapping of two vocabularies, and what it adds to a proposed token."""
    contents = [_tokenizer(size, seed).to_str() for seed in (1, 2)]
    parsed = [Tokenizer.from_str(content) for content in contents]
    began = time.perf_counter()
    draft, target = map(Vocabulary, parsed)
    shared = SharedVocabulary(draft, target)
    SharedTokens(shared.draft_ids, shared.target_ids)
    mapped = time.perf_counter() - began
    each = shared.seconds_per_token()
    sys.stdout.write(
        f"{size} and {size} tokens, {len(shared.draft_ids)} shared: {mapped:.2f} s to map, "
        f"{1e6 * each:.1f} us per proposed token in rounds of four, load {os.getloadavg()[0]:.1f}\n"
    )


def _tokenizer(size: int, seed: int) -> Tokenizer:
    """A byte-level tokenizer with random merges, half of them the same for every seed."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = {piece: i for i, piece in enumerate(pieces)}, list[tuple[str, str]]()
    while len(pieces) < size:
        chance = (
            random.Random(len(pieces)) if len(pieces) < size // 2 else random.Random(len(pieces) * 10 + seed)
        )
        while True:
            # Most pieces are words' beginnings, so that texts become few tokens.
            one, other = (pieces[int(len(pieces) * chance.random() ** 2)] for _ in range(2))
            if one + other not in known and len(one + other) < 12:
                break
        known[one + other] = len(pieces)
        pieces.append(one + other)
        merges.append((one, other))
    tokenizer = Tokenizer(models.BPE(known, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def parse(arguments: Sequence[str]) -> Any:
    """The settings that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.mapping", description=__doc__)
    add = parser.add_argument
    add("targets", type=Path, nargs="*", default=[DEMO / "target"])
    add("--draft", type=Path, default=DEMO / "draft")
    add("--mapping", default="auto", help="as of the coordinator")
    add("--rules", type=names, default=["greedy", "strict"], help="several with commas")
    add("--proposed", type=int, default=4, help="tokens of a proposal, at most")
    add("--max-tokens", type=int, default=128, help="tokens of each completion")
    add("--dtype", default="float32", help="of all models")
    add("--pace", default="", help="as for tandem bench")
    add(
        "--losses", action="store_true", help="compute where the acceptance of a mapped draft is lost instead"
    )
    add("--costs", action="store_true", help="time the mapping of two vocabularies of 128,000 tokens instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    settings = parse(sys.argv[1:])
    if settings.costs:
        costs()
    elif settings.losses:
        losses(settings)
    else:
        asyncio.run(main(settings))
