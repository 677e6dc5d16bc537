"""One draft service for targets with other tokenizers, all of them at once.

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
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import coordinator, markdown_head, markdown_row, model, several, study_parser
from benchmarks.contenders import through_services
from benchmarks.pairs import DEMO
from benchmarks.peers import Outcome, Workload
from draft_service.proposers.drafting import SharedTokens
from tandem.client import Client
from tandem.standard_streams import write_out
from tandem.types import Delta
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


async def main(options: argparse.Namespace) -> None:
    """Measure, and print a table in Markdown."""
    prompts = CODE if options.pace else PROMPTS
    async with AsyncExitStack() as stack:
        draft = await stack.enter_async_context(_model("draft", options.draft, options))
        words = ["--vocabulary-mapping", options.mapping, "--num-speculative-tokens", str(options.proposed)]
        # Counts do not depend on the time that steps take if the lengths of proposals do not.
        words += [] if options.pace else ["--speculation-policy", "fixed", "--draft-patience-seconds", "60"]
        clients = []
        for folder in options.targets:
            target = await stack.enter_async_context(_model("target", folder, options))
            address = await stack.enter_async_context(coordinator(target, draft, *words))
            clients.append(await stack.enter_async_context(Client(address)))
        write_out(
            f"draft {options.draft}, {options.mapping}, {options.proposed} proposed, {len(prompts)} prompts of "
            f"{options.max_tokens} tokens, pace {options.pace or 'none'}, load {os.getloadavg()[0]:.1f}\n\n"
        )
        counted = ("texts of the target alone", "accepted", "tokens per pass", "ahead")
        markdown_head("target", "rule", *counted, "ms per token alone", "drafted", "speed-up")
        for rule in options.rules:
            workloads = [
                Workload((prompt,), 0.0 if rule == "greedy" else 0.7, options.max_tokens, seed)
                for seed, prompt in enumerate(prompts)
            ]
            if options.pace:
                for client in clients:  # the controller learns what pays
                    await _both(client, rule, workloads[:2])
                tables = [await _both(client, rule, workloads) for client in clients]
            else:
                tables = await asyncio.gather(*(_both(client, rule, workloads) for client in clients))
            for target, outcomes in zip(options.targets, tables, strict=True):
                _show(target, rule, *outcomes)


def _show(target: Path, rule: str, drafted: Sequence[Outcome], alone: Sequence[Outcome]) -> None:
    pairs = zip(drafted, alone, strict=True)
    equal = sum(one.answers[0].token_ids == other.answers[0].token_ids for one, other in pairs)
    tokens, rounds, proposed, accepted, hits = (
        sum(getattr(each, name) for each in drafted)
        for name in ("token_count", "rounds", "drafted", "accepted", "hits")
    )
    # Milliseconds of a token behind the first chunk
    slow, quick = (fmean(1e3 / each.speed_between(0, tokens) for each in way) for way in (alone, drafted))
    shares = (accepted / max(proposed, 1), tokens / rounds)
    figures = (f"{share:.2f}" for share in shares)
    times = (f"{each:.2f}" for each in (slow, quick, slow / quick))
    markdown_row(target, rule, f"{equal} of {len(alone)}", *figures, f"{hits / rounds:.0%}", *times)


async def _both(client: Client, rule: str, workloads: Sequence[Workload]) -> list[list[Outcome]]:
    """With the draft, and by the target alone; one text after the other."""
    ways = [
        through_services(client, speculation=is_drafted, rejection_sampling_strategy=rule)
        for is_drafted in (True, False)
    ]
    return [[await way(each) for each in workloads] for way in ways]


def _model(role: str, folder: Path, options: argparse.Namespace) -> AbstractAsyncContextManager[str]:
    words = ("--max-length", "1024", "--dtype", options.dtype, "--threads", "1")
    return model(role, folder, *words, pace=options.pace)


# ---- losses


@dataclass(frozen=True, slots=True)
class Text:
    """The target's completion of a prompt, in the tokens of one of the models."""

    token_ids: list[int]
    """The prompt's and the completion's."""
    prompt_length: int

    def bits(self, model: Any) -> float:
        """How many bits the model needs for the completion: the less, the better it foresees it."""
        logs = model(torch.tensor([self.token_ids])).logits[0].double().log_softmax(-1)
        completion = torch.tensor(self.token_ids[self.prompt_length :])
        return -float(logs[self.prompt_length - 1 : -1].gather(1, completion[:, None]).sum()) / math.log(2)


PLACE = (
    "accepted of the demo draft",
    "of all of the draft's tokens, by the target's first",
    "of shared tokens (tli)",
    "of the demo draft, among these",
    "target's mass on these",
    "draft's mass on these",
)
"""Figures of one position of a completion: how likely the first token of a proposal would be accepted there, by draft,
and the probability of the shared tokens."""


