"""Schema of requests to OpenAI's API: OpenAI's fields, vLLM's extensions, and Tandem's.

A field that is missing here is refused by name: nothing that a client asks for is passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from coordinator.settings.coordinator import MAX_CHAT_MESSAGES
from tandem.config.rule import Rule
from tandem.errors import InvalidRequestError

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat continues while there is room."""


ItemT = TypeVar("ItemT")

Items: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a description of each of a million would take half a minute."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class StreamOptions(_Body):
    """Data of a stream beside its text."""

    include_usage: bool = False
    """End with a piece that holds the usage."""


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


class Sampled(_Body, KnownFields):
    """Fields that both kinds of completion share."""

    shared: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "num_speculative_tokens",
        "rejection_sampling_strategy",
        "min_tokens",
        "include_stop_str_in_output",
    )
    """Fields that mean the same in `GenerationRequest`."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    """Added to the target's logits, by token id."""
    response_format: dict[str, Any] | None = None

    top_k: int | None = None
    """vLLM's; 0 or -1 keeps all."""
    min_p: float | None = None
    """vLLM's."""
    repetition_penalty: float | None = None
    """vLLM's."""
    ignore_eos: bool = False
    """vLLM's: do not end at the model's end-of-sequence ids."""
    min_tokens: int | None = None
    """vLLM's: minimum number of tokens."""
    stop_token_ids: Items[int] | None = None
    """vLLM's: ids that end the completion beside the model's own."""
    include_stop_str_in_output: bool = False
    """vLLM's: let the text end with what ended it."""
    return_token_ids: bool = False
    """vLLM's: return the tokens' ids; here also which of them the draft proposed, and how much text each completed."""

    num_speculative_tokens: int | None = None
    """Tandem's: tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Tandem's: acceptance rule, in MAX's or vLLM's spelling."""
    speculation: bool = True
    """Tandem's: false leaves the target alone."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tandem's: how long the completion may take."""

    # Fields about the caller, which do not affect a completion.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def choices(self) -> int:
        """How many completions of each prompt are asked for."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; a single one need not be in a list."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        """The bias of each token id.

        Raises:
            InvalidRequestError: a key is no token id.
        """
        try:
            return {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise InvalidRequestError(
                "logit_bias is for something else than a token id; keys must be integers"
            ) from None


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    passed_over: ClassVar[tuple[str, ...]] = ()
    """A chat may have some."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    """One or several, each as text or as token ids."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompt_count(self) -> int:
        """How many prompts there are."""
        is_one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return 1 if is_one else len(self.prompt)

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each of the prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or any(isinstance(part, int) for part in self.prompt):
            return [tuple(part for part in self.prompt if isinstance(part, int))]
        return [
            part if isinstance(part, str) else tuple(part)
            for part in self.prompt
            if not isinstance(part, int)
        ]

    @property
    def sets_max_tokens(self) -> bool:
        """True if the request itself sets the maximum number of tokens."""
        return self.max_tokens is not None

    @property
    def effective_max_tokens(self) -> int | None:
        """Maximum tokens of each completion."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of tokens at each position whose log probability to return; None: no log probabilities."""
        return self.logprobs


class Message(BaseModel):
    """One message of a chat. What else it holds is for the model's template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | Items[dict[str, Any]] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """All of it, as `model_dump` gives it: that takes three times as long, for JSON that is plain already."""
        return {"role": self.role, "content": self.content, **(self.model_extra or {})}


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    messages: Items[Message] = Field(max_length=MAX_CHAT_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables for the model's template."""
    add_generation_prompt: bool = True
    """vLLM's: end the prompt where the answer begins."""
    continue_final_message: bool = False
    """vLLM's: end the prompt inside the last message, which the answer continues."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Fields that are set but unused, because of other fields of the request."""
        unused = (("tools", "tool_choice"), ("functions", "function_call"))
        return tuple(
            name for name, choice in unused if getattr(self, name) and getattr(self, choice) == "none"
        )

    @property
    def sets_max_tokens(self) -> bool:
        """True if the request itself sets the maximum number of tokens."""
        return self.effective_max_tokens is not None

    @property
    def effective_max_tokens(self) -> int | None:
        """Maximum tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of tokens at each position whose log probability to return; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(_Body):
    """`POST /tokenize`, vLLM's: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1, max_length=MAX_CHAT_MESSAGES)
    add_special_tokens: bool = True
    """Add the special tokens of a prompt; a chat's template writes them itself."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    """Return each token as the tokenizer spells it."""


class DetokenizeBody(_Body):
    """`POST /detokenize`, vLLM's."""

    model: str | None = None
    tokens: Items[int]


