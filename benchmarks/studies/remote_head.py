"""A calculation: an EAGLE-3 head on a device of its own, which drafts ahead, against the head in the target's steps.

    python -m benchmarks.studies.remote_head                       target 6.5 ms a step, head 0.6 ms, 0.25 ms one way
    python -m benchmarks.studies.remote_head --target FOLDER --head models/smollm2/eagle3    SmolLM2 answers questions

A target writes after held-out prompts, and its head foresees every token of each text several times: behind a
state of the target's, and behind one, two, ... states of its own. With that, rounds are played on a clock that is not
the machine's. All texts are those of temperature 0 or of the rule strict, where a seed decides them, so that a round's
outcome is a matter of the text alone.

A head apart has a state of the target's only once the round that computed it is over. It drafts meanwhile for likely
outcomes of the next round, from states of its own. Each round it begins again from the target's states: one pass reads
them, one for each proposed token follows what is being verified, and one for each token goes on behind every outcome.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.pairs import DEMO, held_out_prompts
from models.demo.recipe.architecture import END_OF_TEXT_ID, load_model, read_states
from models.demo.recipe.corpus import load_tokenizer
from models.demo.recipe.heads.eagle3 import UnrolledStep, with_states
from models.demo.recipe.measure import are_accepted
from models.smollm2.recipe.answers import questions
from tandem.config.settings import load_settings
from tandem.drafting.repeats import Odds, Repeats
from tandem.drafting.tokens import TokenState
from tandem.engine.models import loading
from tandem.engine.models.heads.eagle import Eagle3Head
from tandem.model.sampling.noise import gumbel, target_keys
from tandem.model.types import Delta, IntArray, common_length
from tandem_load.common import Listed, Positive, StudySettings, one_sentence, print_row

DEPTH = 16
"""Tokens that the head foresees behind one state of the target's."""
RANKED = 48
"""Tokens that are kept of each of its distributions, the likeliest first."""
LENGTHS = range(1, 7)
"""Tokens of proposals."""
LOOKED_UP = 6
"""Tokens of a proposal that repeats the text."""
PROMPT = 640
"""Tokens of the prompts behind which windows are compared."""
WINDOWS = (None, 512, 128, 0)
"""Last tokens of a prompt whose states a head is sent; None: of all."""


class RemoteHeadSettings(StudySettings):
    """Options of the calculation."""

    target: Path = DEMO / "target"
    """Folder of the target. One with a chat template is asked held-out questions, another one goes on with code."""
    head: Path = DEMO / "eagle3"
    """Folder of its EAGLE-3 head."""
    temperatures: Listed[Annotated[float, Field(ge=0)]] = (0.0, 0.7)
    """0 is greedy."""
    texts: Positive = 64
    """Held-out prompts that are completed."""
    max_tokens: Positive = 160
    """Tokens of each completion."""
    outcomes: Listed[Positive] = (16, 32, 64)
    """Outcomes of a round that the head drafts ahead for."""
    target_ms: float = Field(default=6.5, gt=0)
    """Milliseconds of a step of the target."""
    head_ms: float = Field(default=0.6, gt=0)
    """Milliseconds of a pass of the head, for however many tokens."""
    one_way_ms: float = Field(default=0.25, ge=0)
    """Milliseconds between the coordinator and a service, one way."""
    handling_ms: float = Field(default=0.2, ge=0)
    """Milliseconds that all three processes take for what goes from the target to the head, or back."""
    between_ms: float = Field(default=0.15, ge=0)
    """Milliseconds between two steps that the target takes by itself."""


# ---- what the head foresees