class Losses:
    """A target, the demo draft, which has its tokenizer, and a draft with another one."""

    def __init__(self, target: Path, draft: Path, temperature: float) -> None:
        loaded: list[Any] = [
            AutoModelForCausalLM.from_pretrained(folder) for folder in (target, DEMO / "draft", draft)
        ]
        self.target, self.demo_draft, self.draft = loaded
        self.vocabulary = _vocabulary(target, self.target)
        own = _vocabulary(draft, self.draft)
        self._shared = SharedVocabulary(own, self.vocabulary)
        self._temperature = temperature
        self._draft_ids = torch.from_numpy(self._shared.draft_ids)
        self._target_ids = torch.from_numpy(self._shared.target_ids)
        firsts = {i: first for i in range(own.size) if (first := self._shared.first_id(i)) is not None}
        self._spelled, self._spelled_by = torch.tensor([*firsts]), torch.tensor([*firsts.values()])

    def sampled(self, prompt: str, max_tokens: int, seed: int) -> Text:
        """The target's completion, in its own tokens."""
        torch.manual_seed(seed)
        prompt_ids = [*self.vocabulary.prefix, *self.vocabulary.encode(prompt)]
        ids = self.target.generate(
            torch.tensor([prompt_ids]),
            max_new_tokens=max_tokens,
            do_sample=True,
            temperature=self._temperature,
            eos_token_id=None,
        )
        return Text(ids[0].tolist(), len(prompt_ids))

    def read_by_draft(self, text: Text) -> Text:
        """The same in the draft's tokens. The completion begins where the prompt's tokens cease to be the same."""
        transcript = self._transcript(text)
        prompt = [*transcript.token_ids]
        transcript.apply(Delta(text.prompt_length, tuple(text.token_ids[text.prompt_length :])))
        pairs = enumerate(zip(prompt, transcript.token_ids, strict=False))
        return Text(transcript.token_ids, next((i for i, (old, new) in pairs if old != new), len(prompt)))

    def places(self, text: Text) -> Iterator[tuple[bool, list[float]]]:
        """The positions of a completion at which the draft proposes, as none lies within a character: true where a
        token of the draft's ends, and the figures of `PLACE`."""
        target, demo_draft = (self._probs(model, text.token_ids) for model in (self.target, self.demo_draft))
        transcript = self._transcript(text)
        for i in range(text.prompt_length, len(text.token_ids)):
            before, is_whole = [*transcript.token_ids], transcript.is_whole
            transcript.apply(Delta(i, (text.token_ids[i],)))
            if is_whole:
                is_boundary = transcript.token_ids[: len(before)] == before
                draft = self._probs(self.draft, before)[-1]
                yield is_boundary, self._place(target[i - 1], demo_draft[i - 1], draft)

    def _place(self, target: Tensor, demo_draft: Tensor, draft: Tensor) -> list[float]:
        """The figures of `PLACE`, from probabilities over each model's own vocabulary."""
        spelled = torch.zeros_like(target).index_add(0, self._spelled_by, draft[self._spelled])
        target_shared, demo_draft_shared = target[self._target_ids], demo_draft[self._target_ids]
        draft_shared = draft[self._draft_ids]
        return [
            _acceptance(target, demo_draft),
            _acceptance(target, spelled),
            _acceptance(target_shared, draft_shared / draft_shared.sum()),
            _acceptance(target_shared, demo_draft_shared / demo_draft_shared.sum()),
            float(target_shared.sum()),
            float(draft_shared.sum()),
        ]

    def _transcript(self, text: Text) -> Transcript:
        """The prompt as the draft reads it."""
        transcript = Transcript(self._shared)
        transcript.apply(Delta(0, tuple(text.token_ids[: text.prompt_length])))
        return transcript

    def _probs(self, model: Any, token_ids: Sequence[int]) -> Tensor:
        """The model's distribution behind each token, [len(token_ids), its vocabulary]."""
        logits: Tensor = model(torch.tensor([token_ids])).logits[0].double()
        return (logits / self._temperature).softmax(-1)


def _vocabulary(folder: Path, model: Any) -> Vocabulary:
    return Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")), model.config.vocab_size)


def _acceptance(target: Tensor, draft: Tensor) -> float:
    """The chance that a token of the draft's distribution is accepted by rejection sampling: 1 - total variation."""
    return float(torch.minimum(target, draft).sum())


@torch.inference_mode()
def losses(options: argparse.Namespace) -> None:
    """Print where a mapped draft loses acceptance beside the demo draft, by the models' distributions along texts that
    the target samples."""
    compared = Losses(options.targets[0], options.draft, temperature=0.7)
    places, size, bits, own_bits = list[tuple[bool, list[float]]](), 0, 0.0, 0.0
    for seed, prompt in enumerate((*PROMPTS, *CODE)):
        text = compared.sampled(prompt, options.max_tokens, seed)
        places += compared.places(text)
        size += sum(len(compared.vocabulary.text(i)) for i in text.token_ids[text.prompt_length :])
        bits += text.bits(compared.demo_draft)
        own_bits += compared.read_by_draft(text).bits(compared.draft)
    write_out(
        f"bits per byte of the target's text: demo draft {bits / size:.2f}, {options.draft} {own_bits / size:.2f}\n\n"
    )
    markdown_head("positions", "number", *PLACE)
    for name, kinds in (
        ("all", {True, False}),
        ("the draft's tokens end here", {True}),
        ("within a token", {False}),
    ):
        own = [place for is_boundary, place in places if is_boundary in kinds]
        markdown_row(name, len(own), *(f"{mean:.3f}" for mean in torch.tensor(own).mean(0).tolist()))


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
    write_out(
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


if __name__ == "__main__":
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("targets", type=Path, nargs="*", default=[DEMO / "target"])
    add("--draft", type=Path, default=DEMO / "draft")
    add("--mapping", default="auto", help="as of the coordinator")
    add("--rules", type=several(str), default=["greedy", "strict"], help="several with commas")
    add("--proposed", type=int, default=4, help="tokens of a proposal, at most")
    add("--max-tokens", type=int, default=128, help="tokens of each completion")
    add("--dtype", default="float32", help="of all models")
    add("--pace", default="", help="as for tandem bench")
    add("--losses", action="store_true", help="compute where the acceptance of a mapped draft is lost")
    add("--costs", action="store_true", help="time the mapping of two vocabularies of 128,000 tokens")
    options = parser.parse_args()
    if options.costs:
        costs()
    elif options.losses:
        losses(options)
    else:
        asyncio.run(main(options))