class ResponseItem(_Body):
    """One item of a response's input: a message."""

    type: str = "message"
    role: str
    content: str | Items[dict[str, Any]]
    id: str | None = None
    status: str | None = None


class ResponsesBody(_Body):
    """`POST /v1/responses`: text in, text out."""

    model: str | None = None
    input: str | Items[ResponseItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    """Only the format `text` is supported."""
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    previous_response_id: str | None = None
    """Refused: no response is kept."""
    truncation: str | None = None
    background: bool | None = None
    include: Items[str] | None = None
    reasoning: dict[str, Any] | None = None

    # What changes nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None


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


Body = CompletionBody | ChatBody

MAX_CHOICES = 16
"""Maximum completions of one request."""

_NO_STRUCTURE = "this coordinator does not constrain what is written"


def _echo(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.echo:
        yield "echo is true; it must be false: this coordinator does not repeat the prompt"


def _response_format(body: Body) -> Iterator[str]:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        yield f"response_format is {kind}; it must be text: {_NO_STRUCTURE}"


def _tools(body: Body) -> Iterator[str]:
    if not isinstance(body, ChatBody):
        return
    for name in ("tools", "functions"):
        if getattr(body, name) and name not in body.passed_over:
            choice = "tool_choice" if name == "tools" else "function_call"
            yield f"{name} is set; it must be empty, or {choice} none: {_NO_STRUCTURE}"
    for name in ("tool_choice", "function_call"):
        value: Any = getattr(body, name)
        if value not in (None, "none", "auto"):
            shown = value if isinstance(value, str) else "set"
            yield f"{name} is {shown}; it must be none: {_NO_STRUCTURE}"


def _known_fields(body: Body) -> Iterator[str]:
    yield from unavailable(body, Endpoint.CHAT if isinstance(body, ChatBody) else Endpoint.COMPLETIONS)


def _final_message(body: Body) -> Iterator[str]:
    if not isinstance(body, ChatBody) or not body.continue_final_message:
        return
    if "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt:
        yield "add_generation_prompt is true and continue_final_message too; one of them must be false"
    if body.messages and not isinstance(body.messages[-1].content, str):
        yield "continue_final_message is true; the last message's content must be a text"


def _best_of(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.best_of not in (None, body.choices):
        yield f"best_of is {body.best_of}; it must be n, {body.choices}: completions are not ranked"


def _suffix(body: Body) -> Iterator[str]:
    if isinstance(body, CompletionBody) and body.suffix:
        yield "suffix is set; it must be empty: text is completed at its end only"


def _choices(body: Body) -> Iterator[str]:
    if body.choices < 1:
        yield f"n is {body.choices}; it must be at least 1"
        return
    prompts = body.prompt_count if isinstance(body, CompletionBody) else 1
    if prompts < 1:
        yield "prompt is empty; it must hold at least one prompt"
    if prompts * body.choices > MAX_CHOICES:
        of = f" for each of {prompts} prompts" if prompts > 1 else ""
        yield f"n is {body.choices}{of}; it must make at most {MAX_CHOICES} completions"


def _stream_options(body: Body) -> Iterator[str]:
    if body.stream_options is not None and not body.stream:
        yield "stream_options is set; it goes with stream true only"


def _top_logprobs(body: Body) -> Iterator[str]:
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        yield f"top_logprobs is {body.top_logprobs} and logprobs is not true; it must be"


def _messages(body: Body) -> Iterator[str]:
    if isinstance(body, ChatBody) and not body.messages:
        yield "messages is empty; it must hold at least one message"


HTTP_RULES: tuple[Rule[Body], ...] = (
    Rule("echo", "`echo` is false.", _echo),
    Rule("structured-output", "`response_format` is text.", _response_format),
    Rule("tools", "`tools` and `functions` are empty, and no call is required.", _tools),
    Rule(
        "known-fields",
        "Fields of OpenAI and vLLM that are not to be had here ask for nothing: the table of docs/http.md lists them.",
        _known_fields,
    ),
    Rule(
        "final-message",
        "`continue_final_message` goes with a last message of text and without a generation prompt.",
        _final_message,
    ),
    Rule("best-of", "`best_of` is `n`.", _best_of),
    Rule("suffix", "`suffix` is empty.", _suffix),
    Rule("choices", f"A request makes 1 to {MAX_CHOICES} completions.", _choices),
    Rule("stream-options", "`stream_options` goes with `stream`.", _stream_options),
    Rule("top-logprobs", "`top_logprobs` goes with `logprobs`.", _top_logprobs),
    Rule("messages", "A chat has a message.", _messages),
)
