"""Checks that need few tokens: does a server say the same thing when it is asked in another way?"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from tandem_audit.client import Completion, Server
from tandem_audit.errors import BudgetError, InvalidRequestError
from tandem_audit.statistics import BoolArray, FloatArray

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a",
    "import os\nimport sys\n\n\ndef main(",
    "The three most important things in life are",
    "class Stack:\n    def __init__(self):\n",
    "In 1969, the first",
    "for i in range(10):\n    print(",
    "Dear Sir or Madam,\n",
    "SELECT name, age FROM",
    "Q: Why is the sky blue?\nA:",
    "# How to bake bread\n\n1.",
    "She opened the door and",
    "if __name__ == '__main__':\n",
    "The opposite of hot is",
    "try:\n    value = int(text)\nexcept",
    "Water boils at",
    "def read_lines(path):\n    with open(",
    "My favourite colour is",
    "<html>\n<head>\n<title>",
    "Roses are red, violets are",
    "import numpy as np\n\n\ndef mean(values):\n    return",
    "It was a bright cold day in April, and",
    "{'name': 'Alice', 'age':",
)
NEAR_TIE_NATS = 0.25
"""Two logits of bfloat16 that are 32 or larger differ by 0.25 or not at all, so either may be the argmax."""
SAME_VARIATION = 0.05
"""Total variation between two reports of one distribution that rounding and batches explain."""
_TOGETHER = 16
"""Requests at once."""
_TOKEN_CHARACTERS = 16
"""The token that completes a stop string goes on for fewer characters."""


class Verdict(Enum):
    """The outcome of a check."""

    OK = "ok"
    NOTE = "note"
    """Different, in a way that a lossless server may be."""
    FINDING = "finding"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One check and what it found."""

    name: str
    verdict: Verdict
    detail: str


async def reproducibility(
    server: Server, report: Callable[[str], None], until: float = math.inf
) -> list[Check]:
    """All checks of one server, as far as the time allows, which ends at a time of the monotonic clock."""
    found = []
    for check in (_greedy, _streaming, _stops, _seeds, _choices, _own_logprobs):
        name = check.__name__.strip("_").replace("_", " ")
        report(name)
        found += await unless_refused(name, check(server), until)
    return found


async def unless_refused(name: str, check: Awaitable[list[Check]], until: float = math.inf) -> list[Check]:
    """The findings of a check, or that it is skipped where the time, the budget or the server does not allow it."""
    try:
        async with asyncio.timeout_at(None if until == math.inf else until):
            return await check
    except TimeoutError:
        return [Check(name, Verdict.SKIPPED, "its time was over; it needs more --minutes")]
    except (BudgetError, InvalidRequestError) as error:
        return [Check(name, Verdict.SKIPPED, str(error))]


async def greedy_equality(server: Server, reference: Server) -> list[Check]:
    """Greedy texts of the server and of its reference, and what both report along them."""
    prompts = PROMPTS[:12]
    pairs = list(zip(await _all(reference, prompts), await _all(server, prompts), strict=True))
    variations = []
    for theirs, ours in pairs:
        difference = first_difference(theirs, ours)
        shared = len(ours.pieces) if difference is None else difference[0] + 1
        variations += [
            variation(*tops) for tops in zip(theirs.tops[:shared], ours.tops[:shared], strict=False)
        ]
    found = [_compare("greedy, server and reference", pairs)]
    if variations:
        found.append(
            _alike("log probabilities, server and reference", variations, 0.1, "these are two models")
        )
    return found


async def _all(server: Server, prompts: Sequence[str]) -> list[Completion]:
    return await asyncio.gather(*map(server.complete_one, prompts))