class Text:
    """A text of the target's, and what the head says of it."""

    def __init__(
        self,
        token_ids: Sequence[int],
        prompt_length: int,
        length: int,
        ranked: IntArray,
        flags: Sequence[Sequence[bool]],
    ) -> None:
        """The text is played up to `length` tokens; the last proposal may reach beyond.

        `ranked` are [bases, DEPTH, RANKED]: the likeliest tokens at base + depth + 2, where pairs up to the base have
        the target's states and all tokens before are the text's. `flags` are [bases, DEPTH]: True where the rule
        residual accepts the text's token if it was proposed.
        """
        self.token_ids = token_ids
        self.prompt_length = prompt_length
        self.length = length
        self.ranked = ranked
        self.flags = flags
        self._first: list[list[int]] = ranked[..., 0].tolist()
        places = np.arange(len(ranked))[:, None] + np.arange(DEPTH) + 2
        is_own = ranked == np.array(token_ids)[places][..., None]
        self.ranks: list[list[int]] = np.where(is_own.any(-1), is_own.argmax(-1), RANKED).tolist()
        """Place of the text's token among the likeliest, `RANKED` where it is none of them; [bases, DEPTH]."""

    def proposal(self, length: int, depth: int, count: int) -> tuple[int, ...]:
        """The head's tokens behind `length + depth` ones, of which `length` were committed when the states came that it
        reads."""
        return tuple(self._first[length - 2][depth : depth + count])

    def count_accepted(self, length: int, proposal: Sequence[int]) -> int:
        """Accepted tokens of a proposal behind `length` ones."""
        return common_length(self.token_ids[length : length + len(proposal)], proposal)

    def is_foreseen(self, length: int, depth: int, rejected: int | None, count: int) -> bool:
        """True if the token behind `length + depth` ones is among the likeliest `count`, without the rejected one."""
        rank = self.ranks[length - 2][depth]
        if rank != count or rejected is None:
            return rank < count
        return rejected in self.ranked[length - 2, depth, :rank]


def with_ideal_states(text: Text) -> Text:
    """The same with a head whose own states are as good as the target's."""
    bases = len(text.ranked) - DEPTH
    places = np.arange(bases)[:, None] + np.arange(DEPTH)
    flags = [[text.flags[base + depth][0] for depth in range(DEPTH)] for base in range(bases)]
    return Text(text.token_ids, text.prompt_length, text.length, text.ranked[places, 0], flags)


@torch.no_grad()
def write(
    target: LlamaForCausalLM, prompts: Sequence[Sequence[int]], count: int, temperature: float
) -> list[list[int]]:
    """The prompts, each with so many tokens behind it; the noise is that of the seeds 0, 1, ..."""
    gaps = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    padded = list(zip(prompts, gaps, strict=True))
    tokens = torch.tensor([[END_OF_TEXT_ID] * gap + list(prompt) for prompt, gap in padded])
    mask = torch.tensor([[0] * gap + [1] * len(prompt) for prompt, gap in padded])
    cache = DynamicCache(config=target.config)
    unread = tokens
    for number in range(count):
        logits = target.lm_head(read_states(target, unread, mask, cache)[:, -1]).float()
        keys = [target_keys(seed, len(prompt) + number, 1) for seed, prompt in enumerate(prompts)]
        unread = _with_noise(logits, temperature, np.concatenate(keys)).argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, unread], dim=1)
        mask = torch.cat([mask, torch.ones_like(unread)], dim=1)
    return [row[gap:].tolist() for row, gap in zip(tokens, gaps, strict=True)]


def _with_noise(logits: Tensor, temperature: float, keys: IntArray) -> Tensor:
    """Scores of which the rule strict takes the greatest, [rows, vocabulary]."""
    if temperature == 0.0:
        return logits
    return logits / temperature + torch.from_numpy(gumbel(keys, logits.shape[-1])).float()


