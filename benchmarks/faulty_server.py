"""Speculative samplers with planted faults, over a small synthetic language: what `tandem audit` has to find.

`Sampler` makes many completions at once; `application` serves it as OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tandem.audit.client import LISTED
from tandem.audit.statistics import BoolArray, FloatArray, IntArray, Steps

RIGHT = "none"
FAULTS = {
    "recovery shares the draft's noise": "the recovered token is the argmax with the noise that the draft used",
    "recovery noise is reused": "every recovery of a completion uses the same noise",
    "draft truncated after sampling": "the draft samples all of q, the rule sees its 6 most probable tokens",
    "residual is the target": "a rejected token is replaced by a sample of p",
    "draft's uniform is reused": "the uniform that drew the draft's token decides on its acceptance",
    "bonus from the wrong row": "after full acceptance the row before the last is sampled",
    "temperature applied twice": "p ** (1 / T**2) in place of p ** (1 / T)",
    "top-p of the draft alone": "the draft is truncated and renormalised, the target is not",
    "log probabilities of the draft": "reported where a proposed token was accepted",
    "typical-acceptance": "a lossy rule: p > min(0.09, 0.3 exp(-H)) accepts",
}
PROPOSED = 4
"""Tokens of a proposal."""


@dataclass(frozen=True, slots=True)
class Language:
    """Distributions of the next token given the last two, of a target and of a draft that sees only the last one."""

    target: FloatArray
    """[V * V, V]."""
    draft: FloatArray
    """[V * V, V]."""

    @property
    def size(self) -> int:
        """V."""
        return int(self.target.shape[1])

    @classmethod
    def random(cls, size: int = 64, seed: int = 5) -> Language:
        """A language whose draft is accepted at about two positions of three, and whose entropy is about 2 nats."""
        generator = np.random.default_rng(seed)
        shared = 1.4 * generator.standard_normal(size) + 1.6 * generator.standard_normal((size, size))
        target = shared + 1.1 * generator.standard_normal((size, size, size))
        draft = shared + 0.5 * generator.standard_normal((size, size))
        return cls(
            _softmax(target.reshape(-1, size)), _softmax(np.repeat(draft[None], size, 0).reshape(-1, size))
        )

    def warped(self, temperature: float, top_p: float) -> FloatArray:
        """The target's distributions, [V * V, V]."""
        return _warped(self.target, temperature, top_p)

    def after(self, contexts: Any, tokens: Any) -> Any:
        """The contexts behind these tokens: integers, or [N] each."""
        return contexts % self.size * self.size + tokens


def _softmax(logits: FloatArray) -> FloatArray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs: FloatArray = weights / weights.sum(axis=1, keepdims=True)
    return probs


def _warped(probs: FloatArray, temperature: float, top_p: float) -> FloatArray:
    if temperature != 1:
        probs = probs ** (1 / temperature)
        probs = probs / probs.sum(axis=1, keepdims=True)
    if top_p < 1:
        order = np.argsort(-probs, axis=1)
        ranked = np.take_along_axis(probs, order, axis=1)
        ranked = np.where(ranked.cumsum(axis=1) - ranked < top_p, ranked, 0.0)
        probs = np.zeros_like(probs)
        np.put_along_axis(probs, order, ranked, axis=1)
        probs = probs / probs.sum(axis=1, keepdims=True)
    return probs


def _drawn(probs: FloatArray, uniforms: FloatArray) -> IntArray:
    """By the inverse of the distribution function. [N, V] and [N] to [N]."""
    sums = probs.cumsum(axis=1)
    drawn: IntArray = np.minimum((sums < uniforms[:, None] * sums[:, -1:]).sum(axis=1), probs.shape[1] - 1)
    return drawn


