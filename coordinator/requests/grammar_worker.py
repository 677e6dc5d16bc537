"""The process that tries a grammar before any service compiles it: `python -m coordinator.requests.grammar_worker`.

The library's limits bound most of what a grammar can ask for, but not the time of its compilation: a thousand lines
can take minutes. So each is compiled here first, for the 256 bytes in place of a model's tokens. See
`tandem.bounded.worker`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tandem.bounded.worker import work
from tandem.errors import InvalidRequestError
from tandem.grammar import definition, grammar_limits, refused
from tandem.types import Grammar, GrammarKind


def _tried(tokenizer: LLTokenizer, job: Any) -> dict[str, Any]:
    """Empty if the grammar can be compiled."""
    grammar = Grammar(GrammarKind(job["kind"]), job["source"])
    try:
        matcher = LLMatcher(tokenizer, definition(grammar), log_level=0, limits=grammar_limits())
    except InvalidRequestError as error:
        return {"refused": str(error)}
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"refused": str(refused(grammar, matcher.get_error()))} if matcher.is_error() else {}


if __name__ == "__main__":
    work(partial(_tried, LLTokenizer("byte")))
