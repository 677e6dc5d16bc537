"""Schema of requests to OpenAI's API: OpenAI's fields, vLLM's extensions, and Tandem's.

A field that is missing here is refused by name: nothing that a client asks for is passed over in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from coordinator.http.openai.known import KnownFields
from coordinator.settings.coordinator import MAX_CHAT_MESSAGES
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