@dataclass(slots=True)
class Sampler:
    """Speculative sampling, right or with one fault."""

    language: Language
    fault: str = RIGHT
    temperature: float = 1.0
    top_p: float = 1.0
    _target: FloatArray = field(init=False)
    _draft: FloatArray = field(init=False)
    _seen: FloatArray = field(init=False)
    """The draft's distributions as the rule sees them."""

    def __post_init__(self) -> None:
        language, temperature, top_p = self.language, self.temperature, self.top_p
        self._draft = self._seen = _warped(language.draft, temperature, top_p)
        if self.fault == "temperature applied twice":
            temperature = temperature**2
        if self.fault == "top-p of the draft alone":
            top_p = 1.0
        self._target = _warped(language.target, temperature, top_p)
        if self.fault == "draft truncated after sampling":
            least = np.sort(self._draft, axis=1)[:, -6, None]
            kept = np.where(self._draft >= least, self._draft, 0.0)
            self._seen = kept / kept.sum(axis=1, keepdims=True)

    def generate(
        self, contexts: IntArray, length: int, generator: np.random.Generator
    ) -> tuple[IntArray, IntArray]:
        """Completions of prompts.

        Args:
            contexts: [N], the last two tokens of each prompt, V * first + second.
            length: Tokens of each.
            generator: Source of all noise.

        Returns:
            Tokens, and 1 where a proposed token was accepted, both [N, length].
        """
        count, size = len(contexts), self.language.size
        tokens = np.zeros((count, length + PROPOSED + 1), np.int64)
        kept = np.zeros_like(tokens)
        lengths = np.zeros(count, np.int64)
        contexts = contexts.copy()
        reused = generator.exponential(size=(count, size))
        while (active := np.flatnonzero(lengths < length)).size:
            found, accepted = self._round(contexts[active], generator, reused[active])
            for i in range(PROPOSED + 1):
                rows = active[i <= accepted]
                tokens[rows, lengths[rows] + i] = found[i <= accepted, i]
                kept[rows, lengths[rows] + i] = (i < accepted)[i <= accepted]
                contexts[rows] = self.language.after(contexts[rows], found[i <= accepted, i])
            lengths[active] += accepted + 1
        return tokens[:, :length], kept[:, :length]

    def _round(
        self, contexts: IntArray, generator: np.random.Generator, reused: FloatArray
    ) -> tuple[IntArray, IntArray]:
        """One round for each sequence: its tokens [N, K + 1], of which accepted + 1 [N] count."""
        count, size = len(contexts), self.language.size
        found = np.zeros((count, PROPOSED + 1), np.int64)
        accepted = np.zeros(count, np.int64)
        is_going_on = np.ones(count, bool)
        before = contexts
        for i in range(PROPOSED):
            uniforms, noise = generator.random(count), generator.exponential(size=(count, size))
            draft, seen, target = self._draft[contexts], self._seen[contexts], self._target[contexts]
            raced = self.fault == "recovery shares the draft's noise"
            proposed = (draft / noise).argmax(axis=1) if raced else _drawn(draft, uniforms)
            is_kept = is_going_on & self._accepts(proposed, seen, target, uniforms, generator)
            residual = np.maximum(target - seen, 0.0)
            if self.fault in ("residual is the target", "typical-acceptance"):
                residual = target
            if self.fault == "recovery noise is reused":
                noise = reused
            elif not raced:
                noise = generator.exponential(size=(count, size))
            recovered = (residual / noise).argmax(axis=1)
            found[:, i] = np.where(is_going_on, np.where(is_kept, proposed, recovered), found[:, i])
            accepted += is_kept
            is_going_on = is_kept
            before, contexts = contexts, self.language.after(contexts, proposed)
        if self.fault == "bonus from the wrong row":
            contexts = before
        found[:, PROPOSED] = _drawn(self._target[contexts], generator.random(count))
        return found, accepted

    def _accepts(
        self,
        proposed: IntArray,
        draft: FloatArray,
        target: FloatArray,
        uniforms: FloatArray,
        generator: np.random.Generator,
    ) -> BoolArray:
        rows = np.arange(len(proposed))
        p, q = target[rows, proposed], draft[rows, proposed]
        if self.fault == "typical-acceptance":
            entropy = -(target * np.log(np.maximum(target, 1e-300))).sum(axis=1)
            is_typical: BoolArray = p > np.minimum(0.09, 0.3 * np.exp(-entropy))
            return is_typical
        if self.fault != "draft's uniform is reused":
            uniforms = generator.random(len(proposed))
        is_kept: BoolArray = uniforms * q <= p
        return is_kept


