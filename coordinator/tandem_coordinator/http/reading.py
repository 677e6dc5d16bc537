"""The forms in which the answer to a chat is read: which of them a request needs, and where its prompt leaves off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from tandem.model.types import Grammar
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.http.schema import ChatBody
from tandem_coordinator.http.tools import functions_of
from tandem_coordinator.parsers.forms import DEMANDED, HARMONY, CallForm, ReasoningForm
from tandem_coordinator.parsers.reader import CompletionReader

_END_OF_PROMPT = 32
"""Tokens at the end of a prompt among which a mark of reasoning is looked for; templates write it there in a few."""


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """The forms in which an answer is read."""

    calls: CallForm | None
    reasoning: ReasoningForm | None

    @classmethod
    def of(cls, body: ChatBody, grammar: Grammar | None, chats: Chats) -> AnswerForms:
        """Those of the model that the request needs. A grammar binds calls that it demands, or else its text."""
        if body.may_call and body.tool_choice not in (None, "auto"):
            return cls(DEMANDED, chats.reasoning_form)
        calls = chats.call_form
        is_needed = body.may_call or (calls is HARMONY and grammar is None)
        return cls(calls if is_needed else None, chats.reasoning_form)

    @property
    def is_empty(self) -> bool:
        """True if the whole text is content."""
        return self.calls is None and (self.reasoning is None or not self.reasoning.starts)

    def has_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """True if the tokenizer has one of the marks as a special token, so that the text must show those."""
        marks: list[str] = []
        if self.calls is not None:
            marks += self.calls.marks
        if self.reasoning is not None:
            marks += (*self.reasoning.starts, *self.reasoning.ends)
        known = [tokenizer.token_to_id(mark) for mark in marks]
        return any(
            not tokenizer.decode([token_id], skip_special_tokens=True)
            for token_id in known
            if token_id is not None
        )

    def readers(
        self, body: ChatBody, prompt: Sequence[int], tokenizer: Tokenizer
    ) -> Callable[[], CompletionReader]:
        """Make readers of completions of this prompt."""
        has_begun: bool | None = False
        if self.reasoning is not None and body.continue_final_message:
            has_begun = self.reasoning.is_continued_by(str(body.messages[-1].content))
        elif self.reasoning is not None:
            ending = tokenizer.decode([*prompt[-_END_OF_PROMPT:]], skip_special_tokens=False)
            has_begun = self.reasoning.is_begun_by(ending)
        functions = functions_of(body.tools) if body.may_call else {}
        return lambda: CompletionReader(
            self.calls,
            self.reasoning,
            has_begun_reasoning=has_begun,
            functions=functions,
            may_call=body.may_call,
        )
