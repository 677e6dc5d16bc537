"""From messages to a prompt: as transformers does it, and never out of the sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coordinator.http.chat_template import ChatTemplate, read_chat_template
from tandem.errors import ConfigurationError, InvalidRequestError

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<Hi> & 'bye'"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Ünïcode?"},
]

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
        "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "blocks": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {% continue %}
    {%- endif %}
    {{- '[' ~ message.role ~ '] ' ~ (message.content | trim) ~ eos_token }}
{%- endfor %}
""",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% break %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = render_jinja_template(
        conversations=[CHAT], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
    )
    assert ChatTemplate(TEMPLATES[name], special, "test").prompt(CHAT) == rendered[0][0]


def files(**config: object) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(config).encode()}


def test_where_a_template_comes_from() -> None:
    def prompt(sent: dict[str, bytes], override: str | None = None) -> str:
        template = read_chat_template(sent, override)
        assert template is not None
        return template.prompt(CHAT)

    assert read_chat_template({}) is None
    assert read_chat_template(files(eos_token="x")) is None
    assert prompt(files(chat_template="one")) == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert prompt(files(chat_template=several)) == "plain"
    assert prompt(files(chat_template="one") | {"chat_template.jinja": b"two"}) == "two"
    assert prompt(files(chat_template="one") | {"chat_template.jinja": b"two"}, "three") == "three"
    assert prompt(files(chat_template="{{ bos_token }}", bos_token={"content": "<s>"})) == "<s>"


def test_what_is_no_template_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigurationError, match=r"the chat template of chat_template\.jinja cannot be compiled"
    ):
        read_chat_template({"chat_template.jinja": b"{% if %}"})


def test_parts_of_text_become_one_and_developers_are_systems() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", {}, "test")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.prompt([{"role": "developer", "content": parts}]) == "system: a\nb;"


@pytest.mark.parametrize(
    ("source", "message", "sentence"),
    [
        (
            "{{ raise_exception('only users') }}",
            {"role": "user", "content": "x"},
            "refuses the messages: only users",
        ),
        ("{{ messages[0].content + 1 }}", {"role": "user", "content": "x"}, "cannot take the messages"),
        ("{{ 1 / 0 }}", {"role": "user", "content": "x"}, "cannot take the messages"),
        (
            "x",
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content is of type",
        ),
    ],
)
def test_messages_that_a_template_does_not_take(source: str, message: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        ChatTemplate(source, {}, "test").prompt([message])
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}, "test").prompt(CHAT)
