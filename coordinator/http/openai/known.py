"""Fields of OpenAI's and vLLM's APIs that are known here only to be passed over, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from coordinator.http.openai.fields import Endpoint, json_text, rows_of


class KnownFields(BaseModel):
    """Known fields; the rule `known-fields` allows them the values in `FIELDS`."""

    use_beam_search: Any = None
    length_penalty: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    priority: Any = None
    return_tokens_as_token_ids: Any = None
    cache_salt: Any = None
    request_id: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    include_reasoning: Any = None
    documents: Any = None
    chat_template: Any = None
    mm_processor_kwargs: Any = None


_SHOWN_CHARACTERS = 80


def unavailable(body: KnownFields, endpoint: Endpoint) -> Iterator[str]:
    """A sentence for each known field with an unsupported value."""
    rows = rows_of(endpoint)
    for name in KnownFields.model_fields:
        value = getattr(body, name)
        if value is None:
            continue
        if name not in rows:
            yield f"{name} is not an option of this request"
        elif value not in rows[name].accepted:
            row = rows[name]
            allowed = " or ".join(map(json_text, row.accepted)) or "left out"
            yield f"{name} is {json_text(value)[:_SHOWN_CHARACTERS]}; it must be {allowed}: {row.here}"
