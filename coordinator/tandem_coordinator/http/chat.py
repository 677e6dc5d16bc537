"""From a chat to its prompt, by the model's template.

Templates come from strangers with the models, so a process of its own compiles and renders one, within bounds
(`chat_worker`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.bounded.process import BoundedProcess, JobError
from tandem.errors import ConfigurationError, InvalidRequestError, ModelFolderError, plural
from tandem_coordinator.http.schema import as_one_text
from tandem_coordinator.http.tools import readable
from tandem_coordinator.parsers.forms import (
    AUTO,
    HARMONY,
    HARMONY_REASONING,
    CallForm,
    ReasoningForm,
    call_form,
    reasoning_form,
)
from tandem_coordinator.settings.coordinator import MAX_CHAT_MESSAGES

logger = logging.getLogger(__name__)

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_SOURCE_BYTES = 1 << 20
"""Maximum size of a template. Published ones have up to some 30 KiB."""

Message = Mapping[str, Any]

_WORKER = f"{__package__}.chat_worker"


class Chats:
    """Makes prompts of chats by the configured template, else by the model's own, in a process of its own."""

    call_form: CallForm | None = None
    """Form in which the model writes calls of tools; None until `meet`, and where none is read."""
    reasoning_form: ReasoningForm | None = None
    """Form in which the model writes reasoning; likewise."""
    is_instruct = False
    """True if the template marks who speaks, as templates of models that were trained on chats do."""

    def __init__(
        self, override: Path | None, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        try:
            self._override = None if override is None else override.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            sentence = f"--chat-template {override} cannot be read as UTF-8 text: {error}"
            raise ConfigurationError(sentence) from None
        self._process: BoundedProcess | None = None
        """None while there is no template."""
        self.tokenizer_info: dict[str, Any] = {}
        """The model's tokenizer_config.json, with the template in force."""
        self._guest = BoundedProcess(_WORKER)
        """For the templates of requests, so that one that uses up its bounds ends no chat by the model's own."""

    async def meet(self, model: str, tokenizer_files: Mapping[str, bytes], *, is_checked: bool) -> None:
        """Take the template of the target's tokenizer files where none is configured, and compile it now if it
        `is_checked`, else at its first use."""
        self._model = model
        config = _config(tokenizer_files)
        self._special_tokens = _special_tokens(config)
        self.tokenizer_info = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        source = self._override
        name = "chat_template"
        refusal = ConfigurationError
        if source is None:
            source, name = _own_template(tokenizer_files, config)
            refusal = ModelFolderError
        if source is None:
            return
        self.tokenizer_info["chat_template"] = source
        if len(source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            size = f"the chat template of {name} has {len(source)} characters"
            raise refusal(f"{size}; it must have at most {MAX_SOURCE_BYTES} bytes")
        self.is_instruct = "assistant" in source
        self.call_form = call_form(self._tool_call_parser, source)
        self.reasoning_form = reasoning_form(self._reasoning_parser, source)
        if self.reasoning_form is HARMONY_REASONING:
            self.call_form = HARMONY  # its messages are reasoning, calls and text
        self._process = BoundedProcess(_WORKER, {"source": source})
        if is_checked:
            try:
                await self._process.answer(None)
            except JobError as error:
                self.close()
                raise refusal(f"the chat template of {name} cannot be compiled: it {error}") from None

    @property
    def has_template(self) -> bool:
        return self._process is not None

    def close(self) -> None:
        """End the processes. A chat in progress gets no answer."""
        self._guest.close()
        if self._process is not None:
            self._process.close()

    async def prompt(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        max_bytes: int = 1 << 20,
    ) -> str:
        """The text of a chat's prompt, with its special tokens. It may have up to twice `max_bytes`, which the caller
        measures. `template` takes the place of the model's. Other arguments are those of transformers'
        `apply_chat_template`."""
        if not 1 <= len(messages) <= MAX_CHAT_MESSAGES:
            raise InvalidRequestError(
                f"the chat has {plural(len(messages), 'message')}; it must have 1 to {MAX_CHAT_MESSAGES}"
            )
        process = self._process if template is None else self._guest
        if process is None:
            raise InvalidRequestError(
                f"the model {self._model} has no chat template; send a prompt instead of a chat, or start the "
                "coordinator with --chat-template FILE"
            )
        job: dict[str, Any] = {}
        if template is not None:
            job["source"] = template
            size = len(template.encode("utf-8", "surrogatepass"))
            if size > MAX_SOURCE_BYTES:
                raise InvalidRequestError(
                    f"chat_template has {size} bytes; it must have at most {MAX_SOURCE_BYTES}"
                )
        context: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(variables or {}),
            "messages": [readable(_plain(index, message)) for index, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            # To twice the bound, so that the refusal of a longer prompt can say how long it is
            job |= {"context": context, "max_characters": 2 * max_bytes}
            answer = await process.answer(job)
        except JobError as error:
            owner = "the model's chat template" if template is None else "chat_template"
            reason = f"{owner} cannot make a prompt of the messages: it {error}"
            raise InvalidRequestError(reason) from None
        text: str | None = answer["text"]
        if text is None:
            raise InvalidRequestError(
                f"the prompt has more than {max_bytes} bytes; it must be at most {max_bytes}"
            )
        if continue_final_message and isinstance(content := messages[-1]["content"], str):
            return _open_ended(text, content)
        return text


def _open_ended(prompt: str, final_text: str) -> str:
    """The prompt up to the end of the final message's text, without the rest of the template's output.

    Meaning and name (`continue_final_message`) are those of transformers' `apply_chat_template`.
    """
    stripped = final_text.strip()
    start = prompt.rfind(stripped)
    if start < 0 or not stripped:
        raise InvalidRequestError(
            "continue_final_message is true and the chat template does not write the last message's text; it must "
            "be false for such a chat"
        )
    # A template may strip the message; where it does not, trailing white space belongs to it.
    written = final_text.lstrip()
    end = start + len(written) if prompt.startswith(written, start) else start + len(stripped)
    return prompt[:end]


def _plain(index: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: its content one text, and the roles that models were trained with."""
    # OpenAI's newer name for the same role.
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": as_one_text(f"messages.{index}", message.get("content"))}


# ---- the model's files


def _own_template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The template of a model's tokenizer files, None when there is none, and the file that holds it."""
    if (sent := files.get(TEMPLATE_FILE)) is not None:
        try:
            return sent.decode("utf-8"), TEMPLATE_FILE
        except UnicodeDecodeError as error:
            raise ModelFolderError(f"the model's {TEMPLATE_FILE} is no UTF-8 text: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelFolderError(
            f"the model's {CONFIG_FILE} has a chat_template of type {type(template).__name__}; it should be a text, or "
            "a list of texts with names"
        )
    return template, CONFIG_FILE


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get(CONFIG_FILE, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"the model's {CONFIG_FILE} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFolderError(
            f"the model's {CONFIG_FILE} holds a {type(config).__name__}, and no JSON object"
        )
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as transformers gives them to templates; those of its own names too."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(tokens := config.get(key), dict):
            named |= tokens
    # Some files keep more about a token than its text.
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
