"""The fields of a request that OpenAI's and vLLM's clients send, and how Tandem treats each.

docs/http.md shows this table, the rule `known-fields` reads it, and a test checks the endpoints against every row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Effect(Enum):
    """Effect of a field's accepted values."""

    WORKS = "works"
    """They change the completion that is asked for."""
    ANSWER = "answer"
    """They change the form of the answer."""
    NOTHING = "no effect"
    """They are taken, and change nothing."""
    REFUSED = "refused"
    """Only values that ask for nothing are taken."""


class Endpoint(Enum):
    """Where a field may stand."""

    BOTH = "both"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of a request."""

    name: str
    effect: Effect
    vllm: str
    """How vLLM treats it."""
    here: str
    """How this coordinator treats it; for a refused field the reason."""
    accepted: tuple[Any, ...]
    """Values that are taken; null always is."""
    refused: tuple[Any, ...] = ()
    """Values that are answered with 400."""
    endpoint: Endpoint = Endpoint.BOTH
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the values need."""

    def stands_in(self, endpoint: Endpoint) -> bool:
        """True if requests to that endpoint may hold it."""
        return self.endpoint in (Endpoint.BOTH, endpoint)


_W, _A, _N, _R = Effect.WORKS, Effect.ANSWER, Effect.NOTHING, Effect.REFUSED
_CHAT, _COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
_SAME = "the same"
_TOOL: Mapping[str, Any] = {"type": "function", "function": {"name": "f"}}
_UNCONSTRAINED = "this coordinator does not constrain what is written"


def _works(name: str, *accepted: Any, here: str = _SAME, vllm: str = "works", **more: Any) -> FieldRow:
    return FieldRow(name, _W, vllm, here, accepted, **more)


def _shapes(name: str, *accepted: Any, here: str = _SAME, vllm: str = "works", **more: Any) -> FieldRow:
    return FieldRow(name, _A, vllm, here, accepted, **more)


def _ignored(name: str, *accepted: Any, here: str = "taken", vllm: str = "taken", **more: Any) -> FieldRow:
    return FieldRow(name, _N, vllm, here, accepted, **more)


def _only(name: str, *accepted: Any, here: str, refused: tuple[Any, ...], **more: Any) -> FieldRow:
    vllm = more.pop("vllm", "works")
    return FieldRow(name, _R, vllm, here, accepted, refused, **more)


