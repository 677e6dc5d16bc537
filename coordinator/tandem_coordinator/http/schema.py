"""The bodies of requests: every field of OpenAI, vLLM and Tandem once, with its type, its meaning and what is refused.

A field that is missing here is ignored and named in a header, or refused: nothing that a client asks for is passed over
in silence. docs/http.md and `/openapi.json` are made from these classes. A new option is one field in `Sampled`; if
`GenerationRequest` has it under the same name, nothing else on the HTTP side needs to know of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tandem.errors import InvalidRequestError
from tandem.model.types import Grammar, GrammarKind
from tandem_coordinator.http.errors import SHOWN_CHARACTERS, shown
from tandem_coordinator.http.tools import demanded, functions_of
from tandem_coordinator.settings.coordinator import MAX_CHAT_MESSAGES

MAX_CHOICES = 16
"""Maximum completions of one request. Each takes a place among those that run, of which there are 256 by default."""

_OTHER_NAME = "it is SGLang's name of {}"
_NO_BEAMS = "this coordinator does not search in beams"
_TEXT_ONLY = "the model reads and writes text only"
_TAKEN = "Accepted, without effect."

ItemT = TypeVar("ItemT")

Items: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: a description of each of a million would take half a minute."""


def only(*taken: Any, because: str) -> Any:
    """A field that is known but not to be had: values that ask for nothing are taken, all others are refused."""
    values = " or ".join(f"`{shown(value)}`" for value in taken)
    description = f"Refused{f' unless {values}' if values else ''}: {because}."
    return Field(
        default=None, description=description, json_schema_extra={"enum": [None, *taken], "why": because}
    )


class Known(BaseModel):
    """An object whose unknown fields are reported."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    def unknown(self) -> Iterator[str]:
        """Names of the fields that it does not know, with dots where objects lie in each other."""
        yield from self.model_extra or ()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Known):
                yield from (f"{name}.{field}" for field in value.unknown())
            elif isinstance(value, list) and value and isinstance(value[0], Known):
                for index, item in enumerate(value):
                    yield from (f"{name}.{index}.{field}" for field in item.unknown())

    def refusals(self) -> Iterator[str]:
        """A sentence for each field that asks for something that is not to be had."""
        for name, field in type(self).model_fields.items():
            only: Any = field.json_schema_extra  # where `only` made the field
            if only is not None and (value := getattr(self, name)) not in only["enum"]:
                allowed = " or ".join(map(shown, only["enum"][1:])) or "left out"
                yield f"{name} is {shown(value)}; it must be {allowed}: {only['why']}"


class Body(Known):
    """The body of a request."""

    model: str | None = None
    """The served model's name, or left out."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Fields that are set but unused, because of other fields of the request."""
        return ()


class AboutCaller(Body):
    """Fields about the caller, which are taken and do not affect a completion."""

    user: str | None = Field(default=None, description=_TAKEN)
    metadata: dict[str, str] | None = Field(default=None, description=_TAKEN)
    store: bool | None = Field(default=None, description="Accepted; nothing is stored.")
    service_tier: str | None = Field(default=None, description=_TAKEN)
    safety_identifier: str | None = Field(default=None, description=_TAKEN)
    prompt_cache_key: str | None = Field(default=None, description=_TAKEN)
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description=_TAKEN)
    prompt_cache_retention: str | None = Field(default=None, description=_TAKEN)
    session_id: str | None = Field(default=None, description=_TAKEN)


class StreamOptions(Known):
    """Data of a stream beside its text."""

    include_usage: bool = False
    """End with a piece that holds the usage."""
    continuous_usage_stats: bool = False
    """vLLM's: with `include_usage`, each piece has the usage of its completion so far."""

    @property
    def is_continuous(self) -> bool:
        """True if each piece is to have the usage."""
        return self.include_usage and self.continuous_usage_stats


