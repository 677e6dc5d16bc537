"""From a chat's messages to a prompt, by the model's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.http.chat.renderer import Renderer, RenderingError, TemplateTooLongError
from tandem.errors import ConfigurationError, InvalidRequestError, ModelFolderError

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

MAX_SOURCE_BYTES = 1 << 20
"""Maximum size of a template. Published ones have up to some 30 KiB."""

_SLACK = 2
"""Prompts are rendered to twice their bound, so that the refusal of one can say how long it is."""

_NAMED_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
"""Where a config has special tokens by names of its own."""

Message = Mapping[str, Any]


class ChatTemplate:
    """Makes prompts of chats, in a process of its own: `close` ends it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        refusal: type[ConfigurationError] = ConfigurationError,
    ) -> None:
        """A template that is compiled at its first use.

        Args:
            source: Jinja.
            special_tokens: Variables for it beside the messages.
            origin: Where it came from, for error messages.
            refusal: The error to raise then.

        Raises:
            ConfigurationError: it is too large.
        """
        self._special_tokens = special_tokens
        self._origin = origin
        self._refusal = refusal
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise refusal(
                f"the chat template of {origin} has {len(source)} characters; it must have at most "
                f"{MAX_SOURCE_BYTES} bytes"
            )
        self._renderer = Renderer(source)

    async def check(self) -> None:
        """Compile it.

        Raises:
            ConfigurationError: it is no Jinja template, or takes too much time or memory.
        """
        try:
            await self._renderer.compile()
        except RenderingError as error:
            self.close()
            raise self._refusal(
                f"the chat template of {self._origin} cannot be compiled: it {error}"
            ) from None

    def close(self) -> None:
        """End its process."""
        self._renderer.close()

    async def prompt(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        max_bytes: int = 1 << 20,
    ) -> str:
        """The prompt that the chat makes. It may have up to twice `max_bytes`; the caller measures it.

        Raises:
            InvalidRequestError: the template does not take these messages, and says why; or it takes too much time or
                memory, or writes far more than that.
            CapacityError: too many chats wait for their prompts.
        """
        context: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [_plain(index, message) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return await self._renderer.render(context, _SLACK * max_bytes)
        except TemplateTooLongError:
            raise InvalidRequestError(
                f"the prompt has more than {max_bytes} bytes; it must be at most {max_bytes}"
            ) from None
        except RenderingError as error:
            raise InvalidRequestError(
                f"the model's chat template cannot make a prompt of the messages: it {error}"
            ) from None


def read_chat_template(files: Mapping[str, bytes], override: str | None = None) -> ChatTemplate | None:
    """The given template, or that of a model's tokenizer files; None when there is none.

    Raises:
        ModelFolderError: the model's files hold no valid template.
        ConfigurationError: the given template is too large.
    """
    config = _config(files)
    special_tokens = _special_tokens(config)
    if override is not None:
        return ChatTemplate(override, special_tokens, "chat_template")
    if TEMPLATE_FILE in files:
        return ChatTemplate(_text(files, TEMPLATE_FILE), special_tokens, TEMPLATE_FILE, ModelFolderError)
    source = _default_of(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens, CONFIG_FILE, ModelFolderError)


def _text(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFolderError(f"the model's {name} is no UTF-8 text: {error}") from None


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    if CONFIG_FILE not in files:
        return {}
    try:
        config = json.loads(_text(files, CONFIG_FILE))
    except RecursionError:
        raise ModelFolderError(f"the model's {CONFIG_FILE} is nested too deeply to be read") from None
    except ValueError as error:
        raise ModelFolderError(
            f"the model's {CONFIG_FILE} should be JSON, but does not parse: {error}"
        ) from None
    if not isinstance(config, dict):
        raise ModelFolderError(
            f"the model's {CONFIG_FILE} should hold a JSON object, but holds a {type(config).__name__}"
        )
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as transformers gives them to templates; those of its own names too."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    for key in _NAMED_TOKENS:
        if isinstance(tokens := config.get(key), dict):
            named |= tokens
    return {name: text for name, token in named.items() if (text := _token_text(token)) is not None}


def _default_of(template: object) -> str | None:
    """The template for chats where a model has several by name."""
    if isinstance(template, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(
            f"the model's {CONFIG_FILE} has a chat_template of type {type(template).__name__}; it should be a text, or "
            "a list of texts with names"
        )
    return template


def _token_text(token: object) -> str | None:
    """A special token's text; some files keep more about it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _plain(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: its content one text, and the roles that models were trained with."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(index, part) for part in content)
    # OpenAI's newer name for the same role.
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": content}


def _part(index: int, part: Mapping[str, Any]) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequestError(
            f"messages.{index}.content is of type {kind}; it must be text: the model reads nothing else"
        )
    return text