def steps_of(
    language: Language, contexts: IntArray, tokens: IntArray, accepted: IntArray, fault: str
) -> Steps:
    """The log probabilities that a server would report: raw ones of the target, unless that is the fault."""
    count, length = tokens.shape
    before = np.concatenate(
        [contexts[:, None] // language.size, contexts[:, None] % language.size, tokens], 1
    )
    places = (before[:, :-2] * language.size + before[:, 1:-1]).reshape(-1)
    probs = language.target[places]
    if fault == "log probabilities of the draft":
        probs = np.where(accepted.reshape(-1, 1) > 0, language.draft[places], probs)
    order = np.argpartition(-probs, LISTED, axis=1)[:, :LISTED]
    order = np.take_along_axis(order, np.argsort(-np.take_along_axis(probs, order, 1), axis=1), axis=1)
    flat = tokens.reshape(-1)
    is_drawn = order == flat[:, None]
    chosen = np.where(is_drawn.any(axis=1), is_drawn.argmax(axis=1), LISTED)
    return Steps(
        ids=order.astype(np.int64),
        probs=np.take_along_axis(probs, order, axis=1),
        chosen=chosen.astype(np.int64),
        tokens=flat,
        index=np.tile(np.arange(length), count),
        is_usable=np.ones(len(flat), bool),
    )


@dataclass(slots=True)
class _Served:
    language: Language
    fault: str
    generator: np.random.Generator
    rounds: int = 0
    accepted: int = 0
    samplers: dict[tuple[float, float], Sampler] = field(default_factory=dict)

    def choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The choices of an answer."""
        context, length, count = self.context(body["prompt"]), body.get("max_tokens", 16), body.get("n", 1)
        temperature, top_p = float(body.get("temperature", 1.0)), float(body.get("top_p", 1.0))
        if temperature == 0:
            one = list(self._greedy(context, length))
            made, accepted = [one] * count, [[0] * length] * count
        else:
            key = (temperature, top_p)
            sampler = self.samplers.setdefault(key, Sampler(self.language, self.fault, *key))
            seed = body.get("seed")
            generator = self.generator if seed is None else np.random.default_rng(seed)
            tokens, flags = sampler.generate(np.full(count, context), length, generator)
            self.accepted += int(flags.sum())
            self.rounds += int(flags.size - flags.sum())
            made, accepted = tokens.tolist(), flags.tolist()
        for index, whole in enumerate(made):
            stops = [place for stop in body.get("stop") or () if (place := text(whole).find(stop)) >= 0]
            kept = whole[: min(stops, default=length)]
            choice = {"index": index, "text": text(kept), "finish_reason": "stop" if stops else "length"}
            if body.get("return_token_ids"):
                choice["token_ids"] = ids_of(text(kept))
            if body.get("logprobs"):
                choice["logprobs"] = self.logprobs(context, kept, accepted[index], body["logprobs"])
            yield choice

    def _greedy(self, context: int, length: int) -> Iterator[int]:
        for _ in range(length):
            token = int(self.language.target[context].argmax())
            context = self.language.after(context, token)
            yield token

    def context(self, prompt: str | list[int]) -> int:
        first, second = (each % self.language.size for each in ids_of(prompt)[-2:])
        return first * self.language.size + second

    def logprobs(self, context: int, tokens: list[int], accepted: list[int], count: int) -> dict[str, Any]:
        logprobs, tops = [], []
        for token, is_accepted in zip(tokens, accepted, strict=False):
            is_wrong = self.fault == "log probabilities of the draft" and is_accepted
            row = np.log((self.language.draft if is_wrong else self.language.target)[context])
            logprobs.append(float(row[token]))
            tops.append({text([int(i)]): float(row[i]) for i in np.argsort(-row)[:count]})
            context = self.language.after(context, token)
        return {
            "tokens": [text([token]) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
        }


def text(tokens: list[int]) -> str:
    """The text of tokens."""
    # One character each, of a range that is long enough, and whose first code point is a multiple of 64
    return "".join(chr(0x4E00 + token) for token in tokens)


def ids_of(prompt: str | list[int]) -> list[int]:
    """The ids of a prompt: its code points."""
    return [ord(character) for character in prompt] if isinstance(prompt, str) else prompt


def application(language: Language, fault: str = RIGHT, seed: int = 0) -> Starlette:
    """Serve a sampler as OpenAI's API, with vLLM's and Tandem's metrics of speculation."""
    served = _Served(language, fault, np.random.default_rng(seed))

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "synthetic"}]})

    async def completions(request: Request) -> Response:
        body = await request.json()
        if body.get("return_tokens_as_token_ids"):
            return JSONResponse({"error": {"message": "return_tokens_as_token_ids is unknown"}}, 400)
        choices = list(served.choices(body))
        usage = {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": body.get("max_tokens", 16) * len(choices),
        }
        if body.get("stream"):
            return StreamingResponse(_events(choices), media_type="text/event-stream")
        return JSONResponse({"choices": choices, "usage": usage})

    async def tokenize(request: Request) -> Response:
        return JSONResponse({"tokens": ids_of((await request.json())["prompt"])})

    async def metrics(_: Request) -> Response:
        rule = "typical-acceptance" if fault == "typical-acceptance" else "residual"
        lines = [
            f'vllm:spec_decode_num_drafts_total{{model_name="synthetic",rule="{rule}"}} {served.rounds}.0',
            f"vllm:spec_decode_num_draft_tokens_total {served.rounds * PROPOSED}.0",
            f"vllm:spec_decode_num_accepted_tokens_total {served.accepted}.0",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {served.accepted / PROPOSED}'
                for i in range(PROPOSED)
            ),
        ]
        return PlainTextResponse("\n".join(lines))

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
        ]
    )


def _events(choices: list[dict[str, Any]]) -> Iterator[str]:
    for choice in choices:
        for character in choice["text"]:
            yield f"data: {json.dumps({'choices': [{'index': choice['index'], 'text': character}]})}\n\n"
    yield "data: [DONE]\n\n"
