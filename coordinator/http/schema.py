"""What a request to OpenAI's API may hold: its own options, those that vLLM's users know, and Tandem's.

A field that is missing here is refused by name: nothing that a client asks for is passed over in silence.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`; a chat goes on as long as there is room."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class StreamOptions(_Body):
    """What a stream tells beside its text."""

    include_usage: bool = False
    """End with a piece that holds the usage."""


class Sampled(_Body):
    """What both kinds of completion share."""

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
    )
    """Fields that mean in `GenerationRequest` what they mean here."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    top_k: int | None = None
    """vLLM's; 0 or -1 keeps all."""
    min_p: float | None = None
    """vLLM's."""
    repetition_penalty: float | None = None
    """vLLM's."""
    ignore_eos: bool = False
    """vLLM's: do not end at the model's end-of-sequence ids."""
    return_token_ids: bool = False
    """vLLM's: tell the tokens' ids; here also which of them the draft proposed, and how much text each completed."""

    num_speculative_tokens: int | None = None
    """Tandem's: tokens proposed per verification."""
    rejection_sampling_strategy: str | None = None
    """Tandem's: acceptance rule, in MAX's or vLLM's spelling."""
    speculation: bool = True
    """Tandem's: false leaves the target alone."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Tandem's: how long the completion may take."""

    # What says who asks and why, and changes nothing about a completion.
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
        """The stop strings, of which one may come by itself."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Sampled):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """One or several, each as text or as token ids."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

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
    def most_tokens(self) -> int | None:
        """Most tokens of each completion."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many tokens to tell the log probability of at each position; None: of none."""
        return self.logprobs


class Message(BaseModel):
    """One message of a chat. What else it holds is for the model's template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's: variables for the model's template."""
    add_generation_prompt: bool = True
    """vLLM's: end the prompt where the answer begins."""

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """How many tokens to tell the log probability of at each position; None: of none."""
        return (self.top_logprobs or 0) if self.logprobs else None
