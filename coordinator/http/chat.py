"""From a chat to its prompt, by the model's template.

Templates come from strangers, so a process of its own renders them, within bounds (`chat_worker`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from coordinator.http.chat_worker import (
    CPU_SECONDS,
    MEMORY_BYTES,
    REAL_SECONDS,
    read_message,
    write_message,
)
from coordinator.requests.plan import Models
from coordinator.requests.validation import too_much_text
from coordinator.settings.coordinator import MAX_CHAT_MESSAGES, RequestBounds
from tandem.errors import CapacityError, ConfigurationError, InvalidRequestError, ModelFolderError
from tandem.plural import plural

logger = logging.getLogger(__name__)

MOST_WAITING = 64
"""Chats that wait for their prompts, one being rendered at a time. Few: a published template takes milliseconds."""

_WORKER = "coordinator.http.chat_worker"
_KEPT_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")
"""Environment variables for the process: the time zone and Python's paths, but no tokens."""
_REAL_SIGNAL = signal.SIGALRM
_CPU_SIGNAL = signal.SIGPROF


class RenderingError(Exception):
    """A template has no answer; the text completes "the template ..."."""


class TemplateTooLongError(RenderingError):
    """The rendered text is longer than allowed."""


class Renderer:
    """Compiles and renders one template in a process of its own, which is started again when a bound has ended it.

    Its one thread waits for the process, so the event loop never does.
    """

    def __init__(self, source: str) -> None:
        """A renderer for this template; its process starts later."""
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-chat")
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting = 0
        self._is_closed = False

    async def compile(self) -> None:
        """Start the process, and let it compile the template.

        Raises:
            RenderingError: it cannot.
        """
        await self._asked(None)

    async def render(self, context: dict[str, Any], most_characters: int) -> str:
        """The rendered text.

        Raises:
            RenderingError: the template fails, or takes too much time or memory.
            TemplateTooLongError: the text is longer than that.
            CapacityError: too many chats wait.
        """
        return await self._asked({"context": context, "most_characters": most_characters})

    def close(self) -> None:
        """End the process. A chat in progress gets no answer."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)
        if self._process is not None:
            self._process.kill()

    async def _asked(self, job: dict[str, Any] | None) -> str:
        if self._waiting >= MOST_WAITING:
            raise CapacityError(f"{self._waiting} chats wait for their prompts; try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._answered, job)
        finally:
            self._waiting -= 1

    # ---- on the thread

    def _answered(self, job: dict[str, Any] | None) -> str:
        if self._is_closed:
            raise RenderingError("is not rendered any more")
        try:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._compile()
            assert self._process is not None
            return "" if job is None else _text_of(self._exchanged(self._process, job))
        except _EndedError:
            raise RenderingError(_why(self._end())) from None

    def _compile(self) -> None:
        self._process = _started()
        try:
            _text_of(self._exchanged(self._process, {"source": self._source}))
        except RenderingError:
            self._end()
            raise

    @staticmethod
    def _exchanged(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
        try:
            write_message(cast(BinaryIO, process.stdin), message)
            answer = read_message(cast(BinaryIO, process.stdout))
        except OSError:
            answer = None
        if answer is None:
            raise _EndedError
        return cast(dict[str, Any], answer)

    def _end(self) -> int:
        """Close the process and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()  # does nothing to one that has ended
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unread input is lost
                cast(BinaryIO, pipe).close()
        return process.wait()


class _EndedError(Exception):
    """The process has ended instead of answering."""


def _started() -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    # -P: the working directory is not trusted.
    command = [sys.executable, "-P", "-m", _WORKER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)


def _text_of(answer: dict[str, Any]) -> str:
    if "too_long" in answer:
        raise TemplateTooLongError("writes too much")
    if "refused" in answer:
        raise RenderingError(f"refuses: {answer['refused']}")
    if "failed" in answer:
        raise RenderingError(f"fails: {answer['failed']}")
    if "exhausted" in answer:
        raise RenderingError(f"takes more than {MEMORY_BYTES >> 20} MiB")
    return str(answer.get("text", ""))


def _why(exit_code: int) -> str:
    reason = {
        -_CPU_SIGNAL: f"takes more than {CPU_SECONDS:g} s",
        -_REAL_SIGNAL: f"was not done within {REAL_SECONDS:g} s",
    }.get(exit_code, f"ended its process with {exit_code}")
    logger.warning("the process of the chat template ended", extra={"reason": reason})
    return reason


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
