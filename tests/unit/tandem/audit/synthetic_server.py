"""A sampler of the synthetic language behind OpenAI's API."""

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

from benchmarks.faulty_server import PROPOSED, RIGHT, Language, Sampler


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