FIELDS: tuple[FieldRow, ...] = (
    _ignored("model", "m", here="must be the served model's name; may be left out", vllm="the same"),
    _works("prompt", "y", ["y"], [5, 6], [[5], [6]], endpoint=_COMPLETIONS),
    _works("messages", [{"role": "user", "content": "other"}], refused=([],), endpoint=_CHAT),
    _works(
        "max_tokens",
        9,
        here="400 when there is no room for so many; 16 for completions unless set",
        vllm="the same",
        refused=(0, 64),
    ),
    _works("max_completion_tokens", 9, refused=(0, 64), endpoint=_CHAT),
    _works("min_tokens", 3, refused=(-1, 64)),
    _works("temperature", 0, 0.5, refused=(-1,)),
    _works("top_p", 0.5, refused=(0, 1.5)),
    _works("top_k", 5, -1, 0, here="0 and -1 keep all"),
    _works("min_p", 0.1, refused=(2,)),
    _works("seed", 7, refused=(2**70,)),
    _works("stop", "x", ["x", "y"], refused=([""],), here="up to `max_stop_strings`"),
    _works("stop_token_ids", [5], refused=([-1],)),
    _works("include_stop_str_in_output", True),
    _works("ignore_eos", True),
    _works("logit_bias", {"5": 1.5}, refused=({"5": 101}, {"x": 1}), here="400 beyond -100 to 100; vLLM clamps"),
    _works(
        "frequency_penalty", 0.5, refused=(3,), beside={"speculation": False},
        here="with a draft model refused, or served without drafting (`draft_model_penalties`)",
    ),
    _works(
        "presence_penalty", 0.5, refused=(3,), beside={"speculation": False}, here="as `frequency_penalty`"
    ),
    _works(
        "repetition_penalty", 1.2, refused=(0,), beside={"speculation": False}, here="as `frequency_penalty`"
    ),
    _shapes("n", 1, 2, refused=(0, 17), here="up to 16 completions in all"),
    _shapes("stream", True, False),
    _shapes("stream_options", {"include_usage": True}, beside={"stream": True}),
    _works("logprobs", 0, 5, refused=(21,), endpoint=_COMPLETIONS, here="up to 20"),
    _works("logprobs", True, endpoint=_CHAT, here=_SAME),
    _works("top_logprobs", 3, refused=(21,), beside={"logprobs": True}, endpoint=_CHAT, here="up to 20"),
    _shapes("return_token_ids", True, here="also returns which tokens the draft proposed"),
    _ignored("user", "someone"),
    _ignored("metadata", {"a": "b"}),
    _ignored("store", True, False, here="taken; nothing is stored"),
    _ignored("service_tier", "auto", "default"),
    _ignored("safety_identifier", "someone"),
    _ignored("prompt_cache_key", "key"),
    _ignored("parallel_tool_calls", True, False, endpoint=_CHAT),
    _only("best_of", 1, here="it must be n: completions are not ranked", refused=(3,), endpoint=_COMPLETIONS),
    _only("echo", False, here="this coordinator does not repeat the prompt", refused=(True,),
          endpoint=_COMPLETIONS),
    _only("suffix", "", here="text is completed at its end only", refused=("end",), endpoint=_COMPLETIONS,
          vllm="refused"),
    _only("response_format", {"type": "text"}, here=_UNCONSTRAINED, refused=({"type": "json_object"},)),
    FieldRow(
        "tools", _N, "works", "ignored with `tool_choice: none`, and said so in `X-Tandem-Ignored`; else refused",
        ([_TOOL],), endpoint=_CHAT, beside={"tool_choice": "none"},
    ),
    _only("tool_choice", "none", "auto", here=_UNCONSTRAINED, refused=("required", {"type": "function"}),
          endpoint=_CHAT),
    _only("functions", [], here=_UNCONSTRAINED, refused=([{"name": "f"}],), endpoint=_CHAT, vllm="ignored"),
    _only("function_call", "none", "auto", here=_UNCONSTRAINED, refused=({"name": "f"},), endpoint=_CHAT,
          vllm="ignored"),
    _works("chat_template_kwargs", {"mood": "calm"}, endpoint=_CHAT),
    _works("add_generation_prompt", False, endpoint=_CHAT),
    _works("continue_final_message", True, endpoint=_CHAT, here="`add_generation_prompt` need not be said"),
    _only("use_beam_search", False, here="this coordinator does not search in beams", refused=(True,)),
    _only("length_penalty", 1.0, here="this coordinator does not search in beams", refused=(0.5,)),
    _only("skip_special_tokens", True, here="this coordinator does not write special tokens", refused=(False,)),
    _only("spaces_between_special_tokens", True, here="this coordinator does not write special tokens",
          refused=(False,)),
    _only("add_special_tokens", True, here="a text prompt has the tokenizer's special tokens; send token ids",
          refused=(False,), endpoint=_COMPLETIONS),
    _only("add_special_tokens", False, here="the chat template writes special tokens", refused=(True,),
          endpoint=_CHAT),
    _only("truncate_prompt_tokens", here="this coordinator does not shorten prompts", refused=(5,)),
    _only("prompt_logprobs", here="this coordinator does not score prompts", refused=(1,)),
    _only("allowed_token_ids", here=_UNCONSTRAINED, refused=([5],)),
    _only("bad_words", [], here=_UNCONSTRAINED, refused=(["x"],)),
    _only("structured_outputs", here=_UNCONSTRAINED, refused=({"regex": "a"},)),
    _only("guided_json", here=_UNCONSTRAINED, refused=({},), vllm="an older name"),
    _only("guided_regex", here=_UNCONSTRAINED, refused=("a",), vllm="an older name"),
    _only("guided_choice", here=_UNCONSTRAINED, refused=(["a"],), vllm="an older name"),
    _only("guided_grammar", here=_UNCONSTRAINED, refused=("a",), vllm="an older name"),
    _only("logits_processors", here="no code of a client is run", refused=(["x"],)),
    _only("priority", 0, here="requests are served in the order in which they come", refused=(1,)),
    _only("return_tokens_as_token_ids", False, here="ask for return_token_ids", refused=(True,)),
    _only("cache_salt", here="this coordinator does not keep prefixes apart", refused=("salt",)),
    _only("request_id", here="the coordinator names requests itself", refused=("mine",)),
    _only("kv_transfer_params", here="KV caches are not handed over", refused=({"a": 1},)),
    _only("vllm_xargs", {}, here="they are vLLM's own", refused=({"a": 1},)),
    _only("modalities", ["text"], here="the model writes text only", refused=(["audio"],), endpoint=_CHAT),
    _only("audio", here="the model writes text only", refused=({"voice": "a"},), endpoint=_CHAT, vllm="ignored"),
    _only("prediction", here="drafts come from the draft service", refused=({"type": "content"},), endpoint=_CHAT,
          vllm="ignored"),
    _only("web_search_options", here="nothing is searched", refused=({"a": 1},), endpoint=_CHAT, vllm="ignored"),
    _only("reasoning_effort", "none", here="set it in chat_template_kwargs", refused=("high",), endpoint=_CHAT),
    _only("verbosity", "medium", here="the model has no such setting", refused=("low",), endpoint=_CHAT,
          vllm="ignored"),
    _only("include_reasoning", True, here="reasoning is not separated from the answer", refused=(False,),
          endpoint=_CHAT),
    _only("documents", here="set them in chat_template_kwargs", refused=([{"a": "b"}],), endpoint=_CHAT),
    _only("chat_template", here="the template is the server's", refused=("x",), endpoint=_CHAT),
    _only("mm_processor_kwargs", here="the model reads text only", refused=({"a": 1},), endpoint=_CHAT),
    _works("num_speculative_tokens", 3, refused=(0,), vllm="none", here="Tandem's own"),
    _works("rejection_sampling_strategy", "strict", vllm="none", here="Tandem's own"),
    _works("speculation", False, vllm="none", here="Tandem's own"),
    _shapes("timeout_seconds", 5.0, refused=(0,), vllm="none", here="Tandem's own"),
)  # fmt: skip
"""In the order of the documentation."""


def rows_of(endpoint: Endpoint) -> dict[str, FieldRow]:
    """The fields of an endpoint by name."""
    return {row.name: row for row in FIELDS if row.stands_in(endpoint)}


def markdown() -> str:
    """The table of docs/http.md."""
    lines = [
        "| field | endpoint | vLLM | here | taken, for instance | 400, for instance |",
        "|---|---|---|---|---|---|",
    ]
    for row in FIELDS:
        here = row.here if row.effect is not _R else f"refused: {row.here}"
        cells = (f"`{row.name}`", row.endpoint.value, row.vllm, here, _examples(row.accepted) or "null",
                 _examples(row.refused))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _examples(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json_text(value)}`" for value in values)


def json_text(value: Any) -> str:
    """A value as a request spells it."""
    return json.dumps(value, ensure_ascii=False)