async def _greedy(server: Server) -> list[Check]:
    prompts = PROMPTS[:6]
    first, again = [[await server.complete_one(each) for each in prompts] for _ in range(2)]
    together = await _all(server, [prompts[i % len(prompts)] for i in range(_TOGETHER)])
    found = [
        _compare("greedy, prefix cache cold and warm", list(zip(first, again, strict=True))),
        _compare(
            "greedy, alone and among 16", [(first[i % len(prompts)], each) for i, each in enumerate(together)]
        ),
    ]
    gaps = [
        max(top.values()) - logprob
        for each in [*first, *together]
        for logprob, top in zip(each.logprobs, each.tops, strict=False)
        if top
    ]
    if gaps:
        wrong = sum(gap > NEAR_TIE_NATS for gap in gaps)
        detail = f"{wrong} of {len(gaps)} tokens are not the most probable, by {max(gaps):.3f} nats at most"
        found.append(
            Check("greedy takes the most probable token", Verdict.FINDING if wrong else Verdict.OK, detail)
        )
    return found


def first_difference(one: Completion, other: Completion) -> tuple[int, float | None] | None:
    """The first position where two completions differ, and the gap of their two tokens there, nats.

    The gap is None where log probabilities do not say it; the result is None for equal completions.
    """
    pairs = zip(one.pieces, other.pieces, strict=False)
    shorter = min(len(one.pieces), len(other.pieces))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if position == len(one.pieces) == len(other.pieces):
        return None
    if position >= min(len(one.tops), len(other.tops)):
        return position, None
    words = one.tokens[position], other.tokens[position]
    gaps = []
    for each in (one, other):
        first, second = (each.tops[position].get(word, -math.inf) for word in words)
        gaps.append(abs(first - second))
    return position, min(gaps)


def _compare(name: str, pairs: Sequence[tuple[Completion, Completion]]) -> Check:
    differences = [found for pair in pairs if (found := first_difference(*pair)) is not None]
    if not differences:
        return Check(name, Verdict.OK, f"{len(pairs)} of {len(pairs)} are equal")
    clear = [(position, gap) for position, gap in differences if gap is None or gap > NEAR_TIE_NATS]
    words = f"{len(differences)} of {len(pairs)} differ"
    if not clear:
        nats = max(gap for _, gap in differences if gap is not None)
        return Check(name, Verdict.NOTE, f"{words}, all at a near tie (at most {nats:.3f} nats)")
    position, gap = max(clear, key=lambda each: -1.0 if each[1] is None else each[1])
    if gap is None:
        return Check(name, Verdict.NOTE, f"{words}, and no log probabilities say by how much")
    return Check(
        name, Verdict.FINDING, f"{words}, {len(clear)} of them clearly: {gap:.3f} nats at position {position}"
    )


async def _streaming(server: Server) -> list[Check]:
    prompts = PROMPTS[:4]
    wrong = 0
    for prompt in prompts:
        wrong += (await server.complete_one(prompt)).text != await server.stream(prompt, logprobs=None)
    if not wrong:
        verdict = Verdict.OK
    elif wrong < len(prompts):
        # A near tie may fall otherwise the second time; the check of a warm prefix cache tells that.
        verdict = Verdict.NOTE
    else:
        verdict = Verdict.FINDING
    return [Check("greedy, streamed and whole", verdict, f"{wrong} of {len(prompts)} differ")]


