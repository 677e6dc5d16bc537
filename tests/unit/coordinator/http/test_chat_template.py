"""Chat templates render as transformers does, in a sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import InvalidRequestError, ModelFolderError
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.http.tools import readable

Make = Callable[..., Awaitable[Chats]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Reads a template from a model's files, or from its source; its process ends with the test."""
    made = []

    async def template(
        given: str | dict[str, bytes], override: Path | None = None, *, is_checked: bool = False
    ) -> Chats:
        made.append(Chats(override))
        await made[-1].meet(
            "m", files(chat_template=given) if isinstance(given, str) else given, is_checked=is_checked
        )
        return made[-1]

    yield template
    for each in made:
        each.close()


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
    {%- elif loop.last %}
        {% break %}
    {%- endif %}
    {{- '[' ~ message.role ~ '] ' ~ (message.content | trim) ~ eos_token }}
{%- endfor %}
""",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "training": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}{% set x = 1 %}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ x is defined }}{%- generation -%} y {%- endgeneration %}"
    "{% endfor %}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
    "{{ messages[0] | items | list | length }}{{ messages[0] | dictsort }}{{ '%s-%s' | format('a', 1) }}"
    "{{ messages | tojson(indent=4, sort_keys=True) }}{{ 'é' | tojson(ensure_ascii=True) }}",
    "namespaces": "{% set ns = namespace(seen=false, parts=[]) %}{% for m in messages %}{% set ns.seen = true %}"
    "{% endfor %}{{ ns.seen }}{{ dict(a=1).a }}{{ strftime_now('%Y') | length }}{{ tools is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_prompts_are_those_of_transformers(name: str, make: Make) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = render_jinja_template(
        conversations=[CHAT], chat_template=TEMPLATES[name], add_generation_prompt=True, **special
    )
    template = await make(files(chat_template=TEMPLATES[name], **special))
    assert await template.prompt(CHAT) == rendered[0][0]


def files(**config: object) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps(config).encode()}


async def test_a_template_is_found_in_every_place_where_models_keep_it(make: Make, tmp_path: Path) -> None:
    async def prompt(sent: dict[str, bytes], override: Path | None = None) -> str:
        return await (await make(sent, override)).prompt(CHAT)

    (tmp_path / "own.jinja").write_text("three")
    assert not (await make({})).has_template
    assert not (await make(files(eos_token="x"))).has_template
    assert await prompt(files(chat_template="one")) == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert await prompt(files(chat_template=several)) == "plain"
    both = files(chat_template="one") | {"chat_template.jinja": b"two"}
    assert await prompt(both) == "two"
    assert await prompt(both, tmp_path / "own.jinja") == "three"
    assert await prompt(files(chat_template="{{ bos_token }}", bos_token={"content": "<s>"})) == "<s>"
    special: dict[str, Any] = {"image_token": "i", "extra_special_tokens": {"cite_token": "c"}}
    assert await prompt(files(chat_template="{{ image_token }}{{ cite_token }}", **special)) == "ic"


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is no UTF-8 text"),
        ({"chat_template.jinja": b"x" * (1 << 20) + b"x"}, "must have at most 1048576 bytes"),
        ({"tokenizer_config.json": b"{"}, "is no JSON"),
        ({"tokenizer_config.json": b"[]"}, "holds a list"),
        ({"tokenizer_config.json": b"[" * 100_000}, "is no JSON"),
        ({"tokenizer_config.json": b"\xff"}, "is no JSON"),
        (files(chat_template=5), "has a chat_template of type int"),
        (files(chat_template={"default": "x"}), "has a chat_template of type dict"),
        (files(chat_template=[{"name": "default", "template": ["x"]}]), "has a chat_template of type list"),
        ({"tokenizer_config.json": b'{"eos_token": "\\ud800", "chat_template": [{"name": []}]}'}, ""),
    ],
)
async def test_files_without_a_template_give_none_or_an_error(
    sent: dict[str, bytes], sentence: str, make: Make
) -> None:
    if not sentence:
        assert not (await make(sent)).has_template
        return
    with pytest.raises(ModelFolderError, match=sentence):
        await make(sent)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"{% if %}", "it refuses: "),
        (b"{% for x in [" + b"(" * 3000 + b"1", "cannot be compiled: it "),
        (b"{% set x = 9 ** (9 ** 9) %}", "cannot be compiled: it (takes more than|was not done)"),
    ],
)
async def test_an_invalid_template_is_refused_at_startup(source: bytes, sentence: str, make: Make) -> None:
    with pytest.raises(ModelFolderError, match=sentence) as raised:
        await make({"chat_template.jinja": source}, is_checked=True)
    assert str(raised.value).startswith("the chat template of chat_template.jinja cannot be compiled: it ")


@pytest.mark.parametrize("count", [7, 9])
async def test_a_huge_constant_does_not_block_startup(count: int, make: Make) -> None:
    """Jinja evaluates constants when it compiles."""
    template = await make(f"{{{{ 'a' * 10 ** {count} }}}}", is_checked=True)
    with pytest.raises(InvalidRequestError, match=r"takes more than 512 MiB|has more than 1048576 bytes"):
        await template.prompt(CHAT)


async def test_parts_of_text_become_one_and_developers_are_systems(make: Make) -> None:
    template = await make("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await template.prompt([{"role": "developer", "content": parts}]) == "system: a\nb;"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0]['role'] + messages[0]['content'] + 'x' }}-{{ messages[0].content }}", "assistantx-"),
        ("{% if messages[0]['content'] is none %}a call{% endif %}", "a call"),
        ("{% if messages[0].content is not none %}text{% endif %}", ""),
    ],
)
async def test_a_message_may_have_no_content(make: Make, source: str, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert await (await make(source)).prompt([message]) == text


@pytest.mark.parametrize(
    ("source", "message", "sentence"),
    [
        ("{{ raise_exception('only users') }}", {"role": "user", "content": "x"}, "it refuses: only users"),
        ("{{ messages[0].content + 1 }}", {"role": "user", "content": "x"}, "it fails: "),
        ("{{ 1 / 0 }}", {"role": "user", "content": "x"}, "it fails: "),
        ("x", {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages.0.content is of type"),
        # what the sandbox keeps from a template
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", {"role": "user", "content": "x"}, "is unsafe"),
        ("{{ messages.append(1) }}", {"role": "user", "content": "x"}, "is unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", {"role": "user", "content": "x"}, "is unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", {"role": "user", "content": "x"}, "it fails: "),
    ],
)  # fmt: skip
async def test_messages_that_a_template_rejects_are_refused(
    source: str, message: dict[str, Any], sentence: str, make: Make
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        await (await make(source)).prompt([message])
    assert sentence in str(refusal.value)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "an endless loop": (ENDLESS, "takes more than 2 s"),
    "a huge text": ("{% set x = messages[0].content * 10 ** 10 %}", "takes more than 512 MiB"),
    "doubling": (
        "{% set ns = namespace(x='attack') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "takes more than"),
    "recursion": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "it fails: "),
    "a long prompt": (
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "the prompt has more than 1048576 bytes"),
    "a long refusal": ("{{ raise_exception('x' * 10 ** 7) }}", "it refuses: x"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
async def test_time_memory_and_length_are_bounded(case: str, make: Make) -> None:
    """And the event loop runs meanwhile."""
    source, sentence = HOSTILE[case]
    template = await make("{% if messages[0].content == 'attack' %}" + source + "{% else %}good{% endif %}")
    rendering = asyncio.create_task(template.prompt([{"role": "user", "content": "attack"}]))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(InvalidRequestError, match=sentence) as raised:
        await rendering
    assert len(str(raised.value)) < 2000
    assert turns > 10 or case != "an endless loop"
    assert await template.prompt([{"role": "user", "content": "x"}]) == "good", "the next chat is served"


def environment_of(process_id: int) -> bytes:
    """The variables of a process, where the system reports them."""
    path = Path(f"/proc/{process_id}/environ")
    return path.read_bytes() if path.exists() else b""


async def test_the_process_inherits_no_secrets_is_restarted_and_ends_with_its_template(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_COORDINATOR_AUTH_TOKEN", "secret-secret-secret")
    template = await make("{{ messages[0].content }}", is_checked=True)
    assert template._process is not None
    killed = template._process._process
    assert killed is not None
    assert b"secret" not in environment_of(killed.pid)
    killed.kill()
    killed.wait()
    assert await template.prompt(CHAT) == "Be brief."
    process = template._process._process
    assert process is not None
    template.close()
    template._process._thread.shutdown(wait=True)
    assert process.returncode is not None


def test_arguments_reach_templates_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = readable({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    odd = {**call, "function": {"name": "f", "arguments": "{"}}
    assert readable({"role": "assistant", "tool_calls": [odd, 5]})["tool_calls"] == [odd, 5]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}  # type: ignore[index]
