"""The forms in which models write calls of tools and reasoning: a table of small grammars, one entry a form.

A model writes as its chat template taught it, so the template tells which form to expect; `--tool-call-parser` and
`--reasoning-parser` name one instead, by vLLM's names.

transformers reads such forms as well, by a model's `response_template` (`transformers.utils.chat_parsing`, tried in
version 5.23), and its region_chunk events stream. It is not used here: the coordinator runs without transformers; a
call's name and arguments are known only when the call ends, and until then its raw text is streamed; a malformed or
unfinished call raises a ValueError for the whole answer; white space at the ends of the content is stripped, and
content before a call is lost where more follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

AUTO = "auto"
"""The name that leaves the choice to the model's template."""
NONE = "none"
"""The name that has nothing read: all of the text is content."""

THINK_START = "<think>"
THINK_END = "</think>"
"""The markers that most reasoning models share."""


@dataclass(frozen=True, slots=True)
class ObjectCalls:
    """Calls as JSON: `{"name": ..., "arguments": {...}}`, or a list of such objects."""

    separator: str = ""
    """Stands between objects that are in no list. White space may stand there too."""


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls as a name and the arguments as a JSON object, in this order: start, kind, name, id_mark and an identifier,
    before_arguments, arguments, end. Those that are empty are not there."""

    start: str = ""
    kind: str = ""
    id_mark: str = ""
    """It may be missing, with the identifier behind it."""
    before_arguments: str = ""
    needs_mark: bool = True
    """False if the arguments may follow the name without the mark before them."""
    end: str = ""


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """Calls as a name and tagged arguments, in this order: start, name, name_end; for each argument key_start, its
    name, key_end, value_start, its value, value_end; end. The values are plain text, which the tool's JSON schema
    gives types."""

    key_start: str
    key_end: str
    value_end: str
    start: str = ""
    name_end: str = ""
    value_start: str = ""
    end: str = ""
    """Ends the call; empty where the end of its group does."""
    has_lines: bool = False
    """True if a value has lines of its own between its tags: the line breaks around it belong to the tags."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls as a Python list of calls with keyword arguments, which are literals: `[f(city="Oslo", days=3)]`."""


@dataclass(frozen=True, slots=True)
class ChannelMessages:
    """The whole completion as messages with channels, of which calls and reasoning are some (harmony)."""


