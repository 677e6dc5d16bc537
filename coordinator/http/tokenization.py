"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.http.bodies.unknown_fields import ignored_header
from coordinator.http.openai.api import OpenAIApi
from coordinator.http.openai.prompts import chat_prompt
from coordinator.http.openai.schema import ChatBody, DetokenizeBody, TokenizeBody
from coordinator.requests.validation import too_much_text
from tandem.errors import InvalidRequestError


class Tokenization:
    """The target's tokenizer over HTTP."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._api.body(request, TokenizeBody)
        self._api.check_model(body.model)
        models = self._api.backend.models
        token_ids = await self._token_ids(body)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": models.target.max_length,
            "tokens": list(token_ids),
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [models.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return JSONResponse(answer, headers=ignored_header(request.state.ignored_fields))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = await self._api.body(request, DetokenizeBody)
        self._api.check_model(body.model)
        models = self._api.backend.models
        size = models.target.vocabulary_size
        unknown = next((token_id for token_id in body.tokens if not 0 <= token_id < size), None)
        if unknown is not None:
            raise InvalidRequestError(f"tokens holds token id {unknown}; ids must be in 0..{size - 1}")
        # Tens of thousands of ids take long enough for others to notice.
        text = await asyncio.to_thread(models.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text}, headers=ignored_header(request.state.ignored_fields))

    async def _token_ids(self, body: TokenizeBody) -> tuple[int, ...]:
        backend = self._api.backend
        models, bounds = backend.models, backend.bounds
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt and messages are both set, or neither is; give one of them")
        if body.messages is not None:
            chat = ChatBody(
                messages=body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            return await chat_prompt(chat, models, backend.chat_template, bounds)
        assert body.prompt is not None
        if sentences := list(too_much_text(body.prompt, bounds, models.max_text_bytes)):
            raise InvalidRequestError("; ".join(sentences))
        return await models.encoder.encode(body.prompt, add_special_tokens=body.add_special_tokens)