@torch.no_grad()
def foresee(
    target: LlamaForCausalLM,
    head: Eagle3Head,
    token_ids: Sequence[int],
    prompt_length: int,
    temperature: float,
    *,
    seed: int = 0,
    window: int | None = None,
) -> Text:
    """Let the head foresee each token of a text, by the states of the prompt's last `window` tokens and of those behind
    it."""
    tokens = torch.tensor([token_ids])
    lessons = with_states(target, tokens, head.layer_ids)
    bases = len(token_ids) - DEPTH - 1
    unseen = range(0 if window is None else max(prompt_length - 1 - window, 0))
    step = UnrolledStep(1, unseen)
    assert lessons.read is not None
    states = head.combine([each[:, :bases].flatten(0, 1).float() for each in lessons.read])
    wanted = target.lm_head(lessons.hidden[0].float())
    keys = target_keys(seed, 0, len(token_ids))
    coins = torch.Generator().manual_seed(seed)
    ranked = []
    flags = []
    for depth in range(DEPTH):
        read = tokens[:, depth + 1 : depth + 1 + bases]
        positions = torch.arange(depth, depth + bases)[None]
        hidden, states = head.advance(read, positions, states, step)
        logits = head.logits(hidden)
        foreseen = slice(depth + 2, depth + 2 + bases)
        scores = _with_noise(logits, temperature, keys[foreseen])
        ranked.append(scores.topk(RANKED).indices)
        targets = wanted[depth + 1 : depth + 1 + bases]
        flags.append(are_accepted(logits, targets, tokens[0, foreseen], temperature, coins))
    # A last proposal begins before the last `DEPTH` bases, and so do those of ideal states
    length = len(token_ids) - 2 * DEPTH - 2
    return Text(
        token_ids,
        prompt_length,
        length,
        torch.stack(ranked, dim=1).numpy(),
        torch.stack(flags, dim=1).tolist(),
    )


# ---- rounds


@dataclass(frozen=True, slots=True)
class Clock:
    """Milliseconds of what a round is made of."""

    target: float
    head: float
    way: float
    """From the target to the head by the coordinator, or back."""
    between: float

    @property
    def led(self) -> float:
        """Milliseconds of a round that the target begins by itself, from one beginning to the next."""
        return self.target + self.between

    def beside(self, passes: int) -> float:
        return self.led + passes * self.head

    def ask(self, passes: int) -> float:
        """Milliseconds of a round before which the head is asked and drafts."""
        return self.led + 2 * self.way + passes * self.head

    @property
    def passes(self) -> int:
        """Passes of the head while the target verifies, whose results are there when it has."""
        return int((self.led - 2 * self.way) / self.head + 1e-9)


class Lookups:
    """The target's own proposals where the text repeats itself: the head is spared, or not used."""

    def __init__(self, text: Text, odds: Odds) -> None:
        self._text = text
        self._tokens = TokenState(0)
        self._repeats = Repeats(self._tokens, odds)

    def propose(self, length: int) -> tuple[int, ...]:
        known = len(self._tokens)
        self._tokens.apply(Delta(known, tuple(self._text.token_ids[known:length])), known)
        return self._repeats.propose(LOOKED_UP)

    def note(self, proposal: Sequence[int]) -> None:
        self._repeats.note(proposal)


Played = tuple[int, float]
"""Tokens, and milliseconds."""


def play_in_turns(
    text: Text, count: int, milliseconds_of: Callable[[int], float], odds: Odds | None = None
) -> Played:
    """The head drafts between two rounds: beside the target, or on its own device when the states have come. A round
    lasts as long as `milliseconds_of` says for its passes of the head."""
    lookups = None if odds is None else Lookups(text, odds)
    length = text.prompt_length
    milliseconds = 0.0
    while length < text.length:
        proposal = () if lookups is None else lookups.propose(length)
        milliseconds += milliseconds_of(0 if proposal else count)
        if not proposal:
            proposal = text.proposal(length, 0, count)
            if lookups is not None:
                lookups.note(proposal)
        length += text.count_accepted(length, proposal) + 1
    return length - text.prompt_length, milliseconds


def play_residual(text: Text, count: int, milliseconds_of: Callable[[int], float]) -> Played:
    """The same under the rule residual."""
    length = text.prompt_length
    milliseconds = 0.0
    while length < text.length:
        flags = text.flags[length - 2][:count]
        length += (flags.index(False) if False in flags else count) + 1
        milliseconds += milliseconds_of(count)
    return length - text.prompt_length, milliseconds


