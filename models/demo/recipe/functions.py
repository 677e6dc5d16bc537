"""Functions of the corpus: the draft learns from the text that the target writes after their beginnings.

Acceptance is measured on the beginnings of those that are held out.
"""

import ast
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from transformers import PreTrainedTokenizerFast

from models.demo.recipe.corpus import SourceFile

MIN_PROMPT_TOKENS = 20
MAX_PROMPT_TOKENS = 120
MIN_REMAINING_LINES = 2
MAX_PROMPTS_PER_FILE = 16

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A function's whole source and its beginning: signature, docstring and first statement."""

    name: str
    source_file: str
    source: str
    beginning: str
    has_docstring: bool


def functions(files: Iterable[SourceFile]) -> Iterator[Function]:
    """Every function that goes on for some lines after its beginning."""
    for file in files:
        lines = file.text.splitlines()
        for name, definition in _definitions(ast.parse(file.text), ""):
            end = _beginning_end(definition)
            if (definition.end_lineno or end) - end >= MIN_REMAINING_LINES:
                first = definition.lineno - 1
                source = textwrap.dedent("\n".join(lines[first : definition.end_lineno]))
                beginning = "\n".join(source.splitlines()[: end - first])
                yield Function(name, file.name, source, beginning, _has_docstring(definition))


def held_out_prompts(files: Iterable[SourceFile], tokenizer: PreTrainedTokenizerFast) -> list[dict[str, str]]:
    """Distinct function beginnings of 20 to 120 tokens, at most 16 of a file so that no file dominates."""
    by_file: dict[str, dict[str, Function]] = defaultdict(dict)
    for function in functions(files):
        count = len(tokenizer(function.beginning)["input_ids"])
        if MIN_PROMPT_TOKENS <= count <= MAX_PROMPT_TOKENS:
            by_file[function.source_file].setdefault(function.beginning, function)
    chosen = [
        function
        for found in by_file.values()
        for function in sorted(found.values(), key=lambda f: not f.has_docstring)[:MAX_PROMPTS_PER_FILE]
    ]
    return [{"name": f.name, "source_file": f.source_file, "prompt": f.beginning} for f in chosen]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _has_docstring(definition: Definition) -> bool:
    return ast.get_docstring(definition, clean=False) is not None


def _beginning_end(definition: Definition) -> int:
    """The last line of the first statement; of a compound one (`if`, `for`) only its first line."""
    statements = definition.body[1:] if _has_docstring(definition) else definition.body
    if not statements:
        return definition.end_lineno or definition.lineno
    first = statements[0]
    is_compound = hasattr(first, "body")
    return first.lineno if is_compound else first.end_lineno or first.lineno
