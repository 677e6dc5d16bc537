"""Grammars of requests: tried within bounds in a process of their own, then compiled for the target's tokens.

The library's limits bound most of what a grammar can ask for, but not the time of its compilation: a thousand lines
can take minutes. So `python -m tandem_coordinator.requests.grammars` compiles each first, for the 256 bytes in place
of a model's tokens, before any service compiles it. See `tandem.bounded.worker`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tandem.bounded.process import BoundedProcess, JobError
from tandem.bounded.worker import work
from tandem.errors import InvalidRequestError
from tandem.model.grammar import (
    Grammars,
    GrammarState,
    definition,
    grammar_limits,
    make_refusal,
    try_first_step,
)
from tandem.model.types import Grammar, GrammarKind


class CheckedGrammars:
    """Compiles what strangers wrote."""

    def __init__(self, grammars: Grammars) -> None:
        """`grammars` compiles for the target's tokens, as the services do."""
        self._grammars = grammars
        self._process = BoundedProcess(__name__)
        self._known: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        """Refusals by scope, kind and source; an accepted grammar has an empty one."""
        self._tried: dict[tuple[str, str, str], asyncio.Task[str]] = {}
        """Those that are tried now: requests of a scope with one grammar wait for one trial."""

    async def open(self, grammar: Grammar, scope: str) -> GrammarState:
        """The state before the first token. A scope's grammars are known to its own requests alone."""
        key = scope, grammar.kind.value, grammar.source
        if key not in self._known:
            if (trial := self._tried.get(key)) is None:
                trial = self._tried[key] = asyncio.create_task(self._refusal(grammar))
                trial.add_done_callback(lambda _: self._tried.pop(key, None))
            # One that no longer waits must not end it for the others.
            self._known[key] = await asyncio.shield(trial)
            if len(self._known) > 1024:
                self._known.popitem(last=False)
        if refusal := self._known[key]:
            raise InvalidRequestError(refusal)
        return await self._grammars.open(grammar, scope)

    async def _refusal(self, grammar: Grammar) -> str:
        """Why it cannot be used; empty if it can."""
        try:
            answer = await self._process.answer({"kind": grammar.kind.value, "source": grammar.source})
        except JobError as error:
            return str(make_refusal(grammar, f"it {error}"))
        return str(answer.get("refused", ""))

    def close(self) -> None:
        self._process.close()


# ---- the process that tries them


def _try_grammar(tokenizer: LLTokenizer, job: Any) -> dict[str, Any]:
    """Empty if the grammar can be compiled."""
    grammar = Grammar(GrammarKind(job["kind"]), job["source"])
    try:
        matcher = LLMatcher(tokenizer, definition(grammar), log_level=0, limits=grammar_limits())
    except InvalidRequestError as error:
        return {"refused": str(error)}
    try_first_step(matcher)
    return {"refused": str(make_refusal(grammar, matcher.get_error()))} if matcher.is_error() else {}


if __name__ == "__main__":
    work(partial(_try_grammar, LLTokenizer("byte")))
