"""From token ids to text as they arrive: no partial characters, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Decoders write this for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text incrementally. Bytes of an unfinished character wait for the ids that finish it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._waiting.append(token_id)
            return ""
        self._waiting.clear()
        return text

    def finish(self) -> str:
        """Text of the ids that still wait, without bytes that never became a character."""
        text: str = self._tokenizer.decode(self._waiting)
        self._waiting.clear()
        return text.rstrip(_REPLACEMENT)


class StopStrings:
    """Finds the first stop string in a stream of text, and holds back text that may begin one."""

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        """Look for these strings. With `included`, the text ends after the stop string, otherwise before it."""
        self._stop = stop
        self.included = included
        self._held = ""
        self.found: str | None = None
        """The stop string that was met."""

    @property
    def are_sought(self) -> bool:
        """True if there are any."""
        return bool(self._stop)

    @property
    def met(self) -> bool:
        """True if one of the stop strings was met."""
        return self.found is not None

    def push(self, text: str) -> str:
        """The text that is now certain to be part of the completion."""
        if not self._stop:
            return text
        text = self._held + text
        starts = [(start, string) for string in self._stop if (start := text.find(string)) >= 0]
        if starts:
            # Of two that begin together, the one that the request named first.
            start, self.found = min(starts, key=itemgetter(0))
            self._held = ""
            return text[: start + len(self.found) * self.included]
        held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back, since nothing follows it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without being all of it."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