def play_apart(
    text: Text,
    count: int,
    clock: Clock,
    ranks: Ranks,
    *,
    outcomes: int,
    after_miss: int = 2,
    is_beside_as_well: bool = False,
    odds: Odds | None = None,
) -> Played:
    """The head drafts ahead on a device of its own. Its first proposal is asked for.

    Where nothing is ready it is asked for `after_miss` tokens, or the target goes on alone. `is_beside_as_well`: the
    target has the head too, and asks that one.
    """
    lookups = None if odds is None else Lookups(text, odds)
    length = text.prompt_length
    milliseconds = 0.0
    drafted_at = length
    depth = 0
    proposed = after_miss
    is_ready = False
    while length < text.length:
        proposal = () if lookups is None else lookups.propose(length)
        if proposal or is_ready or not proposed:
            milliseconds += clock.led
        else:
            milliseconds += clock.beside(proposed) if is_beside_as_well else clock.ask(proposed)
        if proposal:
            depth = 0  # lookups are as good as the head at its best
        else:
            proposal = text.proposal(drafted_at, depth, proposed)
            if lookups is not None:
                lookups.note(proposal)
        accepted = text.count_accepted(length, proposal)
        rejected = proposal[accepted] if accepted < len(proposal) else None
        chosen = ranks.shares(outcomes, len(proposal), depth)[accepted]
        ready = min(count, clock.passes - 1 - accepted)
        is_ready = ready > 0 and text.is_foreseen(length, accepted, rejected, chosen)
        # What was drafted ahead continues states that the head had before this round
        drafted_at = length
        depth = accepted + 1
        proposed = ready
        length += accepted + 1
        if not is_ready:
            drafted_at = length
            depth = 0
            proposed = after_miss
    return length - text.prompt_length, milliseconds


class Ranks:
    """Counts how often the text's token is the head's first, second, ... by the states of its own before it."""

    def __init__(self, texts: Sequence[Text]) -> None:
        counts = np.zeros((DEPTH, RANKED + 1))
        for text in texts:
            for length in range(text.prompt_length, text.length):
                counts[np.arange(DEPTH), text.ranks[length - 2]] += 1
        self.rates = counts / counts.sum(axis=1, keepdims=True)
        self.shares = lru_cache(maxsize=None)(self._shares)

    def _shares(self, outcomes: int, count: int, depth: int) -> list[int]:
        """How many of the likeliest outcomes of a round follow 0, 1, ... accepted tokens, where the first of `count`
        proposed tokens was drafted behind so many states of the head's own."""
        likely: list[tuple[float, int]] = []
        reached = 1.0
        for accepted in range(count + 1):
            of_next = self.rates[accepted, :RANKED]
            here = reached
            if accepted < count:
                right = self.rates[min(depth + accepted, DEPTH - 1), 0]
                here = reached * (1.0 - right)
                # Without the rejected token, the likeliest
                of_next = of_next[1:] / max(1.0 - of_next[0], 1e-9)
                reached *= right
            likely += [(here * each, accepted) for each in of_next]
        chosen = [accepted for _, accepted in sorted(likely, reverse=True)[:outcomes]]
        return [chosen.count(accepted) for accepted in range(count + 1)]


# ---- tables

Player = Callable[..., Played]
"""Plays a text, given the tokens of a proposal as `count`."""


def speed(texts: Sequence[Text], play: Callable[[Text], Played]) -> float:
    """Tokens a second."""
    played = [play(text) for text in texts]
    return 1e3 * sum(tokens for tokens, _ in played) / sum(milliseconds for _, milliseconds in played)


def best_speed(texts: Sequence[Text], play: Player, *, with_lookups: bool = False) -> float:
    """Tokens a second with the length of proposals that serves best."""

    def at(count: int) -> float:
        # Each run learns anew how good lookups are
        terms = {"odds": Odds()} if with_lookups else {}
        return speed(texts, partial(play, count=count, **terms))

    return max(map(at, LENGTHS))


