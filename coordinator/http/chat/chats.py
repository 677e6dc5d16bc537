"""From a chat to its prompt, over gRPC and HTTP alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.http.chat.template import ChatTemplate, Message, read_chat_template
from coordinator.requests.plan import Models
from coordinator.requests.validation import too_much_text
from coordinator.settings.coordinator import MAX_CHAT_MESSAGES, RequestBounds
from tandem.errors import ConfigurationError, InvalidRequestError
from tandem.plural import plural


class Chats:
    """The template that makes prompts of chats: the configured one, else the model's own."""

    def __init__(self, override: Path | None) -> None:
        """Read the configured template, if there is one.

        Raises:
            ConfigurationError: it cannot be read.
        """
        self._override = None if override is None else _read(override)
        self.template: ChatTemplate | None = None
        """None until `meet`, and when the model has none."""

    async def meet(self, tokenizer_files: Mapping[str, bytes], *, is_checked: bool) -> None:
        """Take the template from the target's tokenizer files.

        Args:
            tokenizer_files: By name.
            is_checked: True to compile it now, in a process of its own, rather than for the first chat.

        Raises:
            ConfigurationError: it is no template.
        """
        self.template = read_chat_template(tokenizer_files, self._override)
        if self.template is not None and is_checked:
            await self.template.check()

    def close(self) -> None:
        """End the template's process."""
        if self.template is not None:
            self.template.close()


def check_message_count(count: int) -> None:
    """Refuse a chat of no messages, or of too many.

    Raises:
        InvalidRequestError: it is one.
    """
    if not 1 <= count <= MAX_CHAT_MESSAGES:
        raise InvalidRequestError(
            f"the chat has {plural(count, 'message')}; it must have 1 to {MAX_CHAT_MESSAGES}"
        )


async def text_of_chat(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    models: Models,
    bounds: RequestBounds,
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt's text.

    Raises:
        InvalidRequestError: there is no template, or it does not take the messages.
        CapacityError: too many chats wait for their prompts.
    """
    if template is None:
        raise InvalidRequestError(
            f"the model {models.target.name} has no chat template; send a prompt instead of a chat, or start the "
            "coordinator with --chat-template FILE"
        )
    return await template.prompt(
        messages, variables, add_generation_prompt=add_generation_prompt, max_bytes=bounds.max_prompt_bytes
    )


async def ids_of_chat(text: str, models: Models, bounds: RequestBounds) -> tuple[int, ...]:
    """The prompt's token ids.

    Raises:
        InvalidRequestError: the prompt is too large.
    """
    # The request's own check comes later and sees only ids.
    if sentences := list(too_much_text(text, bounds, models.max_text_bytes)):
        raise InvalidRequestError("; ".join(sentences))
    # The template writes the special tokens itself.
    return await models.encoder.encode(text, add_special_tokens=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--chat-template {path} cannot be read as UTF-8 text: {error}") from None