class Sampled(AboutCaller):
    """Fields of both kinds of completion. `GenerationRequest` has most of them under the same names."""

    default_max_tokens: ClassVar[int | None] = None
    max_tokens: int | None = None
    """Maximum tokens; 400 if there is no room for that many. By default 16 for completions."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`."""
    min_tokens: int | None = None
    """vLLM's: minimum tokens."""
    temperature: float | None = None
    """0 is greedy, and so is what lies below 0.0001. By default the model's own, else 1."""
    top_p: float | None = None
    """Sample from the most probable tokens that have this probability together."""
    top_k: int | None = None
    """vLLM's: sample from this many most probable tokens; 0 and -1 keep all."""
    min_p: float | None = None
    """vLLM's: leave out tokens below this share of the most probable one's probability."""
    seed: int | None = None
    """Makes the completion reproducible under `strict` (which `auto` picks for it) and with the fixed policy; otherwise
    the text also depends on how many tokens were proposed."""
    stop: str | Items[str] | None = None
    """Strings that end the completion, up to `max_stop_strings`."""
    stop_token_ids: Items[int] | None = None
    """vLLM's: ids that end the completion beside the model's own."""
    include_stop_str_in_output: bool = False
    """vLLM's: let the text end with what ended it."""
    ignore_eos: bool = False
    """vLLM's: do not end at the model's end-of-sequence ids."""
    logit_bias: dict[int, float] | None = None
    """Added to the target's logits, by token id: 400 beyond -100 to 100."""
    frequency_penalty: float | None = None
    """With a separate draft model `draft_model_penalties` decides: draft all the same, the target alone (header
    `X-Tandem-Target-Alone`), or refuse."""
    presence_penalty: float | None = None
    """As `frequency_penalty`."""
    repetition_penalty: float | None = None
    """vLLM's; as `frequency_penalty`."""
    n: int | None = None
    """Completions of each prompt; up to 16 in all."""
    stream: bool | None = None
    """Send the completion as events while it is made."""
    stream_options: StreamOptions | None = None
    """`{"include_usage": true}`: end with a piece that holds the usage; with `continuous_usage_stats`, which is vLLM's,
    every piece has it. Needs `stream`."""
    request_id: str | None = None
    """vLLM's: part of the answer's id and of the request's name in logs, unless there is a header `X-Request-Id`."""
    priority: int = 0
    """vLLM's: of the requests that wait for a place, those with a lower value go first, and equal ones by turns among
    clients."""
    return_token_ids: bool | None = None
    """vLLM's: return the ids of the prompt's and the completion's tokens; here also which of them the draft proposed,
    and how much text each completed."""
    return_probabilities: bool = False
    """Tandem's: with `return_token_ids`, how probable draft and target found each token; null where the acceptance rule
    does not need it."""
    sampled_logprobs: bool = False
    """Tandem's: with `return_token_ids`, two log probabilities of each token: `raw_logprobs` by the model alone, and
    `processed_logprobs` by the distribution that it was drawn from."""
    num_speculative_tokens: int | None = None
    """Tandem's: tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Tandem's: acceptance rule, in MAX's or vLLM's spelling."""
    speculation: bool = True
    """Tandem's: false leaves the target alone."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tandem's: how long the completion may take."""

    response_format: dict[str, Any] | None = None
    """Form of the text: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {"schema": ...}}`, which
    holds with `strict` and without ([structured-output.md](structured-output.md))."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: one of `json` (a schema), `regex`, `choice`, `grammar` and `json_object`."""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's older name of `structured_outputs.json`, as are the next three."""
    guided_regex: str | None = None
    """`structured_outputs.regex`."""
    guided_choice: list[str] | None = None
    """`structured_outputs.choice`."""
    guided_grammar: str | None = None
    """`structured_outputs.grammar`."""
    allowed_token_ids: Items[int] | None = None
    """vLLM's: write only tokens of these ids, up to `max_logit_biases`."""
    bad_words: Items[str] | None = None
    """vLLM's: do not write these texts, as the tokenizer splits each by itself; the form with a space before it counts
    where it begins with another token and has as many. Up to 256."""
    use_beam_search: Any = only(False, because=_NO_BEAMS)
    length_penalty: Any = only(1.0, because=_NO_BEAMS)
    skip_special_tokens: bool = True
    """vLLM's: false writes special tokens into the text."""
    spaces_between_special_tokens: Any = only(True, because="the tokenizer decides about spaces")
    truncate_prompt_tokens: int | None = None
    """vLLM's: keep only so many tokens of a longer prompt; -1: as many as leave room for a token."""
    truncation_side: Literal["left", "right"] | None = None
    """vLLM's: the end of the prompt at which they are left out; by default `left`, the beginning."""
    prompt_logprobs: int | None = None
    """vLLM's: return log probabilities of the prompt's tokens and of this many alternatives, up to 20. Not in a
    stream."""
    logits_processors: Any = only(because="no code of a client is run")
    return_tokens_as_token_ids: bool | None = None
    """vLLM's: log probabilities name tokens `token_id:{id}`, in place of their texts."""
    cache_salt: str | None = None
    """vLLM's: keeps the request apart from the caller's requests with another salt or none, which then share no prefix
    cache and no earlier answers ([security.md](security.md#callers)). 1 to 256 characters."""
    kv_transfer_params: Any = only(because="KV caches are not handed over")
    ec_transfer_params: Any = only(because=_TEXT_ONLY)
    vllm_xargs: Any = only({}, because="they are vLLM's own")
    mm_payload: Any = only(because=_TEXT_ONLY)
    return_mm_kwargs: Any = only(False, because=_TEXT_ONLY)
    logprob_token_ids: Any = only([], because="alternatives are the most probable tokens")
    routed_experts_prompt_start: Any = only(0, because="experts are not reported")
    return_token_offsets: Any = only(False, because="text_lengths of return_token_ids say where tokens lie")
    return_weight_versions: Any = only(False, because="system_fingerprint names the weights")
    repetition_detection: Any = only(because="use repetition_penalty, or stop strings")
    thinking_token_budget: Any = only(-1, because="reasoning has no limit of its own; set max_tokens")
    watermarking: Any = only(False, because="texts are not marked")
    stream_interval: Any = only(because="it is an option of the coordinator")
    regex: Any = only(because=_OTHER_NAME.format("structured_outputs.regex"))
    ebnf: Any = only(because=_OTHER_NAME.format("structured_outputs.grammar"))
    json_schema: Any = only(because=_OTHER_NAME.format("structured_outputs.json"))
    no_stop_trim: Any = only(False, because=_OTHER_NAME.format("include_stop_str_in_output"))
    stop_regex: Any = only([], because="stop takes texts")
    custom_logit_processor: Any = only(because="no code of a client is run")
    return_hidden_states: Any = only(False, because="hidden states stay with the target")
    lora_path: Any = only(because="the model is served without adapters")

    @property
    def choices(self) -> int:
        """Completions of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each of the prompts; none for a chat, whose template makes it."""
        return []

    @property
    def token_limit(self) -> int | None:
        """The maximum that the request itself sets for its tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def passed_over(self) -> tuple[str, ...]:
        return ("prompt_logprobs",) if self.prompt_logprobs is not None and self.stream else ()

    @property
    def alternatives(self) -> int | None:
        """Number of tokens at each position whose log probability to return; None: no log probabilities."""
        raise NotImplementedError

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the completion; None for any text."""
        forms = [*_of_format(self.response_format), *_of_outputs(self.structured_outputs)]
        guided = ((form, f"guided_{form}") for form in ("json", "regex", "choice", "grammar"))
        forms += [(form, name, value) for form, name in guided if (value := getattr(self, name)) is not None]
        grammars = [_grammar(*form) for form in forms]
        if len(grammars) > 1:
            raise InvalidRequestError(
                f"the completion's form is given {len(grammars)} times; response_format or structured_outputs must say "
                "it once"
            )
        return grammars[0] if grammars else None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        try:
            self.grammar  # noqa: B018 - for its refusals
        except InvalidRequestError as error:
            yield str(error)
        if self.choices < 1:
            yield f"n is {self.choices}; it must be at least 1"
        elif max(count := len(self.prompts), 1) * self.choices > MAX_CHOICES:
            of = f" for each of {count} prompts" if count > 1 else ""
            yield f"n is {self.choices}{of}; it must make at most {MAX_CHOICES} completions"
        if self.stream_options is not None and not self.stream:
            yield "stream_options is set; it needs stream true"
        if self.allowed_token_ids == []:
            yield "allowed_token_ids is []; it must hold an id, or be left out"
        if self.stream and (self.prompt_logprobs or 0) > 0:
            yield f"prompt_logprobs is {self.prompt_logprobs} and stream is true; it must be 0 or left out in a stream"


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    default_max_tokens: ClassVar = 16  # OpenAI's; a chat continues while there is room
    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    """One or several, each as text or as token ids."""
    logprobs: int | None = None
    """Return log probabilities of the tokens and of this many alternatives, up to 20."""
    best_of: int | None = None
    """It must be `n`: completions are not ranked."""
    echo: bool = False
    """Begin with the prompt, and with its log probabilities if `logprobs` is set. `max_tokens` may be 0."""
    prompt_embeds: Any = only(because="prompts are text or token ids")
    suffix: Any = only("", because="text is completed at its end only")
    add_special_tokens: Any = only(
        True, because="a text prompt has the tokenizer's special tokens; send token ids"
    )

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt or isinstance(prompt[0], int):
            return [tuple(prompt)]
        return [part if isinstance(part, str) else tuple(part) for part in prompt]

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.best_of not in (None, self.choices):
            yield f"best_of is {self.best_of}; it must be n, {self.choices}: completions are not ranked"


