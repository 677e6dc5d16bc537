"""The process that compiles and renders chat templates: `python -m tandem_coordinator.http.chat_worker`.

The first job may be the source of the template that the others are rendered by; see `tandem.bounded.worker` for the
bounds.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.bounded.worker import LONGEST_REASON, work

_TESTS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
"""In templates that know messages without content, such as DeepSeek's. Others write None, or fail: they get "", as from
vLLM."""


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks the assistant's text for training. In a prompt it is
    an ordinary block with a scope of its own, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def template_environment() -> ImmutableSandboxedEnvironment:
    """The environment for chat templates, as in transformers (`transformers.utils.chat_template_utils`, version 5.23).

    The sandbox lets a template neither reach Python nor change its input. It does not bound time or memory.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes what HTML would read as markup."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class _Compiled:
    """A template."""

    def __init__(self, source: str) -> None:
        self.template: Template = template_environment().from_string(source)
        self.reads_null = _TESTS_FOR_NULL.search(source) is not None


class _Templates:
    """Renders chats, each by the template that comes with it, else by the one that came without a chat."""

    _own: _Compiled | None = None

    def answer(self, job: Any) -> dict[str, Any]:
        try:
            compiled = _Compiled(job["source"]) if "source" in job else self._own
            assert compiled is not None, "the first message has a template"
            if "context" not in job:
                self._own = compiled
                return {}
            if not compiled.reads_null:
                for message in job["context"]["messages"]:
                    message["content"] = "" if message["content"] is None else message["content"]
            text = ""
            for piece in compiled.template.generate(job["context"]):
                text += piece
                if len(text) > job["max_characters"]:
                    return {"text": None}
            return {"text": text}
        except TemplateError as error:
            return {"failed": f"refuses: {str(error)[:LONGEST_REASON]}"}


if __name__ == "__main__":
    work(_Templates().answer)
