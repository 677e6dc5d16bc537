"""The pair's training texts: the sources of CPython's standard library, their functions, and the tokenizer."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Tests are as large as the library itself and repeat themselves; the others are generated tables, not code.
EXCLUDED_FOLDERS = {
    *("__pycache__", "encodings", "idlelib", "lib-dynload", "pydoc_data", "site-packages"),
    *("test", "tests", "idle_test"),
}
EXCLUDED_FILES = {"entities.py"}
EXCLUDED_PREFIX = "_sysconfigdata"

VOCABULARY_SIZE = 2048
"""Few, so that most of a small model's parameters are in its layers."""
END_OF_TEXT = "<|endoftext|>"
# The pair was not trained to chat. A chat becomes the text of its messages, which the model then continues.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\n' }}{% endif %}{{ message['content'] }}"
    "{% endfor %}"
)
# A word takes one leading space with it; a longer run of blanks is an indentation and stays whole, so that
# "\n        return" is three predictable tokens: the line's end, its indentation, the word.
SPLIT_PATTERN = r" ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|[\r\n]+|[ \t]+|\s+"

# Of held-out prompts.
MIN_PROMPT_TOKENS = 20
MAX_PROMPT_TOKENS = 120


@dataclass(frozen=True)
class SourceFile:
    """One module of the library: its path relative to the library's root, and its text."""

    name: str
    text: str


def read_corpus(*, held_out: bool = False) -> list[SourceFile]:
    """The running interpreter's standard library: the modules to learn from, or those that are held out, from which
    nothing learns, not even the tokenizer."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file for file in _source_files(root) if is_held_out(file.name) == held_out]


def is_held_out(name: str) -> bool:
    """True if a file is held out: a property of its name alone, so it is the same on every machine."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < 4


def _source_files(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        if relative.name in EXCLUDED_FILES or relative.name.startswith(EXCLUDED_PREFIX):
            continue
        # A module states its own encoding; the few that cannot be decoded are samples of broken files.
        with suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
            if text := file.read():
                yield SourceFile(relative.as_posix(), text)


def train_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Learn the vocabulary from the training texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        # All 256 bytes are in the vocabulary, so any text round-trips whatever the corpus held.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return with_chat(tokenizer, max_length)


def with_chat(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder, with the template of the demo models."""
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    found.chat_template = CHAT_TEMPLATE
    return found


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a finished model folder."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


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
            if (definition.end_lineno or end) - end >= 2:
                first = definition.lineno - 1
                source = textwrap.dedent("\n".join(lines[first : definition.end_lineno]))
                beginning = "\n".join(source.splitlines()[: end - first])
                yield Function(name, file.name, source, beginning, ast.get_docstring(definition) is not None)


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
        for function in sorted(found.values(), key=lambda f: not f.has_docstring)[:16]
    ]
    return [{"name": f.name, "source_file": f.source_file, "prompt": f.beginning} for f in chosen]


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _beginning_end(definition: Definition) -> int:
    """The last line of the first statement; of a compound one (`if`, `for`) only its first line."""
    statements = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    if not statements:
        return definition.end_lineno or definition.lineno
    first = statements[0]
    is_compound = hasattr(first, "body")
    return first.lineno if is_compound else first.end_lineno or first.lineno