Syntax = ObjectCalls | NamedCalls | TaggedCalls | PythonCalls | ChannelMessages


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form in which models write calls."""

    names: tuple[str, ...]
    """vLLM's names of its parsers for it."""
    template: tuple[str, ...]
    """Texts of which a chat template that teaches it has at least one."""
    syntax: Syntax
    other: Syntax | None = None
    """Another syntax behind the same marks, for a text that does not go on as `syntax` begins."""
    begins: tuple[str, ...] = ()
    """Marks that begin calls anywhere in the text."""
    ends: tuple[str, ...] = ()
    """Marks that end calls which a mark has begun. They may be left out."""
    opening: str = ""
    """Begins calls where the text begins: models leave out their mark."""
    shows_begin: bool = False
    """True if the mark that begins calls is shown as text."""
    template_too: str = ""
    """Text that such a template has as well."""

    def is_taught_by(self, template: str) -> bool:
        """True if this chat template has it."""
        return self.template_too in template and any(text in template for text in self.template)

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that a tokenizer may have as special tokens."""
        found = [*self.begins, *self.ends]
        for syntax in (self.syntax, self.other):
            match syntax:
                case NamedCalls():
                    found += [syntax.start, syntax.kind, syntax.id_mark, syntax.before_arguments, syntax.end]
                case TaggedCalls():
                    found += [
                        syntax.start, syntax.key_start, syntax.key_end,
                        syntax.value_start, syntax.value_end, syntax.end,
                    ]  # fmt: skip
        return tuple(filter(None, found))


HARMONY = CallForm(
    ("openai",),
    template=("<|channel|>",),
    syntax=ChannelMessages(),
    begins=("<|start|>", "<|channel|>"),
    ends=("<|end|>", "<|return|>", "<|call|>"),
)
"""GPT-OSS (https://cookbook.openai.com/articles/openai-harmony)."""

HERMES = CallForm(
    ("hermes", "granite4"),
    template=("<tool_call>",),
    syntax=ObjectCalls(),
    begins=("<tool_call>",),
    ends=("</tool_call>",),
)
"""Hermes 2 Pro and later, Qwen 2.5 and Qwen 3, Granite 4."""

CALL_FORMS: tuple[CallForm, ...] = (
    HARMONY,
    # Qwen3-Coder, and Qwen 3.5 and later
    CallForm(
        ("qwen3_coder", "qwen3_xml", "mimo"),
        template=("<function=",),
        syntax=TaggedCalls(
            start="<function=",
            name_end=">",
            key_start="<parameter=",
            key_end=">",
            value_end="</parameter>",
            end="</function>",
            has_lines=True,
        ),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
    ),
    # GLM-4.5 and later
    CallForm(
        ("glm45", "glm47"),
        template=("<arg_key>",),
        syntax=TaggedCalls(
            key_start="<arg_key>",
            key_end="</arg_key>",
            value_start="<arg_value>",
            value_end="</arg_value>",
        ),
        begins=("<tool_call>",),
        ends=("</tool_call>",),
    ),
    # DeepSeek V3 and R1
    CallForm(
        ("deepseek_v3",),
        template=("<｜tool▁sep｜>",),
        template_too="```json",
        syntax=NamedCalls(
            start="<｜tool▁call▁begin｜>",
            kind="function<｜tool▁sep｜>",
            before_arguments="```json",
            end="```<｜tool▁call▁end｜>",
        ),
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
    ),
    CallForm(
        ("deepseek_v31",),
        template=("<｜tool▁sep｜>",),
        syntax=NamedCalls(
            start="<｜tool▁call▁begin｜>",
            before_arguments="<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
        ),
        begins=("<｜tool▁calls▁begin｜>",),
        ends=("<｜tool▁calls▁end｜>",),
    ),
    # Mistral: a list of objects up to version 3 of its tokenizers, then a name and its arguments
    CallForm(
        ("mistral",),
        template=("[TOOL_CALLS]",),
        syntax=ObjectCalls(),
        other=NamedCalls(id_mark="[CALL_ID]", before_arguments="[ARGS]", needs_mark=False),
        begins=("[TOOL_CALLS]",),
        opening="[",
    ),
    # Phi-4-mini: its template teaches the marks, and it writes the word all the same
    CallForm(
        ("phi4_mini_json",),
        template=("functools[", "<|/tool|>"),
        syntax=ObjectCalls(),
        begins=("functools", "<|tool_call|>"),
        ends=("<|/tool_call|>",),
    ),
    # Granite 3.0 has a token of its own for it, 3.1 writes it as text
    CallForm(
        ("granite",),
        template=("<|tool_call|>",),
        syntax=ObjectCalls(),
        begins=("<|tool_call|>", "<tool_call>"),
        ends=("</tool_call>",),
        opening="[",
    ),
    HERMES,
    # Llama 4, and Llama 3.2, ToolACE and others that write the list without marks
    CallForm(
        ("pythonic", "llama4_pythonic"),
        template=("<|python_start|>", "[func_name1(", "[func_name("),
        syntax=PythonCalls(),
        begins=("<|python_start|>",),
        ends=("<|python_end|>",),
        opening="[",
    ),
    # Llama 3.1 to 3.3
    CallForm(
        ("llama3_json", "llama4_json"),
        template=("<|python_tag|>", '"parameters"'),
        syntax=ObjectCalls(separator=";"),
        begins=("<|python_tag|>",),
        opening="{",
    ),
)
"""In the order in which a template is searched for them: some templates have the marks of two."""

DEMANDED = CallForm(
    (),
    template=(),
    syntax=ObjectCalls(),
    begins=(THINK_END,),
    shows_begin=True,
    opening="[",
)
"""The list of objects to which a grammar binds calls that the request demands. Thoughts may stand before it."""


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """A form in which models write reasoning before their answer."""

    names: tuple[str, ...]
    """vLLM's names of its parsers for it."""
    template: str
    """Text that a chat template that teaches it has; empty where none tells it from another form."""
    starts: tuple[str, ...] = (THINK_START,)
    ends: tuple[str, ...] = (THINK_END,)
    is_begun: bool = False
    """True if every completion begins inside the reasoning. Otherwise it does where its prompt ends with a start."""

    def is_begun_by(self, prompt: str) -> bool | None:
        """True if a completion begins inside the reasoning, by the end of its prompt; None if no reasoning may come."""
        ending = prompt.rstrip()
        if ending.endswith(self.ends):
            return None
        return self.is_begun or ending.endswith(self.starts)

    def is_continued_by(self, text: str) -> bool | None:
        """The same for a completion that continues this text of its own."""
        start = max((text.rfind(mark) for mark in self.starts), default=-1)
        end = max((text.rfind(mark) for mark in self.ends), default=-1)
        if start > end:
            return True
        return None if text.strip() else self.is_begun


HARMONY_REASONING = ReasoningForm(("openai_gptoss",), template="<|channel|>", starts=(), ends=())
"""Harmony's channel analysis, which is read with its calls."""

REASONING_FORMS: tuple[ReasoningForm, ...] = (
    HARMONY_REASONING,
    ReasoningForm(("mistral",), template="[THINK]", starts=("[THINK]",), ends=("[/THINK]",)),
    ReasoningForm(("seed_oss",), template="<seed:think>", starts=("<seed:think>",), ends=("</seed:think>",)),
    ReasoningForm(
        ("granite",),
        template="Here is my thought process:",
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    ),
    ReasoningForm(
        ("qwen3", "deepseek_v3", "glm45", "glm47", "holo2", "mimo", "nemotron_v3", "olmo3"),
        template=THINK_END,
    ),
    ReasoningForm(("deepseek_r1", "minimax_m2", "step3"), template="", is_begun=True),
)
"""In the order in which a template is searched for them."""

FormT = TypeVar("FormT", CallForm, ReasoningForm)


def _by_name(forms: tuple[FormT, ...]) -> dict[str, FormT]:
    return {name: form for form in forms for name in form.names}


CALL_PARSERS: Mapping[str, CallForm] = _by_name(CALL_FORMS)
REASONING_PARSERS: Mapping[str, ReasoningForm] = _by_name(REASONING_FORMS)
"""The forms by vLLM's names."""


def call_form(name: str, template: str) -> CallForm | None:
    """The form of calls with this name; under `auto` the template's, or hermes where it says nothing of calls."""
    if name != AUTO:
        return CALL_PARSERS.get(name)
    return next((form for form in CALL_FORMS if form.is_taught_by(template)), HERMES)


def reasoning_form(name: str, template: str) -> ReasoningForm | None:
    """The form of reasoning with this name; under `auto` the template's, or None where it says nothing of reasoning."""
    if name != AUTO:
        return REASONING_PARSERS.get(name)
    known = (form for form in REASONING_FORMS if form.template)
    return next((form for form in known if form.template in template), None)


def known_name(names: Mapping[str, object]) -> Callable[[str], str]:
    """Make a check that a parser's name is one of these."""

    def check(given: str) -> str:
        known = (AUTO, NONE, *names)
        if given in known:
            return given
        near = get_close_matches(given.replace("-", "_").lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"it must be one of {', '.join(known)}{hint}")

    return check