class Message(BaseModel):
    """One message of a chat. What else it holds is for the model's template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | Items[dict[str, Any]] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """All of it, as `model_dump` gives it: that takes three times as long, for JSON that is plain already."""
        return {"role": self.role, "content": self.content, **(self.model_extra or {})}


class Chat(Body):
    """A chat, and how its prompt is made."""

    messages: Items[Message] | None = Field(default=None, min_length=1, max_length=MAX_CHAT_MESSAGES)
    """The chat."""
    chat_template: str | None = None
    """vLLM's: the template that makes the prompt in place of the model's, within the same bounds
    ([Chats](#chats))."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables for the template."""
    add_generation_prompt: bool = True
    """vLLM's: end the prompt where the answer begins."""
    continue_final_message: bool = False
    """vLLM's: end the prompt inside the last message, which the answer continues; `add_generation_prompt` need not be
    said."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The functions that the template is given."""
        return []

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if not self.continue_final_message:
            return
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            yield "add_generation_prompt is true and continue_final_message too; one of them must be false"
        if self.messages and not isinstance(self.messages[-1].content, str):
            yield "continue_final_message is true; the last message's content must be a text"


class ChatBody(Chat, Sampled):
    """`POST /v1/chat/completions`."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_CHAT_MESSAGES)
    """The chat."""
    echo: bool = False
    """vLLM's: begin the answer with the last message's text, if that is the assistant's or is continued."""
    reasoning_effort: str | None = None
    """A variable for the model's template, as in vLLM."""
    logprobs: bool | None = None
    """Return log probabilities."""
    top_logprobs: int | None = None
    """Return those of this many alternatives too, up to 20."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call. Ignored with `tool_choice: none`; `X-Tandem-Ignored` says so."""
    tool_choice: str | dict[str, Any] | None = None
    """`none`, `auto` (the default with tools), `required`, or a function by name. A grammar binds what is demanded."""
    parallel_tool_calls: bool | None = None
    """False: at most one call is demanded by `required`; the model's own choice is not bound."""
    functions: Items[dict[str, Any]] | None = None
    """OpenAI's older name of `tools`, with `function_call`."""
    function_call: Any = only("none", "auto", because="use tool_choice")
    add_special_tokens: Any = only(False, because="the chat template writes special tokens")
    modalities: Any = only(["text"], because=_TEXT_ONLY)
    audio: Any = only(because=_TEXT_ONLY)
    mm_processor_kwargs: Any = only(because=_TEXT_ONLY)
    prediction: Any = only(because="drafts come from the draft service")
    web_search_options: Any = only(because="nothing is searched")
    verbosity: Any = only("medium", because="the model has no such setting")
    include_reasoning: bool | None = None
    """vLLM's: false leaves the reasoning that is told from the answer out of it."""
    input_ids: Any = only(because="token ids are the prompt of a completion")
    media_io_kwargs: Any = only({}, because=_TEXT_ONLY)
    return_prompt_text: Any = only(False, because="return_token_ids returns the prompt's ids")
    documents: Any = only(because="set them in chat_template_kwargs")

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return (self.tools or []) if self.may_call else []

    @property
    def echoed(self) -> str:
        """The text of the last message, with which the answer begins as well; empty without `echo`."""
        last = self.messages[-1]
        role = last.role if not self.add_generation_prompt or self.continue_final_message else "assistant"
        if not self.echo or last.role != role:
            return ""
        return as_one_text("messages", last.content) or ""

    @property
    def may_call(self) -> bool:
        """True if the completion may be calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def grammar(self) -> Grammar | None:
        calls = demanded(
            self.tool_choice, functions_of(self.tools), parallel=self.parallel_tool_calls is not False
        )
        form = super().grammar
        if calls is not None and form is not None:
            raise InvalidRequestError(
                "tool_choice demands a call and the text has a form; one of them must be left out"
            )
        return calls or form

    @property
    def passed_over(self) -> tuple[str, ...]:
        unused = (("tools", "tool_choice"), ("functions", "function_call"))
        idle = (name for name, choice in unused if getattr(self, name) and getattr(self, choice) == "none")
        return (*idle, *super().passed_over)

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.functions and "functions" not in self.passed_over:
            yield "functions is set; it must be empty, or function_call none: use tools"
        if self.top_logprobs is not None and not self.logprobs:
            yield f"top_logprobs is {self.top_logprobs} and logprobs is not true; it must be"


class TokenizeBody(Chat):
    """`POST /tokenize`, vLLM's: a prompt, or a chat."""

    prompt: str | None = None
    """The prompt."""
    add_special_tokens: bool = True
    """Add the special tokens of a prompt; a chat's template writes them itself."""
    tools: Items[dict[str, Any]] | None = None
    """Functions, for the template."""
    media_io_kwargs: Any = only({}, because=_TEXT_ONLY)
    mm_processor_kwargs: Any = only({}, because=_TEXT_ONLY)
    return_token_strs: bool = False
    """Return each token as the tokenizer spells it."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return self.tools or []

    def refusals(self) -> Iterator[str]:
        if (self.prompt is None) == (self.messages is None):
            yield "prompt and messages are both set, or neither is; give one of them"
        elif self.prompt is None:
            yield from super().refusals()


class DetokenizeBody(Body):
    """`POST /detokenize`, vLLM's."""

    tokens: Items[int]
    """Ids of the target's vocabulary."""


class TextForm(Known):
    """The form of a text in the words of another API."""

    format: dict[str, Any] | None = None
    """`text`, `json_object`, or `json_schema` with a `schema`."""

    @property
    def response_format(self) -> dict[str, Any] | None:
        """The form as a chat has it."""
        if self.format is None or self.format.get("type") != "json_schema":
            return self.format
        return {"type": "json_schema", "json_schema": {"schema": self.format.get("schema")}}

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        yield from form_refusals(self.response_format, "format")


class ChatDialect(AboutCaller):
    """The body of a request that asks for a chat in the words of another API."""

    limit_name: ClassVar[str] = "max_tokens"
    """Its word for the maximum of tokens."""
    prompt_name: ClassVar[str] = "messages"
    """Its word for what makes the prompt."""

    temperature: float | None = None
    """As of a completion."""
    top_p: float | None = None
    """As of a completion."""
    top_k: int | None = None
    """As of a completion."""
    min_p: float | None = None
    """As of a completion."""
    frequency_penalty: float | None = None
    """As of a completion."""
    presence_penalty: float | None = None
    """As of a completion."""
    repetition_penalty: float | None = None
    """As of a completion."""
    seed: int | None = None
    """As of a completion."""
    stop_token_ids: Items[int] | None = None
    """As of a completion."""
    ignore_eos: bool = False
    """As of a completion."""
    skip_special_tokens: bool = True
    """As of a completion."""
    include_stop_str_in_output: bool = False
    """As of a completion."""
    cache_salt: str | None = None
    """As of a completion."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As of a chat."""
    stream: bool | None = None
    """Send the answer as events while it is made."""
    num_speculative_tokens: int | None = None
    """As of a completion."""
    rejection_sampling_strategy: str | None = None
    """As of a completion."""
    speculation: bool = True
    """As of a completion."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """As of a completion."""
    request_id: str | None = None
    """As of a completion."""
    priority: int = 0
    """As of a completion."""
    kv_transfer_params: Any = only(because="KV caches are not handed over")
    ec_transfer_params: Any = only(because=_TEXT_ONLY)
    vllm_xargs: Any = only({}, because="they are vLLM's own")
    mm_payload: Any = only(because=_TEXT_ONLY)
    return_mm_kwargs: Any = only(False, because=_TEXT_ONLY)
    watermarking: Any = only(False, because="texts are not marked")

    @property
    def unused(self) -> Mapping[str, bool]:
        """Fields, and whether they are set without an effect."""
        return {}

    @property
    def passed_over(self) -> tuple[str, ...]:
        return tuple(name for name, is_unused in self.unused.items() if is_unused)

    def chat(self) -> ChatBody:
        """The chat that it asks for."""
        raise NotImplementedError

    def make_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], **fields: Any
    ) -> ChatBody:
        """A chat of these messages, with what it has under the same names. The request's own variables for the template
        are stronger than those that its other fields make."""
        variables = {**variables, **(self.chat_template_kwargs or {})}
        return ChatBody(
            **self.shared_fields(),
            messages=[Message(**message) for message in messages],
            chat_template_kwargs=variables or None,
            **fields,
        )

    def shared_fields(self) -> dict[str, Any]:
        """The fields that a chat has under the same names."""
        shared = ChatDialect.model_fields.keys() & ChatBody.model_fields.keys() - {"chat_template_kwargs"}
        return {
            name: getattr(self, name)
            for name in shared & self.model_fields_set - AboutCaller.model_fields.keys()
        }


def as_one_text(name: str, content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """The content of a message, with its parts joined; they must be of these kinds."""
    if not isinstance(content, list):
        return content
    for part in content:
        if (kind := part.get("type")) not in kinds or not isinstance(part.get("text"), str):
            wanted = " or ".join(kinds)
            raise InvalidRequestError(
                f"{name}.content is of type {kind}; it must be {wanted}: the model reads nothing else"
            )
    return "\n".join(part["text"] for part in content)


# ---- the fields of completions, for docs


def field_rows() -> Iterator[tuple[str, str, str]]:
    """Each field of a completion: its name, the endpoint (both, completions, chat), and its meaning."""
    completions = CompletionBody.model_fields
    chat = ChatBody.model_fields
    for name, field in {**completions, **chat}.items():
        if name in completions and name in chat and completions[name].description == field.description:
            yield name, "both", field.description or ""
            continue
        for endpoint, fields in (("completions", completions), ("chat", chat)):
            if name in fields:
                yield name, endpoint, fields[name].description or ""


# ---- the form that a body asks of its completion


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_FORMS: Mapping[str, tuple[GrammarKind, Callable[[Any], bool], str]] = {
    "json": (GrammarKind.JSON_SCHEMA, lambda value: isinstance(value, str | dict | bool), "a JSON schema"),
    "regex": (GrammarKind.REGEX, _is_text, "a text"),
    "choice": (
        GrammarKind.CHOICE,
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)),
        "a list of texts",
    ),
    "grammar": (GrammarKind.GRAMMAR, _is_text, "a text"),
    "json_object": (GrammarKind.JSON_OBJECT, lambda value: value is True, "true"),
}
"""By vLLM's names: the kind of grammar, which values make one, and those values in words."""

_Form = tuple[str, str, Any]
"""A form by vLLM's name, the field that asks for it, and its value."""


def _grammar(form: str, name: str, value: Any) -> Grammar:
    kind, makes_one, wanted = _FORMS[form]
    if not makes_one(value):
        raise _wrong(name, value, wanted)
    if kind is GrammarKind.JSON_OBJECT:
        return Grammar(kind)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _of_format(
    value: Mapping[str, Any] | None,
    name: str = "response_format",
    described_by: str = "response_format.json_schema",
) -> Iterator[_Form]:
    """OpenAI's `response_format`: the names are those that the client gave to it and to what holds its schema."""
    kind = "text" if value is None else value.get("type")
    if kind == "json_object":
        yield kind, name, True
    elif kind == "json_schema":
        described = (value or {}).get(kind)
        if not isinstance(described, dict) or "schema" not in described:
            raise _wrong(described_by, described, 'an object with "schema"')
        yield "json", f"{described_by}.schema", described["schema"]
    elif kind != "text":
        raise _wrong(f"{name}.type", kind, "text, json_object or json_schema")


def _of_outputs(value: Mapping[str, Any] | None) -> Iterator[_Form]:
    """vLLM's `structured_outputs`."""
    given = {name: own for name, own in (value or {}).items() if own is not None}
    if len(given) > 1 or not given.keys() <= _FORMS.keys():
        raise InvalidRequestError(
            f"structured_outputs has {', '.join(map(str, given))[:SHOWN_CHARACTERS]}; it must have one of "
            f"{', '.join(_FORMS)}"
        )
    for name, own in given.items():
        yield name, f"structured_outputs.{name}", own


def form_refusals(response_format: Mapping[str, Any] | None, name: str) -> Iterator[str]:
    """A sentence for what is wrong with a `response_format` that the client gave under another name."""
    try:
        for form in _of_format(response_format, name, name):
            _grammar(*form)
    except InvalidRequestError as error:
        yield str(error)


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {shown(value)}; it must be {wanted}")