def designs(texts: Sequence[Text], clock: Clock, outcomes: Sequence[int]) -> Iterator[tuple[str, float]]:
    """Tokens a second of each way to draft."""
    most = max(outcomes)
    beside = partial(play_in_turns, milliseconds_of=clock.beside)
    apart = partial(play_apart, clock=clock, ranks=Ranks(texts))
    ideal = [with_ideal_states(text) for text in texts]
    yield "target alone", 1e3 / clock.led
    yield "beside the target", best_speed(texts, beside)
    yield (
        "beside the target, residual",
        best_speed(texts, partial(play_residual, milliseconds_of=clock.beside)),
    )
    yield "apart, in turns", best_speed(texts, partial(play_in_turns, milliseconds_of=clock.ask))
    for number in outcomes:
        yield f"apart, {number} outcomes", best_speed(texts, partial(apart, outcomes=number))
    yield (
        f"apart, {most} outcomes, alone after a miss",
        best_speed(texts, partial(apart, outcomes=most, after_miss=0)),
    )
    yield (
        f"apart, {most} outcomes, beside the target after a miss",
        best_speed(texts, partial(apart, outcomes=most, is_beside_as_well=True)),
    )
    yield "lookups, beside the target", best_speed(texts, beside, with_lookups=True)
    yield (
        f"lookups, apart, {most} outcomes",
        best_speed(texts, partial(apart, outcomes=most), with_lookups=True),
    )
    yield "ideal states, beside the target", best_speed(ideal, beside)
    yield (
        f"ideal states, apart, {most} outcomes",
        best_speed(ideal, partial(play_apart, clock=clock, ranks=Ranks(ideal), outcomes=most)),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its head."""

    target: LlamaForCausalLM
    head: Eagle3Head

    @staticmethod
    def load(target: Path = DEMO / "target", head: Path = DEMO / "eagle3") -> Pair:
        loaded = Eagle3Head(head).load(loading.load_model(target, dtype="float32"))
        return Pair(load_model(target), loaded)

    def texts(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        window: int | None = None,
    ) -> list[Text]:
        """The target's texts behind some prompts, with what the head foresees in them."""
        # The last proposals reach beyond what is played
        written = write(self.target, prompts, max_tokens + 2 * DEPTH + 2, temperature)
        return [
            foresee(self.target, self.head, tokens, len(prompt), temperature, seed=seed, window=window)
            for seed, (prompt, tokens) in enumerate(zip(prompts, written, strict=True))
        ]


def read_prompts(target: Path, count: int) -> list[list[int]]:
    """Token ids of held-out prompts: questions in the target's chat template, or code where it has none."""
    tokenizer = load_tokenizer(target)
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for _, text in held_out_prompts(count)]
    found = []
    for question in questions(held_out=True)[:count]:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


def main(settings: RemoteHeadSettings) -> None:
    """Print the tables in Markdown."""
    torch.set_num_threads(1)
    pair = Pair.load(settings.target, settings.head)
    prompts = read_prompts(settings.target, settings.texts)
    way = 2 * settings.one_way_ms + settings.handling_ms
    clock = Clock(settings.target_ms, settings.head_ms, way, settings.between_ms)
    speeds: list[dict[str, float]] = []
    print_row("own states before the token", *range(DEPTH))
    print_row(*["---"] * (DEPTH + 1))
    for temperature in settings.temperatures:
        texts = pair.texts(prompts, settings.max_tokens, temperature)
        print_row(
            f"accepted, temperature {temperature:g}", *(f"{rate:.2f}" for rate in Ranks(texts).rates[:, 0])
        )
        speeds.append(dict(designs(texts, clock, settings.outcomes)))
    print_row("tokens a second", *(f"temperature {temperature:g}" for temperature in settings.temperatures))
    print_row(*["---"] * (len(speeds) + 1))
    for name in speeds[0]:
        print_row(name, *(f"{each[name]:.0f}" for each in speeds))
    print_row("states of the prompt", *(f"token {number}" for number in range(1, 5)))
    print_row(*["---"] * 5)
    long = [[*chain(*prompts[place : place + 16])][-PROMPT:] for place in range(0, len(prompts) - 15, 4)]
    for window in WINDOWS:
        texts = pair.texts(long, settings.max_tokens // 2, 0.0, window)
        shown = "all" if window is None else f"of the last {window} tokens"
        print_row(shown, *(f"{rate:.2f}" for rate in Ranks(texts).rates[:4, 0]))


if __name__ == "__main__":
    with one_sentence():
        main(load_settings(RemoteHeadSettings, sys.argv[1:], "python -m benchmarks.studies.remote_head"))
