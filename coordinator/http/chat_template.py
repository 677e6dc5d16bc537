"""From a chat's messages to a prompt, by the model's own template.

Templates come with the model's files, so they run in Jinja's sandbox, which lets them neither reach Python nor change
what they are given. The environment is that of Hugging Face transformers: templates are written for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import ConfigurationError, InvalidRequestError

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

# What a template may ask for beside the messages.
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """Makes prompts of chats."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Compile a template.

        Raises:
            ConfigurationError: it is no Jinja template. `origin` says where it came from.
        """
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"the chat template of {origin} cannot be compiled: {error}") from None

    def prompt(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt that the chat makes.

        Raises:
            InvalidRequestError: the template does not take these messages; it says why.
        """
        context: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [_plain(index, message) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
        }
        return _rendered(self._template, context)


def read_chat_template(files: Mapping[str, bytes], override: str | None = None) -> ChatTemplate | None:
    """The template of a model's tokenizer files, or the one that is given instead; None when there is none.

    Raises:
        ConfigurationError: it cannot be compiled.
    """
    config = _config(files)
    special_tokens = {
        name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None
    }
    if override is not None:
        return ChatTemplate(override, special_tokens, "chat_template")
    if TEMPLATE_FILE in files:
        return ChatTemplate(files[TEMPLATE_FILE].decode("utf-8", "replace"), special_tokens, TEMPLATE_FILE)
    source = _default_of(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, special_tokens, CONFIG_FILE)


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get(CONFIG_FILE, b"{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _default_of(template: object) -> str | None:
    """The template for chats where a model has several by name."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


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


def _rendered(template: Template, context: dict[str, Any]) -> str:
    try:
        return template.render(context)
    except TemplateError as error:
        raise InvalidRequestError(f"the model's chat template refuses the messages: {error}") from None
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        OverflowError,
    ) as error:
        # What a template does with a message of another shape than it was written for.
        raise InvalidRequestError(f"the model's chat template cannot take the messages: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would read as markup."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