async def _stops(server: Server) -> list[Check]:
    prompt = PROMPTS[1]
    text = (await server.complete_one(prompt, max_tokens=64)).text
    offsets = [i for i in range(len(text) - 3) if text[i : i + 3].strip() and "\ufffd" not in text[i : i + 3]]
    offsets = offsets[:: max(1, len(offsets) // 12)][:12]
    stops = list(dict.fromkeys(text[i : i + 3] for i in offsets))
    answers = await asyncio.gather(
        *(server.complete_one(prompt, max_tokens=64, stop=[stop]) for stop in stops)
    )
    wrong = []
    kept = 0
    for stop, answer in zip(stops, answers, strict=True):
        place = text.find(stop)
        past = len(answer.text) - place - len(stop)
        is_end = text.startswith(answer.text) and answer.finish_reason == "stop"
        kept += is_end and 0 <= past < _TOKEN_CHARACTERS
        if not is_end or (len(answer.text) != place and not 0 <= past < _TOKEN_CHARACTERS):
            wrong.append(stop)
    if wrong:
        detail = f"{len(wrong)} of {len(stops)} do not end the text where it first has them: {wrong[0]!r}"
        return [Check("stop strings", Verdict.FINDING if len(wrong) > 2 else Verdict.NOTE, detail)]
    detail = f"{len(stops)} of {len(stops)} end the text"
    if kept:
        return [
            Check("stop strings", Verdict.NOTE, f"{detail}, but {kept} stay in it, unlike in OpenAI's API")
        ]
    return [Check("stop strings", Verdict.OK, detail)]


async def _seeds(server: Server) -> list[Check]:
    seeded = partial(server.complete_one, PROMPTS[2], temperature=1.0, seed=7)
    first = await seeded()
    second = await seeded()
    others = (server.complete_one(prompt, temperature=1.0) for prompt in PROMPTS[: _TOGETHER - 1])
    among, *_ = await asyncio.gather(seeded(), *others)
    found = []
    for name, other in (("seed, twice in a row", second), ("seed, alone and among 16", among)):
        if (difference := first_difference(first, other)) is None:
            found.append(Check(name, Verdict.OK, "the same completion"))
        else:
            found.append(Check(name, Verdict.NOTE, f"another completion from position {difference[0]}"))
    return found


async def _choices(server: Server) -> list[Check]:
    prompt = PROMPTS[4]
    together = partial(server.complete, prompt, max_tokens=32, temperature=1.0, n=4)
    groups = {
        "n = 4": await together(),
        "n = 4 with a seed": await together(seed=11),
        "4 requests at once": await asyncio.gather(
            *(server.complete_one(prompt, temperature=1.0) for _ in range(4))
        ),
    }
    return [Check(f"{name}: noise of their own", *_apart(choices)) for name, choices in groups.items()]


def _apart(choices: Sequence[Completion]) -> tuple[Verdict, str]:
    """Choices that agree on what is too improbable to agree on by chance."""
    if len(choices) < 4:
        return Verdict.NOTE, f"{len(choices)} of 4 choices came"
    texts = [each.pieces for each in choices]
    same = len(texts) - len(set(texts))
    nats = max(-sum(each.logprobs) for each in choices)
    # exp(-21) is below 1e-9: two samples that agree on so much share their noise
    if same and nats > 21.0:
        return Verdict.FINDING, f"{same} of 4 choices repeat another, of {nats:.0f} nats"
    return Verdict.OK, f"{len(set(texts))} different choices of 4"


async def _own_logprobs(server: Server) -> list[Check]:
    """Are reported log probabilities those of the target? A call for one token has no proposal to report."""
    name = "log probabilities and those of single calls"
    if not server.listed:
        return [Check(name, Verdict.SKIPPED, "the server reports none")]
    fields: dict[str, Any] = {"temperature": 1.0, "return_tokens_as_token_ids": None}
    try:
        await server.complete(PROMPTS[0], max_tokens=1, **fields, return_token_ids=True)
        fields["return_token_ids"] = True
    except InvalidRequestError:
        pass
    variations: list[float] = []
    has_ids = True
    for prompt in PROMPTS[:4]:
        whole = await server.complete_one(prompt, max_tokens=13, **fields)
        prefixes, is_exact = _prefixes(prompt, whole, await server.tokenize(prompt))
        has_ids &= is_exact
        singles = await asyncio.gather(
            *(server.complete_one(prefix, max_tokens=1, **fields) for prefix in prefixes.values())
        )
        for i, single in zip(prefixes, singles, strict=True):
            # Another count of tokens: the text was not split again as it was written.
            if single.prompt_tokens == (whole.prompt_tokens or 0) + i and single.tops:
                variations.append(variation(whole.tops[i], single.tops[0]))
    if len(variations) < 4:
        return [Check(name, Verdict.SKIPPED, "texts are not split again as they were written")]
    words = "what is reported is not, or not always, the target's distribution"
    return [_alike(name, variations, 0.1 if has_ids else 0.3, words)]


def _alike(name: str, variations: Sequence[float], most: float, words: str) -> Check:
    """Are two reports of the same distributions the same? A finding if more than a part of them differ."""
    wrong = sum(each > SAME_VARIATION for each in variations)
    detail = (
        f"{wrong} of {len(variations)} differ by a total variation above {SAME_VARIATION}; median "
        f"{float(np.median(variations)):.4f}, max {max(variations):.4f}"
    )
    if wrong > most * len(variations):
        return Check(name, Verdict.FINDING, f"{detail}: {words}")
    return Check(name, Verdict.NOTE if wrong else Verdict.OK, detail)


def _prefixes(
    prompt: str, whole: Completion, ids: list[int] | None
) -> tuple[dict[int, str | list[int]], bool]:
    """The prompts whose next token is the completion's token at a position, and whether they are certainly those.

    As text they may be split into other tokens, of the same number.
    """
    positions = range(1, min(len(whole.tokens), len(whole.tops)))
    if ids is not None and len(ids) == whole.prompt_tokens and len(whole.token_ids) == len(whole.tokens):
        return {i: [*ids, *whole.token_ids[:i]] for i in positions}, True
    texts = {i: "".join(whole.tokens[:i]) for i in positions}
    return {i: prompt + text for i, text in texts.items() if "\ufffd" not in text}, False


def variation(one: dict[str, float], other: dict[str, float]) -> float:
    """Total variation of two lists of log probabilities, over the tokens that both have."""
    return 0.5 * sum(abs(math.exp(one[key]) - math.exp(other[key])) for key in one.keys() & other.keys())


async def temperature_is_raw(server: Server, temperature: float) -> tuple[bool, Check]:
    """True if log probabilities are those before the temperature, and a check that they follow one of the two forms."""
    name = f"log probabilities at temperature {temperature:g}"
    ratios: list[float] = []
    for prompt in PROMPTS[:6]:
        tops = []
        for each in (1.0, temperature):
            found = await server.complete_one(prompt, max_tokens=1, temperature=each)
            tops.append(found.tops[0] if found.tops else {})
        one, other = tops
        if shared := sorted(one.keys() & other.keys(), key=lambda key: -one[key])[:4]:
            gap = one[shared[0]] - one[shared[-1]]
            if gap > 0.5:
                ratios.append((other[shared[0]] - other[shared[-1]]) / gap)
    if not ratios:
        return True, Check(name, Verdict.SKIPPED, "no prompt has a clear order of candidates")
    ratio = float(np.median(ratios))
    if abs(ratio - 1) < 0.1:
        return True, Check(name, Verdict.OK, "they are raw: the same as at temperature 1")
    if abs(ratio * temperature - 1) < 0.1:
        return False, Check(name, Verdict.OK, "they are those after the temperature")
    detail = f"gaps are {ratio:.2f} times those at temperature 1; 1 or {1 / temperature:.2f} is right"
    return False, Check(name, Verdict.FINDING, detail)


def kept_and_removed(probs: FloatArray, top_p: float, margin: float) -> tuple[BoolArray, BoolArray]:
    """Candidates that top-p surely keeps, and those that it surely removes, in any order of equal ones, with a margin
    for rounding. All are [T, M], by falling probability."""
    is_above = probs[:, None, :] > probs[:, :, None] * (1 + 1e-9)
    is_level = probs[:, None, :] >= probs[:, :, None] * (1 - 1e-9)
    above = (is_above * probs[:, None, :]).sum(axis=2)
    with_equals = (is_level * probs[:, None, :]).sum(axis=2) - probs
    return with_equals < top_p - margin, above > top_p + margin
